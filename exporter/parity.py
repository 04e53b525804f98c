"""Compare an exported model with the network it was made from.

Numbers are compared first, then what a user notices: Recall@1, and whether the nearest neighbour is
still the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from exporter.results import ParityResult
from retrieval import neighbours
from retrieval.distances import TIE, row_scores
from retrieval.errors import DmlError
from retrieval.neighbours import NEGATIVE, POSITIVE
from retrieval.number_format import percent
from retrieval.problem import from_arrays
from retrieval.resources import StageProgress, slices
from trainer.run.device import in_layout, to_input

TOLERANCE = {"fp32": 0.1, "fp16": 0.5, "int8": 1.0}
"""Points of Recall@1 that a model of each precision may lose."""
SAME = {"fp32": 0.01, "fp16": 0.1}
"""Largest relative difference of a model that is exported correctly; usual values are 1e-6 and
1e-3. A cosine would not show embeddings of a wrong length. 8 bits are too coarse for a limit."""

Run = Callable[[np.ndarray], np.ndarray]  # uint8 (B, H, W, 3) -> (B, D)


def check(
    network: nn.Module,
    run: Run,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    batch_sizes: Sequence[int] = (1, 3, 32),
    device: str = "auto",
    progress: StageProgress | None = None,
) -> ParityResult:
    """Compare on real images (N, H, W, 3), uint8, with labels (N,), and on random images.

    run: what computes embeddings with the model.
    device: the device that searches nearest neighbours, as in `retrieval.evaluation.Settings`.
    """
    if len(images) < 2:
        raise DmlError(
            f"Parity cannot be checked on {len(images)} images.",
            "Every image is a query that searches the others.",
            "Name a data set with two images or more that can be read: --data PATH",
        )
    rng = np.random.default_rng(0)
    pieces = [
        batch
        for size in batch_sizes
        for batch in (
            rng.integers(0, 256, (size, *images.shape[1:]), np.uint8),
            images[rng.integers(0, len(images), size)],
        )
    ]
    step = 32 if images[0].nbytes < 3 * 128 * 128 else 8  # larger batches exceed the CPU's cache
    real = [images[part] for part in slices(len(images), step)]
    pieces += real
    rows: list[np.ndarray] = []
    for compute in (torch_runner(network), run):  # in turn: idle threads would slow it down
        for batch in pieces:
            rows.append(compute(batch))
            if progress:
                progress("comparing the model with the network", len(rows), 2 * len(pieces))
    sides = rows[: len(pieces)], rows[len(pieces) :]
    absolute, relative, cosines = zip(*map(difference, *sides), strict=True)
    ours, theirs = (np.concatenate(side[-len(real) :]) for side in sides)
    ours_recall, ours_nearest = retrieved(ours, labels, device)
    theirs_recall, theirs_nearest = retrieved(theirs, labels, device)
    return {
        "max_abs": max(absolute),
        "max_rel": max(relative),
        "min_cosine": min(cosines),
        "recall_torch": ours_recall,
        "recall_onnx": theirs_recall,
        "agreement": float(agreement(ours, ours_nearest, theirs_nearest).mean()),
        "images": len(images),
        "batches": list(batch_sizes),
    }


def torch_runner(network: nn.Module) -> Run:
    """A copy of a network as a function of uint8 (B, H, W, 3), in evaluation mode."""
    # channels_last is a third faster on a CPU, and the layout of the images.
    network = in_layout(copy.deepcopy(network).eval(), torch.channels_last)
    device = next(network.buffers()).device

    def run(batch: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            pixels = torch.tensor(np.ascontiguousarray(batch)).permute(0, 3, 1, 2)
            found = network(to_input(pixels, device)).float().cpu().numpy()
        if not np.isfinite(found).all():
            raise DmlError(
                "The network gives NaN or infinite embeddings.",
                "Its training has diverged.",
                "Export another checkpoint, or train with a smaller learning rate.",
            )
        return found

    return run


def difference(right: np.ndarray, given: np.ndarray) -> tuple[float, float, float]:
    """Largest absolute difference, largest relative difference of a row, lowest cosine of rows.

    Relative to the length of the row, or to a hundredth of the mean length if that is more: a row
    of nearly zero has no digits to compare.
    """
    if right.shape != given.shape:
        raise DmlError(
            f"The model gives embeddings of shape {given.shape}, the network {right.shape}.",
            "The model was not made from this network.",
            "Export it again: dmltool export RUN --force",
        )
    right, given = right.astype(np.float64), given.astype(np.float64)
    delta = given - right
    length = np.linalg.norm(right, axis=1)
    least = max(float(length.mean()) / 100, 1e-12)
    relative = np.linalg.norm(delta, axis=1) / np.maximum(length, least)
    both = length * np.linalg.norm(given, axis=1)
    cosine = np.where(both > 0, (right * given).sum(1) / np.maximum(both, 1e-300), 0)
    cosine[(delta == 0).all(1)] = 1  # two rows of zeros as well
    return float(np.abs(delta).max()), float(relative.max()), float(cosine.min())


def retrieved(
    vectors: np.ndarray, labels: np.ndarray, device: str = "cpu"
) -> tuple[float, np.ndarray]:
    """Recall@1 by cosine, each row against all others, and the nearest other row of each (N,).

    A row that is not finite has no direction: its cosine is taken as 0.
    """
    finite = np.isfinite(vectors).all(axis=1, keepdims=True)
    problem = from_arrays(np.where(finite, vectors, 0), labels)
    found = neighbours.nearest(problem, 1, "cos", device=device)
    ids, squared = found.ids[:, :, 0], found.squared[:, :, 0]  # (N, 2): positive, negative
    cosine = found.space.score(squared)
    hits = cosine[:, POSITIVE] > cosine[:, NEGATIVE] + TIE  # a tie never helps
    # The nearer of both; of equals, the one that comes first.
    side = np.lexsort((ids, squared))[:, 0]
    return float(hits.mean()), ids[np.arange(len(ids)), side]


def agreement(vectors: np.ndarray, nearest: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(N,) whether the other nearest row is the same one, or one that is equally near."""
    mine, theirs = (row_scores(vectors, vectors[index], "cos") for index in (nearest, other))
    return (nearest == other) | (theirs >= mine - TIE)


