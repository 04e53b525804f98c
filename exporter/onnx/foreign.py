"""Use models of other programs: the user gives the preprocessing that their files do not name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from exporter.onnx import LAYOUTS
from exporter.onnx.metadata import Preprocessing
from exporter.onnx.model import Model
from exporter.onnx.untrusted import check_batch
from retrieval.errors import DmlError
from trainer.config import Input
from trainer.data.images import WHITE, Colour


@dataclass(frozen=True)
class Given:
    """What the user says about the input of a model; fields have the names of the options."""

    size: int | None = None
    """Width and height of the input in pixels."""
    resize: int | None = None
    """Short side before the central crop; by default `size`."""
    squash: bool | None = None
    """Resize both sides to the same length instead of keeping the ratio."""
    interpolation: str | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    scale: int | None = None
    """1 or 255: the largest colour value that mean and std refer to."""
    bgr: bool | None = None
    layout: str | None = None
    background: Colour | None = None
    no_draft: bool | None = None
    """Decode JPEG images at full size."""


NOTHING = Given()


def foreign_preprocessing(model: Model, given: Given = NOTHING) -> Preprocessing:
    """The preprocessing of a model: its own, or what the user gives for one of another program.

    For a model of dmltool, anything that the user gives is an error; for others, one DmlError lists
    everything that is missing or wrong.
    """
    if model.preprocessing is not None:
        named = {f"--{name.replace('_', '-')}": value for name, value in asdict(given).items()}
        used = ", ".join(name for name, value in named.items() if value not in (None, False))
        if used:
            raise DmlError(
                f"{model.path} contains the preprocessing of its images.",
                f"{used} would give other embeddings than those it was trained for.",
                f"Leave out {used}.",
            )
        return model.preprocessing
    if problems := [*_form_problems(model, given), *_value_problems(model, given)]:
        fixes = " ".join(fix for _, fix in problems if fix)
        raise DmlError(
            f"The preprocessing of images for {model.path} is not known.",
            "\n".join(text for text, _ in problems),
            f"For example, if it was trained that way: {fixes}"
            if fixes
            else "Leave out the options that it does not take, or export it for square images.",
        )
    side = given.size if model.size is None else model.size[0]
    assert side is not None, "else it is one of the problems"
    check_batch(model.path, model.batch, side * side)
    return Preprocessing.from_dict(
        {
            "resize": side if given.resize is None else given.resize,
            "keep_ratio": not given.squash,
            "crop": side,
            "interpolation": given.interpolation or "bilinear",
            "mean": [0, 0, 0] if given.mean is None else [float(value) for value in given.mean],
            "std": [1, 1, 1] if given.std is None else [float(value) for value in given.std],
            "layout": given.layout or model.layout,
            "dtype": model.dtype,
            "inside": model.dtype == "uint8",
            "scale": given.scale or 1,
            "color": "BGR" if given.bgr else "RGB",
            "background": given.background or WHITE,
            "draft": 0 if given.no_draft else Input.draft,
        }
    )


def _form_problems(model: Model, given: Given) -> Iterator[tuple[str, str]]:
    """What is wrong with size and layout, and an option that fixes it."""
    size, layout = given.size, given.layout
    if model.size is not None:
        if model.size[0] != model.size[1]:
            yield f"it takes {model.size[0]} x {model.size[1]} pixels, not a square", ""
        elif size not in (None, model.size[0]):
            text = f"--size {size}: it takes {model.size[0]} x {model.size[1]} pixels"
            yield text, f"--size {model.size[0]}"
    elif size is None:
        yield "the size of its images is not known", "--size 224"
    if layout is not None and (layout not in LAYOUTS or layout != (model.layout or layout)):
        text = f"--layout {layout}: it takes {model.layout or ' or '.join(LAYOUTS)}"
        yield text, f"--layout {model.layout or LAYOUTS[1]}"
    elif not (layout or model.layout):
        text = "whether the colours are its second axis or its last is not known"
        yield text, "--layout nchw"


def _value_problems(model: Model, given: Given) -> Iterator[tuple[str, str]]:
    """What is wrong with mean, std and scale, and an option that fixes it."""
    if model.dtype == "uint8":
        if (given.mean, given.std, given.scale) != (None, None, None):
            yield "it takes bytes, so --mean and --std must be inside it already", ""
        return
    for name, values, usual in (
        ("--mean", given.mean, "0.485,0.456,0.406"),
        ("--std", given.std, "0.229,0.224,0.225"),
    ):
        if values is None:
            yield f"{name} of its input is not known", f"{name} {usual}"
    top = given.scale or 1
    mean, std = given.mean or (0, 0, 0), given.std or (1, 1, 1)
    for name, values in (("--mean", mean), ("--std", std)):
        if len(values) == 3 and not all(0 <= value <= top for value in values):
            text = f"{name} {_listed(values)} is outside the colours, which go from 0 to {top}"
            yield text, "--scale 255" if top == 1 and max(values) <= 255 else ""
    if top == 255 and (0 < max(mean) <= 1 or max(std) < 1):
        text = f"--mean {_listed(mean)} --std {_listed(std)} are of colours from 0 to 1"
        yield f"{text}, and --scale 255 says 0 to 255", "--scale 1"


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
