"""The embedder as an ONNX file: pixels in, embeddings out, nothing else needed beside it."""

from __future__ import annotations

import copy
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from exporter.onnx.metadata import INPUTS
from exporter.onnx.providers import quiet
from retrieval.errors import DmlError
from retrieval.files import whole_file
from trainer.networks.embedder import Embedder

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

INPUT, OUTPUT, BATCH = "images", "embeddings", "batch"
OPSET = 18
"""The lowest that the exporter writes natively, so the one that most runtimes read."""
LARGEST = 1_800_000_000
"""Bytes of weights; protobuf, and so a single file, ends at 2 GiB."""


class Pixels(nn.Module):
    """The embedder with what its callers do before and after it."""

    def __init__(self, embedder: Embedder, input: str, normalize: bool) -> None:
        super().__init__()
        self.embedder = embedder
        self.layout, self.dtype = INPUTS[input]
        self.normalize = normalize

    def forward(self, images: Tensor) -> Tensor:
        if self.layout == "nhwc":
            images = images.permute(0, 3, 1, 2).contiguous()
        if self.dtype == "uint8":
            images = images.float() / 255
        found = self.embedder(images)
        return nn.functional.normalize(found) if self.normalize else found


def write_model(
    embedder: Embedder,
    path: Path,
    *,
    size: int,
    properties: Mapping[str, str],
    input: str = "uint8-nhwc",
    normalize: bool = False,
) -> None:
    """Writes the network for images of size x size, for any number of them at once.

    input: uint8-nhwc, bytes (B, H, W, 3); float-nchw, numbers from 0 to 1 (B, 3, H, W). Scaling and
    the normalisation of the input are inside, and l2 normalisation of the embeddings on demand.
    properties: the metadata of the file. The same network gives the same bytes.
    """
    model = traced(embedder, size, input, normalize)
    clean(model)
    set_properties(model, properties)
    save(model, path)


def traced(embedder: Embedder, size: int, input: str, normalize: bool) -> ModelProto:
    check_weights(embedder)
    # Where the weights lie, and how, must not show in the file.
    network = copy.deepcopy(embedder).cpu().to(memory_format=torch.contiguous_format)
    layout, dtype = INPUTS[input]
    # Two images: the exporter takes a batch of one for a constant.
    shape = (2, size, size, 3) if layout == "nhwc" else (2, 3, size, size)
    example = torch.zeros(shape, dtype=getattr(torch, dtype))
    try:
        with torch.no_grad(), _silence(), _interruptible():
            program = torch.onnx.export(
                Pixels(network, input, normalize).eval(),
                (example,),
                dynamo=True,
                dynamic_shapes=({0: BATCH},),
                input_names=[INPUT],
                output_names=[OUTPUT],
                opset_version=OPSET,
                external_data=False,
                verbose=False,  # None prints to stdout
            )
        return program.model_proto
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().split("\n", 1)[0]
        raise DmlError(
            "The network cannot be exported to ONNX.",
            f"The exporter of torch says: {reason[:300].rstrip('.')}.",
            "Train one of the backbones that `dmltool list backbones` names.",
        ) from error


def check_weights(module: nn.Module) -> None:
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
    total = sum(t.numel() * t.element_size() for t in tensors)
    if total > LARGEST:
        raise DmlError(
            f"The network is too large for one ONNX file: {total / 1e9:.1f} GB of weights.",
            f"A file holds {LARGEST / 1e9:.1f} GB.",
            "Embed with torch instead: --no-onnx --backend torch",
        )


def clean(model: ModelProto) -> None:
    """Takes out what the exporter notes about its own work: local paths and lines of source."""
    model.doc_string = ""
    for graph in _graphs(model.graph):
        graph.doc_string = ""
        del graph.metadata_props[:]
        for part in (
            *graph.node,
            *graph.input,
            *graph.output,
            *graph.value_info,
            *graph.initializer,
        ):
            part.doc_string = ""
            del part.metadata_props[:]
    for function in model.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        for node in function.node:
            node.doc_string = ""
            del node.metadata_props[:]


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
            for inner in attribute.graphs:
                yield from _graphs(inner)


def set_properties(model: ModelProto, properties: Mapping[str, str]) -> None:
    """The metadata of the file, in order of their names; others of these names are replaced."""
    merged = {entry.key: entry.value for entry in model.metadata_props} | dict(properties)
    del model.metadata_props[:]
    for key in sorted(merged):
        model.metadata_props.add(key=key, value=merged[key])


def save(model: ModelProto, path: Path) -> None:
    """Checked, then written whole or not at all, with the lowest IR version that the opset allows:
    a runtime refuses files of a higher one than it knows, whatever is in them.
    """
    import onnx

    model.ir_version = onnx.helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True)
    onnx.checker.check_model(model, full_check=True)
    with whole_file(path) as file:
        file.write(model.SerializeToString(deterministic=True))


def add_properties(path: Path, properties: Mapping[str, str]) -> None:
    """Adds to the metadata of a file that dmltool wrote."""
    import onnx

    model = onnx.load(path)
    set_properties(model, properties)
    save(model, path)


@contextmanager
def _interruptible() -> Iterator[None]:
    """The exporter takes an interrupt for one of its own failures, and may try another way."""
    before, seen = signal.getsignal(signal.SIGINT), []
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if seen:
            raise KeyboardInterrupt


@contextmanager
def _silence() -> Iterator[None]:
    """Without the exporter's remarks on torch's own code, and its prints where it fails."""
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        yield
