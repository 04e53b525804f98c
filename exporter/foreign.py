"""Models that other programs made: the user says what their files do not."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.hostile import check_batch
from exporter.metadata import LAYOUTS, Preprocessing
from exporter.model import Model
from retrieval.errors import DmlError


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
    _check(model, size, mean, std, layout)
    side = size or model.size[0]
    check_batch(model.path, model.batch, side * side)
    return Preprocessing(
        resize=side if resize is None else resize,
        keep_ratio=keep_ratio,
        crop=side,
        interpolation=interpolation,
        mean=(0.0, 0.0, 0.0) if mean is None else tuple(map(float, mean)),
        std=(1.0, 1.0, 1.0) if std is None else tuple(map(float, std)),
        layout=layout or model.layout,
        dtype=model.dtype,
        inside=model.dtype == "uint8",
    )


def _check(
    model: Model,
    size: int | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    layout: str | None,
) -> None:
    """All that is missing or wrong, together."""
    found, fixes = [], []
    if model.size is not None:
        if model.size[0] != model.size[1]:
            found.append(f"it takes {model.size[0]} x {model.size[1]} pixels, not a square")
        elif size not in (None, model.size[0]):
            found.append(f"--size {size}: it takes {model.size[0]} x {model.size[1]} pixels")
            fixes.append(f"--size {model.size[0]}")
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