def judge(parity: ParityResult, precision: str, max_recall_drop: float | None = None) -> None:
    """Raise a DmlError with the numbers if the model is not as good as the network.

    max_recall_drop: allowed points of Recall@1, instead of the TOLERANCE of the precision.
    """
    allowed = TOLERANCE[precision] if max_recall_drop is None else max_recall_drop
    before, after = parity["recall_torch"], parity["recall_onnx"]
    lost = 100 * before - 100 * after
    numbers = (
        f"Recall@1 {percent(before)} with torch, {percent(after)} with ONNX "
        f"({parity['images']:,} images); the nearest neighbour agrees for "
        f"{percent(parity['agreement'], 1)} %; lowest cosine {parity['min_cosine']:.7f}, largest "
        f"difference {parity['max_abs']:.2g} ({parity['max_rel']:.2g} relative)."
    )
    # Written so that NaN fails; 1e-9: a tenth of a point is no binary number.
    if not lost <= allowed + 1e-9:
        raise DmlError(
            f"The {precision} model loses {lost:.2f} points of Recall@1; {allowed:g} are allowed.",
            numbers,
            "Export without rounding: --precision fp32"
            if precision != "fp32"
            else "Allow more, if you know why: --max-recall-drop POINTS",
        )
    if precision in SAME and not parity["max_rel"] <= SAME[precision]:
        raise DmlError(
            f"The {precision} model does not compute what the network computes: a relative "
            f"difference of {parity['max_rel']:.2g}; at most {SAME[precision]:g} is expected.",
            numbers,
            "Export without rounding: --precision fp32"
            if precision != "fp32"
            else "Please report it, with the versions of torch and onnxruntime.",
        )
