"""Convert a float32 model to float16 or int8, and compare the precisions.

Embeddings of different precisions must not be mixed: queries and gallery need the same model.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from exporter.onnx import untrusted
from exporter.onnx.metadata import PREFIX, to_properties
from exporter.onnx.model import Model
from exporter.onnx.nodes import head, last, straighten, tail
from exporter.onnx.providers import load_runtime
from exporter.onnx.session import TimedSession
from exporter.onnx.trace import clean, save, set_properties
from exporter.parity import retrieved
from retrieval.errors import DmlError
from retrieval.resources import StageProgress, slices

if TYPE_CHECKING:
    from onnx import ModelProto


def to_fp16(source: Model, target: Path) -> Model:
    """Write a model with float16 weights and activations; input and output keep their types."""
    _, float16 = _tools()
    model = source.load()
    # The converter would cast weights whose types are listed; it infers the others itself.
    del model.graph.value_info[:]
    blocked = [node.name for node in (*head(model), *tail(model))]
    with _calm_logging():
        half = float16.convert_float_to_float16(model, keep_io_types=True, node_block_list=blocked)
    straighten(half)
    return _finish(half, source, target, "fp16", {"weights": "float16", "activations": "float16"})


def to_int8(
    source: Model,
    target: Path,
    images: np.ndarray,
    progress: StageProgress | None = None,
) -> Model:
    """Write a model with convolutions and matrix products in 8 bits (static quantisation).

    images: training images, uint8 (N, H, W, 3). The smallest and the largest number that each layer
    computes for them become the ends of its scale.
    """
    prepared = source.preprocessing
    assert prepared is not None, "a model of dmltool"
    if not len(images):
        raise DmlError(
            "There are no images to calibrate with.",
            "8-bit scales are found from training images.",
            "Use a data set with a training split, or --precision fp16.",
        )

    def feeds() -> Iterator[dict[str, np.ndarray]]:
        for part in slices(len(images), 8):
            if progress:
                progress("calibrating", part.start, len(images))
            yield {source.input_name: prepared.to_input(images[part])}

    tools, _ = _tools()
    model = source.load()
    spared = [node.name for node in (*head(model), *last(model))]
    reader = SimpleNamespace(get_next=partial(next, feeds(), None))
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
        small = untrusted.parse(untrusted.read_bytes(written), written)
    how = {
        "format": "QDQ, static",
        "activations": "uint8",
        "weights": "int8 per channel, 7 bits used",
        "calibration_images": len(images),
    }
    return _finish(small, source, target, "int8", how)


# Comparison


@dataclass(frozen=True)
class Row:
    """One precision in the comparison."""

    precision: str
    bytes: int
    images_per_second: float
    recall: float
    """Recall@1 by cosine, 0 to 1."""
    changed: float
    """Share of images whose nearest neighbour differs from that of the first model."""


def compare(
    models: Mapping[str, Model],
    images: np.ndarray,
    labels: np.ndarray,
    *,
    provider: str = "auto",
    threads: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    progress: StageProgress | None = None,
) -> list[Row]:
    """Compare size, speed and retrieval of models on the same images (N, H, W, 3).

    device: the device that searches nearest neighbours.
    """
    sessions = {name: TimedSession(model, provider, threads) for name, model in models.items()}
    batches = [images[part] for part in slices(len(images), batch_size)]
    found: dict[str, list[np.ndarray]] = {name: [] for name in sessions}
    for session in sessions.values():
        session.run(batches[0])  # the first run allocates
    for done, batch in enumerate(batches, 1):  # in turn: a busy moment hits all alike
        for name, session in sessions.items():
            found[name].append(session.run(batch))
        if progress:
            progress("comparing precisions", done, len(batches))
    rows, first = [], None
    for name, model in models.items():
        recall, nearest = retrieved(np.concatenate(found[name]), labels, device)
        first = nearest if first is None else first
        speed = sessions[name].images_per_second
        changed = float((nearest != first).mean())
        rows.append(Row(name, model.path.stat().st_size, speed, recall, changed))
    return rows


def _tools() -> tuple[ModuleType, ModuleType]:
    """ONNX Runtime's quantization and float16, imported without their changes to sys.path."""
    load_runtime()  # silences its logger
    path = sys.path.copy()
    try:
        from onnxruntime import quantization
        from onnxruntime.transformers import float16
    finally:
        sys.path[:] = path
    return quantization, float16


def _finish(
    proto: ModelProto, source: Model, target: Path, precision: str, how: Mapping[str, object]
) -> Model:
    """Write a graph with the metadata of its source, except for the parity, which has changed."""
    clean(proto)
    kept = {key: value for key, value in source.properties.items() if key != f"{PREFIX}parity"}
    set_properties(proto, kept | to_properties({"precision": precision, "quantization": how}))
    return save(proto, target)


@contextmanager
def _calm_logging() -> Iterator[None]:
    """Silence ONNX Runtime's tools, which set up the root logger and write to it."""
    root = logging.getLogger()
    handler, disabled = logging.NullHandler(), root.manager.disable
    root.addHandler(handler)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.removeHandler(handler)
