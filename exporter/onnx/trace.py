"""Write a network as an ONNX file: pixels in, embeddings out, no other file needed."""

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

from exporter.onnx import INPUTS, untrusted
from exporter.onnx.model import Model, describe_graph
from exporter.onnx.providers import quiet
from retrieval import number_format
from retrieval.errors import DmlError
from retrieval.files import whole_file
from trainer.run.device import in_layout

if TYPE_CHECKING:
    from onnx import ModelProto

INPUT, OUTPUT, BATCH = "images", "embeddings", "batch"
OPSET = 18
"""The lowest version that the exporter writes natively, so that most runtimes read it."""
LARGEST = 1_800_000_000
"""Bytes of weights in one file; protobuf ends at 2 GiB."""


class Pixels(nn.Module):
    """A network together with the conversion of its input to numbers from 0 to 1."""

    def __init__(self, network: nn.Module, input: str) -> None:
        super().__init__()
        self.network = network
        self.layout, self.dtype = INPUTS[input]

    def forward(self, images: Tensor) -> Tensor:
        if self.layout == "nhwc":
            images = images.permute(0, 3, 1, 2).contiguous()
        if self.dtype == "uint8":
            images = images.float() / 255
        return self.network(images)


def write_model(
    network: nn.Module,
    path: Path,
    *,
    size: int,
    properties: Mapping[str, str],
    input: str = "uint8-nhwc",
) -> Model:
    """Write a network for batches of images of size x size.

    network: an `Embedder` or `Together`, which normalises its input itself.
    properties: the metadata of the file.
    input: uint8-nhwc, bytes (B, H, W, 3); or float-nchw, numbers from 0 to 1 (B, 3, H, W).

    The same network gives the same bytes.
    """
    return save(traced(network, size, input), path, properties)


def traced(network: nn.Module, size: int, input: str) -> ModelProto:
    total = sum(t.nbytes for t in (*network.parameters(), *network.buffers()))
    if total > LARGEST:
        raise DmlError(
            f"The network is too large for one ONNX file: {number_format.size(total)} of weights.",
            f"A file holds {number_format.size(LARGEST)}.",
            "Embed with torch instead: --no-onnx --backend torch",
        )
    # The device and the memory format of the weights must not change the file.
    network = in_layout(copy.deepcopy(network).cpu(), torch.contiguous_format)
    layout, dtype = INPUTS[input]
    # Two images: the exporter would turn a batch of one into a constant.
    shape = (2, size, size, 3) if layout == "nhwc" else (2, 3, size, size)
    example = torch.zeros(shape, dtype=getattr(torch, dtype))
    try:
        with torch.no_grad(), _silence(), _interruptible():
            program = torch.onnx.export(
                Pixels(network, input).eval(),
                (example,),
                dynamo=True,
                dynamic_shapes=({0: BATCH},),
                input_names=[INPUT],
                output_names=[OUTPUT],
                opset_version=OPSET,
                external_data=False,
                verbose=False,  # None prints to stdout
            )
        assert program is not None, "only the exporter before dynamo returns None"
        return program.model_proto
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().split("\n", 1)[0]
        raise DmlError(
            "The network cannot be exported to ONNX.",
            f"The exporter of torch says: {reason[:300].rstrip('.')}.",
            "Train one of the backbones that `dmltool list backbones` names.",
        ) from error


def clean(model: ModelProto) -> None:
    """Remove metadata and the exporter's notes: paths of local files and lines of source code."""
    from google.protobuf.message import Message

    for part in untrusted.messages(model, Message):
        if "metadata_props" in part.DESCRIPTOR.fields_by_name:
            part.doc_string = ""
            del part.metadata_props[:]


def save(proto: ModelProto, path: Path, properties: Mapping[str, str]) -> Model:
    """Check a graph, write it with this metadata, whole or not at all, and describe it.

    It gets the lowest IR version that its operators allow, because a runtime refuses files of a
    higher version than its own.
    """
    import onnx

    clean(proto)
    onnx.helper.set_model_props(proto, dict(sorted(properties.items())))
    proto.ir_version = onnx.helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    onnx.checker.check_model(proto, full_check=True)
    data = proto.SerializeToString(deterministic=True)
    with whole_file(path) as file:
        file.write(data)
    return describe_graph(proto, data, path)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Delay Ctrl-C to the end: the exporter would treat it as a failure and try again."""
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
    """Suppress the exporter's warnings about torch's own code, and what it prints on failure."""
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        yield
