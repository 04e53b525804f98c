"""Describe a model file without running it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.onnx import untrusted
from exporter.onnx.metadata import Metadata, Preprocessing, read_properties
from retrieval.errors import DmlError
from retrieval.registry import nearest

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

OUTPUT = "embeddings"
_INPUT_TYPES = {1: "float32", 2: "uint8", 10: "float16"}  # of TensorProto
_OUTPUT_TYPES = {1: "float32", 10: "float16", 11: "float64"}


@dataclass(frozen=True)
class Model:
    """An ONNX file: its input, its output, its metadata, and the hash of its bytes."""

    path: Path
    sha256: str
    input_name: str
    output_name: str
    layout: str
    """nhwc or nchw; empty if the file does not say."""
    dtype: str
    size: tuple[int, int] | None
    """Height and width; None: any size."""
    batch: int | None
    """Images in a batch; None: any number."""
    dim: int | None
    """Length of the embedding; None: known only after a run."""
    properties: dict[str, str]
    metadata: Metadata | None
    """None: a model of another program."""
    beside: tuple[Path, ...] = ()
    """Files that hold weights."""

    @property
    def preprocessing(self) -> Preprocessing | None:
        """The preprocessing that the file names; None: see `foreign_preprocessing`."""
        return self.metadata.preprocessing if self.metadata else None

    def read(self) -> bytes:
        """The bytes of the file; a DmlError if they are not those that were described."""
        data = untrusted.read_bytes(self.path)
        if untrusted.digest(data, list(self.beside)) != self.sha256:
            raise DmlError(
                f"{self.path} was changed by another program.",
                "Its content is no longer what was checked.",
                "Start the command again.",
            )
        return data

    def load(self) -> ModelProto:
        """The graph of the file."""
        return untrusted.parse(self.read(), self.path)


def describe(path: Path | str, output_name: str | None = None) -> Model:
    """Read a model file without running it; a DmlError if it cannot embed images.

    Parameters
    ----------
    path : str or Path
        The ONNX file.
    output_name : str, optional
        The output that holds the embeddings, if the model has several.
    """
    path = Path(path)
    data = untrusted.read_bytes(path)
    return describe_graph(untrusted.parse(data, path), data, path, output_name)


def describe_graph(
    proto: ModelProto, data: bytes, path: Path, output_name: str | None = None
) -> Model:
    """Describe a graph whose bytes, `data`, are in the file at `path`."""
    beside = untrusted.external_files(proto, path)
    untrusted.check_operators(proto, path)
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    try:
        metadata = read_properties(properties)
    except DmlError as error:
        raise DmlError(f"{path} cannot be used. {error.what}", error.why, error.fix) from error
    name, dtype, dims = _find_input(proto, path)
    layout = _layout(dims) or (metadata.preprocessing.layout if metadata else "")
    height, width = dims[1:3] if layout == "nhwc" else dims[2:4]
    size = None if not layout or height is None or width is None else (height, width)
    untrusted.check_batch(path, dims[0], math.prod(size or (1, 1)))
    output, dim = _find_output(proto, path, output_name)
    model = Model(
        path=path,
        sha256=untrusted.digest(data, beside),
        input_name=name,
        output_name=output,
        layout=layout,
        dtype=dtype,
        size=size,
        batch=dims[0],
        dim=dim,
        properties=properties,
        metadata=metadata,
        beside=tuple(beside),
    )
    if metadata is not None:
        _check_agreement(model, metadata)
    return model


def _shape(value: ValueInfoProto) -> list[int | None] | None:
    """Length of each axis, None for a free one; None if not even the number of axes is known."""
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
        return None
    dims = value.type.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None for d in dims]


def shown(value: ValueInfoProto) -> str:
    """Name and shape of an input or output, as a text."""
    shape = _shape(value)
    inner = "?" if shape is None else " x ".join("any" if d is None else str(d) for d in shape)
    return f"{printable(value.name)} ({inner})"


def printable(text: str, most: int = 80) -> str:
    """A short text without control characters, which a file may use to change a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def _find_input(proto: ModelProto, path: Path) -> tuple[str, str, list[int | None]]:
    own = {tensor.name for tensor in proto.graph.initializer}  # old files list weights as inputs
    inputs = [value for value in proto.graph.input if value.name not in own]
    if len(inputs) != 1:
        names = ", ".join(map(shown, inputs[:8])) or "none"
        raise DmlError(
            f"{path} has {len(inputs)} inputs.",
            f"An embedding model takes images and nothing else. Its inputs: {names}.",
            "Export the part of the network that embeds images.",
        )
    value = inputs[0]
    dims = _shape(value) or []
    dtype = _INPUT_TYPES.get(value.type.tensor_type.elem_type, "")
    fault = ""
    if len(dims) != 4:
        fault = "Images have four axes: batch, height, width and colour, or batch, colour, ..."
    elif not {dims[1], dims[3]} & {None, 3}:
        fault = "Neither the second nor the last axis has length 3, for red, green and blue."
    elif not dtype:
        fault = f"Its numbers must be of type {', '.join(_INPUT_TYPES.values())}."
    if fault:
        raise DmlError(
            f"{path} does not take images: its input is {shown(value)}.",
            fault,
            "Choose a model whose input is a batch of RGB images.",
        )
    return value.name, dtype, dims


