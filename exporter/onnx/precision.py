"""Smaller models from a float32 one: float16 weights, or 8-bit arithmetic.

Embeddings of different precisions are not to be mixed: queries and gallery need the same model.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from exporter.onnx.metadata import PREFIX
from exporter.onnx.nodes import head, last, straighten, tail
from exporter.onnx.providers import load_runtime
from exporter.onnx.session import Model, Session, describe
from exporter.onnx.trace import clean, save, set_properties
from exporter.parity import retrieved
from retrieval.errors import DmlError
from retrieval.resources import StageProgress

if TYPE_CHECKING:
    from onnx import ModelProto


def to_fp16(source: Path, target: Path) -> None:
    """Weights and activations in float16; what goes in and comes out keeps its type."""
    _, float16 = _tools()
    model = _load(source)
    # Types are inferred anyway; the converter takes those of weights for a reason to cast them.
    del model.graph.value_info[:]
    blocked = [node.name for node in (*head(model), *tail(model))]
    with _calm_logging():
        half = float16.convert_float_to_float16(model, keep_io_types=True, node_block_list=blocked)
    straighten(half)
    _finish(half, model, target, "fp16", {"weights": "float16", "activations": "float16"})


def to_int8(
    source: Path,
    target: Path,
    calibration: Iterable[np.ndarray],
    *,
    progress: StageProgress | None = None,
    total: int = 0,
) -> None:
    """Static quantisation: convolutions and products of matrices in 8 bits.

    calibration: batches of training images, uint8 (B, H, W, 3); the largest and smallest number
    that each layer gives for them become the ends of its scale. `total` is how many images there
    are, for progress.
    """
    tools, _ = _tools()
    model = _load(source)
    reader = Reader(describe(source), calibration, progress, total)
    spared = [node.name for node in (*head(model), *last(model))]
    with tempfile.TemporaryDirectory(prefix="dmltool-") as folder, _calm_logging():
        written = Path(folder) / "int8.onnx"
        tools.quantize_static(
            model,
            written,
            reader,
            quant_format=tools.QuantFormat.QDQ,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
            per_channel=True,
            # Weights of 7 bits: on CPUs without VNNI the sum of two products of 8 bits overflows.
            reduce_range=True,
            nodes_to_exclude=spared,
        )
        small = _load(written)
    how = {
        "format": "QDQ, static",
        "activations": "uint8",
        "weights": "int8 per channel, 7 bits used",
        "calibration_images": reader.images,
    }
    _finish(small, _load(source), target, "int8", how)


class Reader:
    """Calibration images as ONNX Runtime asks for them."""

    def __init__(
        self,
        model: Model,
        batches: Iterable[np.ndarray],
        progress: StageProgress | None,
        total: int,
    ) -> None:
        if model.preprocessing is None:
            raise DmlError(
                f"{model.path} does not say how images are prepared for it.",
                "Only models exported by dmltool can be quantised.",
                "Export a run: dmltool export RUN --precision int8",
            )
        self.model, self.batches = model, iter(batches)
        self.progress, self.total = progress, total
        self.images = 0

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self.batches, None)
        if batch is None:
            if not self.images:
                raise DmlError(
                    "There are no images to calibrate with.",
                    "8-bit scales are found from training images.",
                    "Use a data set with a training split, or --precision fp16.",
                )
            return None
        self.images += len(batch)
        if self.progress:
            self.progress("calibrating", self.images, max(self.total, self.images))
        return {self.model.input_name: self.model.preprocessing.to_input(batch)}


# Comparison


@dataclass(frozen=True)
class Row:
    precision: str
    bytes: int
    images_per_second: float
    recall: float
    """Recall@1 by cosine, 0 to 1."""
    changed: float
    """Share of images whose nearest neighbour is not that of the first model."""


def compare(
    models: Mapping[str, Path],
    images: np.ndarray,
    labels: np.ndarray,
    *,
    provider: str = "auto",
    threads: int | None = None,
    batch_size: int = 8,
    progress: StageProgress | None = None,
) -> list[Row]:
    """The models by precision, side by side on the same images (N, H, W, 3)."""
    sessions = {name: Session(describe(path), provider, threads) for name, path in models.items()}
    batches = [images[at : at + batch_size] for at in range(0, len(images), batch_size)]
    seconds = dict.fromkeys(sessions, 0.0)
    found: dict[str, list[np.ndarray]] = {name: [] for name in sessions}
    for session in sessions.values():
        session.run(batches[0])  # the first run allocates
    for done, batch in enumerate(batches, 1):  # in turn: a busy moment hits all alike
        for name, session in sessions.items():
            start = time.perf_counter()
            found[name].append(session.run(batch))
            seconds[name] += time.perf_counter() - start
        if progress:
            progress("comparing precisions", done, len(batches))
    rows, first = [], None
    for name, path in models.items():
        recall, nearest = retrieved(np.concatenate(found[name]), labels)
        first = nearest if first is None else first
        speed = len(images) / max(seconds[name], 1e-9)
        changed = float((nearest != first).mean())
        rows.append(Row(name, path.stat().st_size, speed, recall, changed))
    return rows


def _tools() -> tuple[ModuleType, ModuleType]:
    """ONNX Runtime's quantization and float16, which put their folder on sys.path and need it while
    they are imported."""
    load_runtime()  # told to be silent
    path = sys.path.copy()
    try:
        from onnxruntime import quantization
        from onnxruntime.transformers import float16
    finally:
        sys.path[:] = path
    return quantization, float16


def _load(path: Path) -> ModelProto:
    from exporter.onnx import untrusted

    return untrusted.parse(untrusted.read_bytes(path), path)


def _finish(
    model: ModelProto, source: ModelProto, target: Path, precision: str, how: Mapping[str, object]
) -> None:
    """Metadata of the source, except for what is no longer true: its parity."""
    clean(model)
    del model.metadata_props[:]
    kept = {e.key: e.value for e in source.metadata_props if e.key != f"{PREFIX}parity"}
    new = {"precision": precision, "quantization": json.dumps(how, sort_keys=True)}
    set_properties(model, kept | {PREFIX + key: value for key, value in new.items()})
    save(model, target)


@contextmanager
def _calm_logging() -> Iterator[None]:
    """ONNX Runtime's tools advise through the root logger, which they also set up."""
    root = logging.getLogger()
    handler, disabled = logging.NullHandler(), root.manager.disable
    root.addHandler(handler)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.removeHandler(handler)
