"""A model file, looked at without running it, and a session that runs it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exporter import hostile
from exporter.metadata import LAYOUTS, Metadata, Preprocessing, read_properties
from exporter.providers import NAMES, load_runtime, pick, quiet, silent_options
from retrieval.errors import DmlError

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

__all__ = ["Model", "Session", "describe", "foreign_preprocessing", "pick"]

OUTPUT = "embeddings"
_INPUT_TYPES = {1: "float32", 2: "uint8", 10: "float16"}  # of TensorProto
_OUTPUT_TYPES = {1: "float32", 10: "float16", 11: "float64"}


@dataclass(frozen=True)
class Model:
    """What an ONNX file says of its input, its output and itself."""

    path: Path
    sha256: str
    input_name: str
    output_name: str
    layout: str
    """nhwc or nchw; empty where the file does not tell."""
    dtype: str
    size: tuple[int, int] | None
    """Height and width; None: any."""
    batch: int | None
    """Images in a batch; None: any number."""
    dim: int | None
    """Length of the embedding; None: only a run will show it."""
    properties: dict[str, str]
    preprocessing: Preprocessing | None
    """None: not a model of dmltool, see `foreign_preprocessing`."""
    metadata: Metadata | None = None
    beside: tuple[Path, ...] = ()
    """Files of weights."""


def describe(path: Path | str, output_name: str | None = None) -> Model:
    """Reads a model file without running anything; what cannot embed images is a DmlError."""
    path = Path(path)
    data = hostile.read_bytes(path)
    proto = hostile.parse(data, path)
    beside = hostile.external_files(proto, path)
    hostile.check_operators(proto, path)
    properties = {entry.key: entry.value for entry in proto.metadata_props}
    metadata = read_properties(properties)
    name, dtype, dims = _find_input(proto, path)
    layout = _layout(dims)
    if metadata is not None and layout == "":
        layout = metadata.preprocessing.layout
    places = (1, 2) if layout == "nhwc" else (2, 3)
    size = None if not layout else tuple(dims[place] for place in places)
    output, dim = _find_output(proto, path, output_name)
    model = Model(
        path=path,
        sha256=hostile.digest(data, beside),
        input_name=name,
        output_name=output,
        layout=layout,
        dtype=dtype,
        size=None if size is None or None in size else size,
        batch=dims[0],
        dim=dim,
        properties=properties,
        preprocessing=metadata and metadata.preprocessing,
        metadata=metadata,
        beside=tuple(beside),
    )
    if metadata is not None:
        _check_agreement(model, metadata)
    return model


def _shape(value: ValueInfoProto) -> list[int | None] | None:
    """Lengths, None where they are free; None where not even their number is known."""
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
        return None
    dims = value.type.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None for d in dims]


def _shown(value: ValueInfoProto) -> str:
    shape = _shape(value)
    inner = "?" if shape is None else " x ".join("any" if d is None else str(d) for d in shape)
    return f"{value.name[:80]} ({inner})"


def _find_input(proto: ModelProto, path: Path) -> tuple[str, str, list[int | None]]:
    own = {tensor.name for tensor in proto.graph.initializer}  # old files list weights as inputs
    inputs = [value for value in proto.graph.input if value.name not in own]
    if len(inputs) != 1:
        names = ", ".join(map(_shown, inputs[:8])) or "none"
        raise DmlError(
            f"{path} has {len(inputs)} inputs.",
            f"An embedding model takes images and nothing else. Its inputs: {names}.",
            "Export the part of the network that embeds images.",
        )
    value = inputs[0]
    dims = _shape(value)
    dtype = _INPUT_TYPES.get(value.type.tensor_type.elem_type, "")
    fault = ""
    if dims is None or len(dims) != 4:
        fault = "Images have four axes: batch, height, width and colour, or batch, colour, ..."
    elif not {dims[1], dims[3]} & {None, 3}:
        fault = "Neither the second nor the last axis has length 3, for red, green and blue."
    elif not dtype:
        fault = f"Its numbers must be of type {', '.join(_INPUT_TYPES.values())}."
    if fault:
        raise DmlError(
            f"{path} does not take images: its input is {_shown(value)}.",
            fault,
            "Choose a model whose input is a batch of RGB images.",
        )
    return value.name, dtype, dims


def _layout(dims: Sequence[int | None]) -> str:
    """A length of 3 tells; so does an axis that cannot be the colours. Else the file is silent."""
    first, last = dims[1], dims[3]
    if first == last:
        return ""
    if 3 in (first, last):
        return "nchw" if first == 3 else "nhwc"
    return "nchw" if first is None else "nhwc"


def _find_output(proto: ModelProto, path: Path, wanted: str | None) -> tuple[str, int | None]:
    outputs = {value.name: value for value in proto.graph.output}
    if wanted is None and len(outputs) > 1:
        wanted = OUTPUT if OUTPUT in outputs else None
    elif wanted is None and outputs:
        wanted = next(iter(outputs))
    listed = ", ".join(_shown(value) for value in list(outputs.values())[:12])
    flat = [name for name, value in outputs.items() if len(_shape(value) or ()) == 2]
    try_flat = f"--output-name {flat[0]}" if flat else f"--output-name {next(iter(outputs), '')}"
    if wanted is None:
        what = f"{path} has {len(outputs)} outputs." if outputs else f"{path} has no output."
        raise DmlError(what, f"Outputs: {listed or 'none'}.", f"Name the embedding: {try_flat}")
    if wanted not in outputs:
        near = difflib.get_close_matches(wanted, outputs, 1, 0.0)
        raise DmlError(
            f"{path} has no output {wanted!r}.",
            f"Outputs: {listed or 'none'}.",
            f"--output-name {near[0]}" if near else "",
        )
    value = outputs[wanted]
    shape = _shape(value)
    if shape is not None and len(shape) != 2:
        raise bad_rank(path, _shown(value), len(shape), flat)
    if value.type.tensor_type.elem_type not in _OUTPUT_TYPES:
        kinds = ", ".join(_OUTPUT_TYPES.values())
        raise DmlError(
            f"{path}: the output {wanted} is no embedding.", f"Its type must be one of {kinds}."
        )
    return wanted, None if shape is None else shape[1]


def bad_rank(path: Path, shown: str, rank: int, flat: Sequence[str] = ()) -> DmlError:
    if rank == 4:
        why = "A feature map is not an embedding: it must be averaged over its places first."
    else:
        why = f"An embedding has two axes, batch and length; this output has {rank}."
    other = f"--output-name {flat[0]}" if flat else ""
    pool = "Export the network with its pooling layer (global average pooling, then flatten)"
    return DmlError(
        f"{path}: the output {shown} is not a batch of embeddings.",
        why,
        f"{pool}, or take another output: {other}" if other else f"{pool}.",
    )


def _check_agreement(model: Model, metadata: Metadata) -> None:
    """The graph and the metadata must tell the same."""
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
            "\n  ".join(found),
            "Export it again: dmltool export RUN --onnx",
        )


def foreign_preprocessing(
    model: Model,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    layout: str | None = None,
    *,
    resize: int | None = None,
    keep_ratio: bool = True,
    interpolation: str = "bilinear",
) -> Preprocessing:
    """The preprocessing of a model that does not carry its own, from what the user says.

    A model of dmltool gives its own, and nothing may be said about it. Images get `resize` (or
    `size`) as their short side, and their centre is taken.
    """
    given = {"--size": size, "--mean": mean, "--std": std, "--layout": layout, "--resize": resize}
    if model.preprocessing is not None:
        said = [name for name, value in given.items() if value is not None]
        if said:
            raise DmlError(
                f"{model.path} says itself how images are prepared for it.",
                f"{', '.join(said)} would give other embeddings than it was trained for.",
                f"Leave out {', '.join(said)}.",
            )
        return model.preprocessing
    found, fixes = [], []
    if model.size is not None:
        if model.size[0] != model.size[1]:
            found.append(f"it takes {model.size[0]} x {model.size[1]} pixels; only squares can be")
        elif size not in (None, model.size[0]):
            found.append(f"--size {size}: it takes {model.size[0]} x {model.size[1]} pixels")
            fixes.append(f"--size {model.size[0]}")
        size = size or model.size[0]
    elif size is None:
        found.append("the size of its images is not known")
        fixes.append("--size 224")
    if layout is not None and (layout not in LAYOUTS or layout != (model.layout or layout)):
        found.append(f"--layout {layout}: it takes {model.layout or ' or '.join(LAYOUTS)}")
        fixes.append(f"--layout {model.layout or LAYOUTS[1]}")
    elif not (layout or model.layout):
        found.append("whether the colours are its second axis or its last is not known")
        fixes.append("--layout nchw")
    inside = model.dtype == "uint8"
    if inside and (mean is not None or std is not None):
        found.append("it takes bytes, so --mean and --std must be inside it already")
    for name, value, usual in (
        ("--mean", mean, "0.485,0.456,0.406"),
        ("--std", std, "0.229,0.224,0.225"),
    ):
        if not inside and value is None:
            found.append(f"{name} of its input is not known")
            fixes.append(f"{name} {usual}")
    if found:
        raise DmlError(
            f"How to prepare images for {model.path} is not clear.",
            "\n  ".join(found),
            f"For example, if it was trained so: {' '.join(fixes)}" if fixes else "",
        )
    return Preprocessing(
        resize=resize or size,
        keep_ratio=keep_ratio,
        crop=size,
        interpolation=interpolation,
        mean=tuple(mean or (0.0, 0.0, 0.0)),
        std=tuple(std or (1.0, 1.0, 1.0)),
        layout=layout or model.layout,
        dtype=model.dtype,
        inside=inside,
    )


class Session:
    """Runs a model. Several threads may call `run`."""

    provider: str
    """cpu, cuda or tensorrt: the one that really runs."""
    why: str
    """One line: which, and why."""

    def __init__(
        self,
        model: Model,
        provider: str = "auto",
        threads: int | None = None,
        *,
        preprocessing: Preprocessing | None = None,
        spinning: bool = True,
    ) -> None:
        """threads: of one run; None: one a core. spinning: they wait busily between two runs,
        which is faster unless others want the cores.
        """
        self.model = model
        prepared = preprocessing or model.preprocessing
        self.preprocessing = prepared if prepared is not None else foreign_preprocessing(model)
        chain, self.why = pick(provider)
        self.session = _start(model, chain, threads, spinning)
        first = self.session.get_providers()[0]
        self.provider = next((k for k, name in NAMES.items() if name == first), first)
        if first != chain[0]:
            if provider != "auto":
                raise DmlError(
                    f"{model.path} does not run on {provider}.",
                    f"ONNX Runtime fell back to {self.provider}.",
                    "--provider auto",
                )
            self.why = f"{self.provider.upper()}: {chain[0]} did not start for this model"
        self.options = load_runtime().RunOptions()
        self.options.log_severity_level = 4

    def run(self, batch: np.ndarray) -> np.ndarray:
        """Embeddings (B, D) float32 of uint8 RGB images (B, H, W, 3)."""
        if not len(batch):
            return np.empty((0, self.model.dim or 0), np.float32)
        fixed = self.model.batch
        if fixed is None:
            found = self._embed(batch)
        else:
            pieces = [batch[at : at + fixed] for at in range(0, len(batch), fixed)]
            found = np.concatenate([self._embed(_padded(p, fixed))[: len(p)] for p in pieces])
        if not np.isfinite(found).all():
            rows = np.flatnonzero(~np.isfinite(found).all(1))
            raise DmlError(
                f"{self.model.path} gave embeddings with NaN or infinity.",
                f"{len(rows)} of {len(batch)} images of a batch are concerned.",
                "float16 overflows where float32 does not: try --precision fp32",
            )
        return found

    def _embed(self, batch: np.ndarray) -> np.ndarray:
        name, path = self.model.output_name, self.model.path
        feed = {self.model.input_name: self.preprocessing.to_input(batch)}
        try:
            found = np.asarray(self.session.run([name], feed, self.options)[0])
        except Exception as error:  # the runtime has a class of its own for every failure
            raise DmlError(
                f"{path} cannot be run on {len(batch)} images of {batch.shape[1:3]} pixels.",
                _first_line(error),
                "Try --batch-size 1; on a GPU that lacks memory, --provider cpu",
            ) from error
        if found.ndim != 2:
            shape = " x ".join(map(str, found.shape))
            raise bad_rank(path, f"{name} ({shape})", found.ndim)
        if len(found) != len(batch):
            raise DmlError(
                f"{path} gave {len(found)} embeddings for {len(batch)} images.",
                "Its batch size was frozen when it was exported.",
                f"Try --batch-size {len(found)}, or export it with a dynamic batch.",
            )
        return found.astype(np.float32, copy=False)


def _start(model: Model, chain: list[str], threads: int | None, spinning: bool) -> Any:
    """The session, of the very bytes that were looked at."""
    data = hostile.read_bytes(model.path)
    if hostile.digest(data, list(model.beside)) != model.sha256:
        raise DmlError(
            f"{model.path} has changed since it was looked at.", "", "Start the command again."
        )
    options = silent_options()
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.intra_op.allow_spinning", "01"[spinning])
    if model.beside:
        folder = str(Path(model.path).absolute().parent)
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", folder
        )
    try:
        with quiet():
            return load_runtime().InferenceSession(data, options, providers=chain)
    except Exception as error:  # the runtime has a class of its own for every failure
        raise DmlError(
            f"{model.path} cannot be run by ONNX Runtime.",
            _first_line(error),
            "Export it again with operators that ONNX Runtime knows.",
        ) from error


def _padded(piece: np.ndarray, length: int) -> np.ndarray:
    if len(piece) == length:
        return piece
    padding = np.zeros((length - len(piece), *piece.shape[1:]), piece.dtype)
    return np.concatenate([piece, padding])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