def _layout(dims: Sequence[int | None]) -> str:
    """nhwc or nchw, by the axis that has length 3 or can have it; empty if both or neither can."""
    ranks = {3: 2, None: 1}  # no other length can be that of the colours
    first, last = ranks.get(dims[1], 0), ranks.get(dims[3], 0)
    return "" if first == last else "nchw" if first > last else "nhwc"


def _find_output(proto: ModelProto, path: Path, wanted: str | None) -> tuple[str, int | None]:
    outputs = {value.name: value for value in proto.graph.output}
    listed = f"Outputs: {', '.join(map(shown, list(outputs.values())[:12])) or 'none'}."
    flat = [name for name, value in outputs.items() if len(_shape(value) or ()) == 2]
    if wanted is None:
        names = [OUTPUT] if OUTPUT in outputs else list(outputs)
        if not names:
            raise DmlError(f"{path} has no output.", "Nothing can be embedded.", "Export it again.")
        if len(names) != 1:
            first = printable((flat or [*names, "NAME"])[0])
            fix = f"Name the embedding: --output-name {first}"
            raise DmlError(f"{path} has {len(names)} outputs.", listed, fix)
        wanted = names[0]
    if wanted not in outputs:
        near = printable(nearest(wanted, outputs))
        fix = f"Did you mean {near!r}? --output-name {near}" if near else "Choose one of these."
        raise DmlError(f"{path} has no output {wanted!r}.", listed, fix)
    value = outputs[wanted]
    shape = _shape(value)
    if shape is not None and len(shape) != 2:
        raise bad_rank(path, shown(value), len(shape), flat)
    if value.type.tensor_type.elem_type not in _OUTPUT_TYPES:
        raise DmlError(
            f"{path}: the output {printable(wanted)} is no embedding.",
            f"Its type must be one of {', '.join(_OUTPUT_TYPES.values())}.",
            "Name another output: --output-name NAME",
        )
    return wanted, None if shape is None else shape[1]


def bad_rank(path: Path, shown: str, rank: int, flat: Sequence[str] = ()) -> DmlError:
    if rank == 4:
        why = "It is a feature map, which must be averaged over height and width first."
    else:
        why = f"An embedding has two axes, batch and length; this output has {rank}."
    pool = "Export the network with its pooling layer (global average pooling, then flatten)"
    other = f", or take another output: --output-name {printable(flat[0])}" if flat else "."
    what = f"{path}: the output {shown} is not a batch of embeddings."
    return DmlError(what, why, pool + other)


def _check_agreement(model: Model, metadata: Metadata) -> None:
    """Raise a DmlError if the graph and the metadata contradict each other."""
    said = metadata.preprocessing
    crop = (said.crop, said.crop)
    found = [
        f"{name}: {there} in the metadata, {here} in the graph"
        for name, there, here in (
            ("input layout", said.layout, model.layout),
            ("input type", said.dtype, model.dtype),
            ("image size", crop, model.size or crop),
            ("embedding_dim", metadata.dim, model.dim or metadata.dim),
        )
        if there is not None and there != here
    ]
    if found:
        raise DmlError(
            f"{model.path} contradicts itself.",
            "\n".join(found),
            "Export it again: dmltool export RUN --onnx",
        )
