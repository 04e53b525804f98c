"""Convert a float32 model to float16 or int8, and compare the precisions.

Embeddings of different precisions must not be mixed: queries and gallery need the same model.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from exporter.onnx import untrusted
from exporter.onnx.metadata import PREFIX, to_properties
from exporter.onnx.model import Model
from exporter.onnx.providers import load_runtime
from exporter.onnx.session import TimedSession
from exporter.onnx.trace import save
from exporter.parity import retrieved
from exporter.results import PrecisionResult
from retrieval.errors import DmlError
from retrieval.files import temporary_folder
from retrieval.resources import StageProgress, slices

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

# What turns pixels into the network's input, and embeddings into ones of length 1. In few bits
# these would lose more than all the layers between them, and they cost next to nothing.
PIXELS = {"Cast", "Transpose", "Div", "Sub", "Mul", "Add", "ReduceMean", "Identity", "Expand"}
LENGTHS = {"Div", "ReduceL2", "LpNormalization", "Clip", "Max", "Expand", "Shape", "Identity"}

POOLING = {
    "AveragePool",
    "BatchNormalization",
    "Cast",
    "Flatten",
    "Gather",
    "Gemm",
    "GlobalAveragePool",
    "LayerNormalization",
    "ReduceMean",
    "Reshape",
    "Squeeze",
    "Transpose",
}


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
    source: Model, target: Path, images: np.ndarray, progress: StageProgress | None = None
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
    place = tempfile.TemporaryDirectory(prefix="dmltool-", dir=temporary_folder())
    with place as folder, _calm_logging():
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
) -> list[PrecisionResult]:
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
        rows.append(row(name, model.path.stat().st_size, speed, recall, changed))
    return rows


def row(
    name: str, size: int, images_per_second: float, recall: float, changed: float
) -> PrecisionResult:
    """One precision in the comparison."""
    return {
        "precision": name,
        "bytes": size,
        "images_per_second": images_per_second,
        "recall": recall,
        "changed": changed,
    }


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
    kept = {key: value for key, value in source.properties.items() if key != f"{PREFIX}parity"}
    new = to_properties({"precision": precision, "quantization": how})
    return save(proto, target, kept | new)


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


# Parts of the graph


def head(model: ModelProto) -> list[NodeProto]:
    """The nodes between the pixels and the first layer."""
    reached = {value.name for value in model.graph.input}
    constants = {tensor.name for tensor in model.graph.initializer} | {""}
    reached -= constants
    found = []
    for node in model.graph.node:  # in the order of computation
        given = set(node.input) - constants
        if node.op_type in PIXELS and given and given <= reached:
            found.append(node)
            reached.update(node.output)
    return found


def joints(model: ModelProto) -> tuple[list[NodeProto], list[str]]:
    """The nodes that concatenate the embeddings of an ensemble, and the names of their inputs."""
    return _before(model, [value.name for value in model.graph.output], {"Concat"})


def tail(model: ModelProto) -> list[NodeProto]:
    """The nodes that normalise and concatenate embeddings; most models have none."""
    joined, ends = joints(model)
    return joined + _before(model, ends, LENGTHS)[0]


def _before(
    model: ModelProto, names: list[str], kinds: set[str]
) -> tuple[list[NodeProto], list[str]]:
    """The nodes of these kinds that lead directly to the values, and the inputs of those nodes."""
    maker = {name: node for node in model.graph.node for name in node.output}
    found, ends = {}, []
    while names:
        node = maker.get(name := names.pop())
        if node is None or node.op_type not in kinds:
            ends.append(name)
        elif node.name not in found:
            found[node.name] = node
            names += node.input
    return list(found.values()), ends


def last(model: ModelProto) -> list[NodeProto]:
    """The tail and the projection and pooling before it.

    They compute the embedding itself, and 8 bits are too coarse to tell near neighbours apart.
    """
    maker = {name: node for node in model.graph.node for name in node.output}
    found = {node.name: node for node in tail(model)}
    for end in joints(model)[1]:
        node, products = maker.get(end), 0
        while node is not None and node.op_type in LENGTHS | POOLING:
            products += node.op_type == "Gemm"
            if products > 1:
                break
            found[node.name] = node
            node = maker.get(node.input[0])
    return list(found.values())


def straighten(model: ModelProto) -> None:
    """Clean up after the float16 converter.

    Removes casts to float16 and back between two nodes that compute in float32, and sorts the nodes
    in the order of computation.
    """
    from onnx import TensorProto

    nodes = list(model.graph.node)
    rounded = {n.output[0]: n.input[0] for n in nodes if n.name.endswith("_cast_to_fp16_node")}
    way = {}  # from a value that is cast back to float32, to what it was before
    for node in nodes:
        widens = node.op_type == "Cast" and node.attribute[0].i == TensorProto.FLOAT
        if widens and node.input[0] in rounded:
            way[node.output[0]] = rounded[node.input[0]]
    ends = {value.name for value in model.graph.output}
    renamed = {way[name]: name for name in way if name in ends}
    nodes = [n for n in nodes if n.output[0] not in way]
    for node in nodes:
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                name = way.get(name, name)
                names[at] = renamed.get(name, name)
    used = {name for node in nodes for name in node.input} | ends
    nodes = [n for n in nodes if n.op_type != "Cast" or n.output[0] in used]
    del model.graph.node[:]
    del model.graph.value_info[:]  # some of them wrong by now
    model.graph.node.extend(in_order(nodes))


def in_order(nodes: list[NodeProto]) -> list[NodeProto]:
    """Sort nodes so that each one follows its inputs, otherwise in the given order."""
    maker = {name: node.name for node in nodes for name in node.output}
    by_name = {node.name: node for node in nodes}
    done: dict[str, NodeProto] = {}
    stack = [node.name for node in reversed(nodes)]
    while stack:
        name = stack[-1]
        needs = {maker[i] for i in by_name[name].input if i in maker} - done.keys()
        if name in done or not needs:
            done.setdefault(name, by_name[name])
            stack.pop()
        else:
            stack += sorted(needs)
    return list(done.values())
