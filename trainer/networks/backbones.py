"""The table of backbones, and `build`. torch is imported when a network is built.

A backbone maps normalised images (B, 3, H, W) to pooled features (B, F); classifiers are left out.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from retrieval.errors import DmlError
from trainer.losses import nearest

if TYPE_CHECKING:
    from torch import nn

Colours = tuple[float, float, float]
IMAGENET: tuple[Colours, Colours] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALVES: tuple[Colours, Colours] = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Entry:
    name: str
    features: int
    """F, what the backbone gives for an image."""
    summary: str
    head: str = ""
    """The classifier in torchvision's network, as a dotted path."""
    smallest: int = 1
    """Images have at least so many pixels a side."""
    patch: int = 0
    """Images have a fixed size, a multiple of this."""
    normalisation: tuple[Colours, Colours] = IMAGENET
    """Mean and standard deviation of the images that it was trained on."""


class Backbone(NamedTuple):
    module: "nn.Module"
    features: int
    mean: Colours
    std: Colours
    notes: tuple[str, ...]
    """What the user should know, such as parts of a file that were left out."""


BACKBONES = (
    Entry(
        "smallcnn",
        1024,
        "four convolutions for images of 28 to 64 pixels",
        smallest=16,
        normalisation=HALVES,
    ),
    Entry("resnet18", 512, "residual network, 11 M parameters", "fc"),
    Entry("resnet34", 512, "residual network, 21 M parameters", "fc"),
    Entry("resnet50", 2048, "residual network, 24 M parameters; in the presets of ce", "fc"),
    Entry("resnet101", 2048, "residual network, 43 M parameters", "fc"),
    Entry("resnext50_32x4d", 2048, "residual network, grouped, 23 M parameters", "fc"),
    # (x - 0.5) / 0.5 is what torchvision's transform_input makes of its weights' images.
    Entry(
        "googlenet",
        1024,
        "Inception with BatchNorm, 6 M parameters; in the presets of group",
        "fc",
        15,
        normalisation=HALVES,
    ),
    Entry("densenet121", 1024, "densely connected, 7 M parameters", "classifier", 29),
    Entry("densenet161", 2208, "densely connected, 26 M parameters", "classifier", 29),
    Entry("densenet169", 1664, "densely connected, 12 M parameters", "classifier", 29),
    Entry("densenet201", 1920, "densely connected, 18 M parameters", "classifier", 29),
    Entry("mobilenet_v3_small", 576, "for phones, 1 M parameters", "classifier"),
    Entry("mobilenet_v3_large", 960, "for phones, 3 M parameters", "classifier"),
    Entry("efficientnet_b0", 1280, "scaled by search, 4 M parameters", "classifier"),
    Entry("efficientnet_b1", 1280, "scaled by search, 7 M parameters", "classifier"),
    Entry("efficientnet_b2", 1408, "scaled by search, 8 M parameters", "classifier"),
    Entry("efficientnet_b3", 1536, "scaled by search, 11 M parameters", "classifier"),
    Entry("efficientnet_v2_s", 1280, "scaled by search, 20 M parameters", "classifier"),
    Entry("convnext_tiny", 768, "modern convolutions, 28 M parameters", "classifier.2", 32),
    Entry("convnext_small", 768, "modern convolutions, 49 M parameters", "classifier.2", 32),
    Entry("convnext_base", 1024, "modern convolutions, 88 M parameters", "classifier.2", 32),
    Entry("swin_t", 768, "transformer of shifted windows, 28 M parameters", "head", 32),
    Entry("swin_s", 768, "transformer of shifted windows, 49 M parameters", "head", 32),
    Entry("vit_b_16", 768, "transformer of 16 x 16 patches, 86 M parameters", "heads", 16, 16),
    Entry("vit_b_32", 768, "transformer of 32 x 32 patches, 87 M parameters", "heads", 32, 32),
)


def build(name: str, weights: str = "none", image_size: int = 224) -> Backbone:
    """The backbone of that name; `timm:NAME` is any network of timm.

    weights: `none`, which never asks the network; `imagenet`, for torchvision the IMAGENET1K_V1
    weights that the papers use, for timm those that belong to the name; or a file.
    """
    entry = find(name)
    check_size(entry, image_size)
    from trainer.networks import models

    if name.startswith("timm:"):
        return models.timm(name, weights, image_size)
    if name == "smallcnn":
        return models.smallcnn(entry, weights)
    return models.torchvision(entry, weights, image_size)


def check(name: str, image_size: int) -> None:
    """Raises for a backbone that does not exist, or that cannot take such images."""
    check_size(find(name), image_size)
    if name.startswith("timm:"):
        from trainer.networks import models

        models.check_timm(name)


def find(name: str) -> Entry:
    if name.startswith("timm:"):
        return Entry(name, 0, "a network of timm")
    table = {entry.name: entry for entry in BACKBONES}
    if name not in table:
        raise DmlError(
            f"There is no backbone {name!r}.",
            f"Backbones: {', '.join(table)}, and timm:NAME for those of timm.",
            f"Did you mean {nearest(name, table)!r}? --backbone {nearest(name, table)}",
        )
    return table[name]


def check_size(entry: Entry, image_size: int) -> None:
    if image_size < entry.smallest:
        raise DmlError(
            f"{entry.name} cannot take images of {image_size} pixels.",
            f"They have at least {entry.smallest} pixels a side.",
            f"--set input.crop={max(entry.smallest, entry.patch)}, or more.",
        )
    if entry.patch and image_size % entry.patch:
        near = round(image_size / entry.patch) * entry.patch
        raise DmlError(
            f"{entry.name} cannot take images of {image_size} pixels.",
            f"It cuts them into patches of {entry.patch} x {entry.patch} pixels.",
            f"--set input.crop={near}",
        )
