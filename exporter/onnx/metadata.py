"""Write and read the `dmltool.*` properties of a model file, with the preprocessing of its images.

Images that are prepared differently give embeddings that look right and are wrong. Therefore the
preprocessing is stored in the model file and read only from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from retrieval.errors import DmlError
from trainer.config import Input
from trainer.data.images import WHITE, Colour

SCHEMA = 1
PREFIX = "dmltool."
INPUTS = {"uint8-nhwc": ("nhwc", "uint8"), "float-nchw": ("nchw", "float32")}
"""Layout and type of each form of input that a model can be exported with."""
LAYOUTS = ("nhwc", "nchw")
DTYPES = ("uint8", "float32", "float16")
FIX = "Export the model again, or give other values to the options of `dmltool embed`."

Triple = tuple[float, ...]  # of length 3, which is checked


@dataclass(frozen=True)
class Preprocessing:
    """How an image file becomes the input of a model."""

    resize: int
    keep_ratio: bool
    crop: int
    interpolation: str
    mean: Triple
    std: Triple
    layout: str = "nhwc"
    """The order of the input's axes: nhwc or nchw."""
    dtype: str = "uint8"
    """uint8: 0 to 255; float32 or float16: 0 to 1 before mean and std."""
    inside: bool = True
    """Whether the graph applies mean and std; otherwise `to_input` does."""
    scale: int = 1
    """1 or 255: the largest colour value that mean and std refer to."""
    color: str = "RGB"
    """The order of the colours in the input: RGB or BGR. Mean and std are in the order RGB."""
    background: Colour = WHITE
    """Colour behind transparent pixels."""
    draft: int = 1
    """See `trainer.config.Input`. Models without this property were trained with 1."""

    def __post_init__(self) -> None:
        found = [problem.text for problem in self.spec().problems()]
        if self.layout not in LAYOUTS:
            found.append(f"layout = {self.layout!r}: one of {', '.join(LAYOUTS)}")
        if self.dtype not in DTYPES:
            found.append(f"dtype = {self.dtype!r}: one of {', '.join(DTYPES)}")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(map(math.isfinite, values)):
                found.append(f"{name} = {list(values)}: three numbers")
        if self.scale not in (1, 255):
            found.append(f"scale = {self.scale}: 1 or 255")
        if self.color not in ("RGB", "BGR"):
            found.append(f"color = {self.color!r}: RGB or BGR")
        if len(self.background) != 3 or not all(0 <= value <= 255 for value in self.background):
            found.append(f"background = {list(self.background)}: three numbers from 0 to 255")
        if any(value <= 0 for value in self.std):
            found.append(f"std = {list(self.std)}: above 0")
        if self.dtype == "uint8" and not self.inside:
            found.append("mean and std cannot be applied to uint8 input outside the graph")
        if found:
            raise DmlError("The preprocessing makes no sense.", "\n".join(found), FIX)

    def spec(self) -> Input:
        """The settings that `trainer.data.transforms.for_testing` takes."""
        return Input(
            resize=self.resize,
            keep_ratio=self.keep_ratio,
            crop=self.crop,
            interpolation=self.interpolation,
            draft=self.draft,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields in the types of JSON."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Preprocessing:
        """Read fields from a dict; a DmlError lists those that are missing or invalid."""
        values: dict[str, Any] = {}
        found = []
        for key, kind in _KINDS.items():
            if key not in given:
                if key in _REQUIRED:
                    found.append(f"{key} is missing")
                continue
            try:
                values[key] = _converted(given[key], kind)
            except (TypeError, ValueError, RecursionError):
                found.append(f"{key} = {str(given[key])[:80]!r} is odd")
        if found:
            raise DmlError("The preprocessing cannot be read.", "\n".join(found), FIX)
        return cls(**values)

    @classmethod
    def from_checkpoint(cls, state: Mapping[str, Any], input: str = "uint8-nhwc") -> Preprocessing:
        layout, dtype = _form(input)
        try:
            return cls.from_dict({**state["preprocessing"], "layout": layout, "dtype": dtype})
        except DmlError as error:
            raise DmlError(
                "The checkpoint does not say how its images were prepared.",
                error.why,
                "Use a checkpoint written by `dmltool train`.",
            ) from error

    def to_input(self, batch: np.ndarray) -> np.ndarray:
        """Convert uint8 RGB images (B, H, W, 3) to the input of the model."""
        assert batch.dtype == np.uint8, batch.dtype
        assert batch.ndim == 4, batch.shape
        if self.dtype != "uint8":
            batch = batch / np.full(3, 255 / self.scale, np.float32)
            if not self.inside:
                batch = (batch - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
            batch = batch.astype(self.dtype, copy=False)
        if self.color == "BGR":
            batch = batch[..., ::-1]
        if self.layout == "nchw":
            batch = batch.transpose(0, 3, 1, 2)
        return np.ascontiguousarray(batch)


@dataclass(frozen=True)
class Metadata:
    """The `dmltool.*` properties of a model, parsed."""

    preprocessing: Preprocessing
    arch: str = ""
    dim: int | None = None
    normalized: bool = False
    """The embeddings have length 1."""
    precision: str = "fp32"
    loss: str = ""
    dataset: str = ""
    checkpoint_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    parity: dict[str, Any] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    """All other properties with the prefix."""

    def checkpoints(self) -> list[str]:
        """SHA-256 of each checkpoint that the model was exported from."""
        if "ensemble" not in self.others:
            return [self.checkpoint_sha256]
        try:
            return [str(each["checkpoint_sha256"]) for each in json.loads(self.others["ensemble"])]
        except (ValueError, TypeError, KeyError, RecursionError):
            return []


def describe_checkpoint(
    state: Mapping[str, Any],
    sha256: str,
    *,
    dim: int | None = None,
    input: str = "uint8-nhwc",
    normalize: bool = False,
) -> dict[str, str]:
    """The properties of a float32 model that is exported from a checkpoint.

    dim: length of the embedding; needed if the configuration leaves it to the backbone.
    """
    config = state["config"]
    prepared = Preprocessing.from_checkpoint(state, input)
    dim = dim or config["network"]["dim"]
    values = {
        "schema": SCHEMA,
        "arch": config["network"]["backbone"],
        "embedding_dim": dim or None,
        "l2_normalized": normalize,
        "size": prepared.crop,
        "antialias": True,
        "loss": config["loss"]["name"],
        "dataset": config["data"]["dataset"],
        "checkpoint_sha256": sha256,
        "versions": {str(key): str(value) for key, value in state["versions"].items()},
        "precision": "fp32",
    }
    values |= {_NAMES.get(key, key): value for key, value in prepared.to_dict().items()}
    return to_properties({key: value for key, value in values.items() if value is not None})


def describe_ensemble(members: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The properties of an ensemble, given those of the models that its members would be.

    The preprocessing is that of the first member; mean and std are recorded for each.
    """
    said = [{key.removeprefix(PREFIX): value for key, value in each.items()} for each in members]
    texts, numbers = ("arch", "loss", "checkpoint_sha256"), ("embedding_dim", "mean", "std")
    parts = [
        {key: each[key] for key in texts} | {key: json.loads(each[key]) for key in numbers}
        for each in said
    ]
    loss, dataset = (" + ".join(dict.fromkeys(p[key] for p in said)) for key in ("loss", "dataset"))
    own = {key: value for key, value in said[0].items() if key != "checkpoint_sha256"}
    return to_properties(
        own
        | {
            "loss": loss,
            "dataset": dataset,
            "arch": " + ".join(each["arch"] for each in said),
            "embedding_dim": sum(part["embedding_dim"] for part in parts),
            "ensemble": json.dumps(parts, sort_keys=True),
        }
    )


def to_properties(values: Mapping[str, Any]) -> dict[str, str]:
    """Add the prefix to the names, and convert values other than texts to JSON."""
    return {
        PREFIX + key: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for key, value in values.items()
    }


def read_properties(properties: Mapping[str, str]) -> Metadata | None:
    """Parse properties; None if the model is not from dmltool, a DmlError if they are invalid."""
    own = {k.removeprefix(PREFIX): v for k, v in properties.items() if k.startswith(PREFIX)}
    if not own:
        return None
    if own.get("schema") != str(SCHEMA):
        raise DmlError(
            f"The model's metadata has the schema {own.get('schema', '(none)')[:40]!r}.",
            f"This dmltool reads schema {SCHEMA}.",
            "Update dmltool, or export the model again.",
        )
    known = {"embedding_dim", "l2_normalized", *_NAMES.values(), *_NAMED, *_KINDS, "schema"}
    try:
        values: dict[str, Any] = {key: own[key] for key in _TEXTS & own.keys()}
        values |= {key: _object(own[key]) for key in ("versions", "parity") if key in own}
        if "embedding_dim" in own:
            values["dim"] = _converted(own["embedding_dim"], "int")
        values["normalized"] = _converted(own.get("l2_normalized", False), "bool")
        prepared = {key: own[_NAMES.get(key, key)] for key in _KINDS if _NAMES.get(key, key) in own}
        values["preprocessing"] = Preprocessing.from_dict(prepared)
    except (DmlError, TypeError, ValueError, RecursionError) as error:
        why = error.why if isinstance(error, DmlError) else str(error)
        raise DmlError(
            "The model's metadata is damaged.", why, "Export the model again: dmltool export RUN"
        ) from error
    return Metadata(**values, others={k: v for k, v in own.items() if k not in known})


_NAMES = {"layout": "input_layout", "dtype": "input_dtype", "inside": "normalizes_input"}
"""Fields of Preprocessing whose property has another name."""
_KINDS = {each.name: str(each.type) for each in fields(Preprocessing)}
_REQUIRED = ("resize", "keep_ratio", "crop", "interpolation", "mean", "std")
_TEXTS = {"arch", "precision", "loss", "dataset", "checkpoint_sha256"}
_NAMED = {each.name for each in fields(Metadata)}


def _form(input: str) -> tuple[str, str]:
    if input not in INPUTS:
        raise DmlError(
            f"There is no input form {input!r}.",
            f"There are: {', '.join(INPUTS)}.",
            "Choose one of these with --input.",
        )
    return INPUTS[input]


def _converted(value: Any, kind: str) -> Any:
    """Convert a value, or its JSON, to a type; ValueError or TypeError if it has another."""
    if kind == "str":
        if not isinstance(value, str):
            raise TypeError
        return value
    if isinstance(value, str):
        if len(value) > 1000:
            raise ValueError
        value = json.loads(value)
    if kind == "Triple":
        if not isinstance(value, list | tuple) or any(isinstance(v, bool | str) for v in value):
            raise TypeError
        return tuple(float(v) for v in value)
    if kind == "Colour":
        if not isinstance(value, list | tuple) or any(type(v) is not int for v in value):
            raise TypeError
        return tuple(value)
    wanted = {"int": int, "bool": bool}[kind]
    if type(value) is not wanted:
        raise TypeError
    return value


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text[:80]!r} is no table")
    return value
