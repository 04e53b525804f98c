"""Write and read the `dmltool.*` properties of a model file, with the preprocessing of its images.

Images that are prepared differently give embeddings that look right and are wrong. Therefore the
preprocessing is stored in the model file and read only from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, get_type_hints

import numpy as np

from exporter.onnx import INPUTS, LAYOUTS, PRECISIONS
from retrieval.errors import DmlError
from retrieval.settings import converted, invalid, one_of, shortened, within
from trainer.config import Input
from trainer.data.datasets.splitting import Division
from trainer.data.images import WHITE, Colour

SCHEMA = 1
PREFIX = "dmltool."
FIX = "Export the model again, or give other values to the options of `dmltool embed`."

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Preprocessing:
    """How an image file becomes the input of a model."""

    resize: int
    keep_ratio: bool
    crop: int
    interpolation: str
    mean: Triple
    std: Triple
    layout: str = one_of(*LAYOUTS, default="nhwc")
    """The order of the input's axes: nhwc or nchw."""
    dtype: str = one_of("uint8", "float32", "float16", default="uint8")
    """uint8: 0 to 255; float32 or float16: 0 to 1 before mean and std."""
    inside: bool = True
    """Whether the graph applies mean and std; otherwise `to_input` does."""
    scale: int = one_of(1, 255, default=1)
    """1 or 255: the largest colour value that mean and std refer to."""
    color: str = one_of("RGB", "BGR", default="RGB")
    """The order of the colours in the input: RGB or BGR. Mean and std are in the order RGB."""
    background: Colour = within(0, 255, default=WHITE)
    """Colour behind transparent pixels."""
    draft: int = 1
    """See `trainer.config.Input`. Models without this property were trained with 1."""

    def __post_init__(self) -> None:
        found = [problem.text for problem in (*self.spec().problems(), *invalid(self))]
        if not all(map(math.isfinite, self.mean)):
            found.append(f"mean = {list(self.mean)} is not three finite numbers.")
        if not all(0 < value < math.inf for value in self.std):
            found.append(f"std = {list(self.std)} is not three finite numbers above 0.")
        if self.dtype == "uint8" and not self.inside:
            found.append("mean and std cannot be applied to uint8 input outside the graph.")
        if found:
            raise DmlError("The preprocessing makes no sense.", "\n".join(found), FIX)

    def spec(self) -> Input:
        """The settings that `trainer.data.transforms.for_testing` takes."""
        return Input(self.resize, self.keep_ratio, self.crop, self.interpolation, self.draft)

    def to_dict(self) -> dict[str, Any]:
        """The fields in the types of JSON."""
        return json.loads(json.dumps(asdict(self)))  # tuples become lists

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Preprocessing:
        """Read fields, as values or as JSON; a DmlError lists those that are missing or invalid."""
        required = [each.name for each in fields(cls) if each.default is MISSING]
        if missing := [f"{name} is missing." for name in required if name not in given]:
            raise DmlError("The preprocessing cannot be read.", "\n".join(missing), FIX)
        return cls(**_typed(given, get_type_hints(cls)))

    @classmethod
    def from_checkpoint(cls, state: Mapping[str, Any], input: str = "uint8-nhwc") -> Preprocessing:
        layout, dtype = INPUTS[input]
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
    precision: str = one_of(*PRECISIONS, default=PRECISIONS[0])
    loss: str = ""
    dataset: str = ""
    checkpoint_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    parity: dict[str, Any] = field(default_factory=dict)
    division: Division | None = None
    """How the training divided its classes; None: the model does not say."""
    others: dict[str, str] = field(default_factory=dict)
    """All other properties with the prefix."""

    def __post_init__(self) -> None:
        if found := [problem.text for problem in invalid(self)]:
            raise DmlError("The properties make no sense.", "\n".join(found), FIX)

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
    dim: int,
    input: str = "uint8-nhwc",
    normalize: bool = False,
) -> dict[str, Any]:
    """The properties of a float32 model that is exported from a checkpoint."""
    config = state["config"]
    prepared = Preprocessing.from_checkpoint(state, input)
    values = {
        "schema": SCHEMA,
        "arch": config["network"]["backbone"],
        "embedding_dim": dim,
        "l2_normalized": normalize,
        "size": prepared.crop,
        "antialias": True,
        "loss": config["loss"]["name"],
        "dataset": config["data"]["dataset"],
        "division": asdict(Division.of_run(config["data"], config["run"]["select"])),
        "checkpoint_sha256": sha256,
        "versions": {str(key): str(value) for key, value in state["versions"].items()},
        "precision": "fp32",
    }
    names = {field: name for name, field in _FIELDS.items()}
    return values | {names.get(key, key): value for key, value in prepared.to_dict().items()}


def describe_ensemble(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The properties of an ensemble, from the properties that each member has on its own.

    The preprocessing is that of the first member; mean and std are recorded for each.
    """

    def joined(key: str) -> str:
        return " + ".join(dict.fromkeys(each[key] for each in members))

    keys = ("arch", "loss", "checkpoint_sha256", "embedding_dim", "mean", "std")
    own = {key: value for key, value in members[0].items() if key != "checkpoint_sha256"}
    return own | {
        "loss": joined("loss"),
        "dataset": joined("dataset"),
        "arch": " + ".join(each["arch"] for each in members),
        "embedding_dim": sum(each["embedding_dim"] for each in members),
        "ensemble": [{key: each[key] for key in keys} for each in members],
    }


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
    said = {_FIELDS.get(key, key): value for key, value in own.items() if key != "schema"}
    kinds = get_type_hints(Metadata) | get_type_hints(Preprocessing) | {"dim": int}
    try:
        prepared = Preprocessing.from_dict(said)
        about = _typed(said, {key: kinds[key] for key in _ABOUT})
        about["division"] = _read_division(said.get("division"))
        others = {key: value for key, value in said.items() if key not in kinds}
        return Metadata(prepared, **about, others=others)
    except DmlError as error:
        raise DmlError(
            "The model's metadata is damaged.",
            error.why,
            "Export the model again: dmltool export RUN",
        ) from error


def _read_division(said: str | None) -> Division | None:
    """The division of the training classes; models of earlier versions do not have it."""
    if said is None:
        return None
    given = _typed({"division": said}, {"division": dict[str, Any]})["division"]
    return Division(**_typed(given, get_type_hints(Division)))


_FIELDS = {
    "input_layout": "layout",
    "input_dtype": "dtype",
    "normalizes_input": "inside",
    "embedding_dim": "dim",
    "l2_normalized": "normalized",
}
"""Properties that have another name than the field of Preprocessing or Metadata they fill."""
_ABOUT = [
    each.name
    for each in fields(Metadata)
    if each.name not in ("preprocessing", "division", "others")
]


_LONGEST = 1 << 17  # characters of a property that is no plain text


def _typed(given: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The values of these keys in their types, read from JSON where they are texts."""
    values, found = {}, []
    for key in [key for key in kinds if key in given]:
        value = given[key]
        try:
            decode = isinstance(value, str) and kinds[key] is not str
            if decode and len(value) > _LONGEST:
                value = value[:_LONGEST]
                raise ValueError("a shorter text")
            if decode:
                with suppress(ValueError):  # then it is refused as the text that it is
                    value = json.loads(value)
            values[key] = converted(value, kinds[key])
        except (ValueError, RecursionError) as error:
            found.append(f"{key} = {shortened(value)} is not {error}.")
    if found:
        raise DmlError("The preprocessing cannot be read.", "\n".join(found), FIX)
    return values
