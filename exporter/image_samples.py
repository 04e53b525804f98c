"""Choose and read the images that a model is compared and calibrated with."""

from __future__ import annotations

import numpy as np

from exporter.embedding.engine import read_images
from exporter.onnx.metadata import Preprocessing
from retrieval.embeddings import HELD_OUT
from retrieval.errors import DmlError
from trainer.data.datasets import DataSet

COMPARED = {"fp32": 500, "fp16": 1000, "int8": 1000}
"""Images of the comparison by precision. Float32 needs fewer: it is either exact or wrong."""
COMPARED_LARGE = 128
"""Images of the comparison if their sides are longer than 96 pixels."""
CALIBRATION = 128


def comparison_images(
    data: DataSet, prepared: Preprocessing, precision: str, skip_bad: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, H, W, 3) to compare a model and its network with, and their labels (N,).

    They are held-out images where there are any, and at least two of a class where there are two.
    """
    most = COMPARED[precision] if prepared.crop <= 96 else COMPARED_LARGE
    held_out = np.concatenate([data.rows(s) for s in HELD_OUT])
    rows = held_out if len(held_out) > 1 else np.arange(len(data))
    order = np.argsort(data.labels[rows], kind="stable")
    if len(rows) > most:
        labels = data.labels[rows][order]
        starts = np.flatnonzero(np.diff(labels, prepend=-1))
        each = max(2, most // len(starts))
        order = np.concatenate([part[:each] for part in np.split(order, starts[1:])])[:most]
    images, rows = readable(data, rows[order], prepared, skip_bad)
    return images, data.labels[rows]


def calibration_images(
    data: DataSet, prepared: Preprocessing, skip_bad: bool = False
) -> np.ndarray:
    """Training images (N, H, W, 3) for the scales of int8."""
    rows = data.rows("train")
    chosen = np.linspace(0, len(rows) - 1, min(CALIBRATION, len(rows))).astype(int)
    return readable(data, rows[chosen], prepared, skip_bad)[0]


def readable(
    data: DataSet, rows: np.ndarray, prepared: Preprocessing, skip_bad: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, H, W, 3) uint8 and the rows (n,) of those that can be read.

    An image that cannot be read is a DmlError unless `skip_bad`.
    """
    images, errors = read_images(data, rows, prepared.spec())
    first = next(filter(None, errors), None)
    if first and not skip_bad:
        fix = "Replace it, or continue without it: --skip-bad"
        raise DmlError(first.what, first.why, fix) from first
    good = np.array([error is None for error in errors], bool)
    return images[good], rows[good]
