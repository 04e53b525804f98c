"""The table of backbones, and `build`. torch is imported when a network is built.

A backbone maps normalised images (B, 3, H, W) to pooled features (B, F); classifiers are left out.
"""

from dataclasses import replace

from retrieval.errors import DmlError
from retrieval.registry import Registry
from trainer.networks.entry import Backbone, Colours, Entry

HALVES: tuple[Colours, Colours] = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CAFFE: tuple[Colours, Colours] = ((128 / 255, 117 / 255, 104 / 255), (1 / 255, 1 / 255, 1 / 255))
"""Pixels of 0 to 255 minus a mean, here in the order RGB and for pixels of 0 to 1."""

TV = "trainer.networks.models:torchvision"
# torchvision's DenseNet files are older than the names in its code.
DENSENET = (r"(denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2")


def _timm(name: str) -> Entry:
    at = "trainer.networks.models"
    return Entry(f"timm:{name}", f"{at}:timm", "a network of timm", check=f"{at}:check_timm")


def _densenet(name: str, summary: str, features: int) -> Entry:
    return Entry(name, TV, summary, features, "classifier", 29, renamed=DENSENET)


BACKBONES = Registry(
    "backbone",
    Entry(
        "smallcnn",
        "trainer.networks.models:smallcnn",
        "four convolutions, for images of 28 to 64 pixels",
        1024,
        smallest=16,
        normalisation=HALVES,
    ),
    Entry("resnet18", TV, "residual network, 11 M parameters", 512, "fc"),
    Entry("resnet34", TV, "residual network, 21 M parameters", 512, "fc"),
    Entry("resnet50", TV, "residual network, 24 M parameters; used by ce presets", 2048, "fc"),
    Entry("resnet101", TV, "residual network, 43 M parameters", 2048, "fc"),
    Entry("resnext50_32x4d", TV, "grouped residual network, 23 M parameters", 2048, "fc"),
    Entry(
        "bninception",
        "trainer.networks.bninception:bninception",
        "BN-Inception (Inception v2), 10 M parameters; used by group presets",
        1024,
        smallest=7,
        normalisation=CAFFE,
    ),
    # (x - 0.5) / 0.5 is what torchvision's transform_input makes of its weights' images.
    Entry(
        "googlenet",
        TV,
        "GoogLeNet of torchvision, 6 M parameters",
        1024,
        "fc",
        15,
        normalisation=HALVES,
        # Without init_weights it warns about its way to initialise.
        options={"aux_logits": False, "init_weights": True, "transform_input": False},
        also_removed=("dropout",),
    ),
    _densenet("densenet121", "densely connected, 7 M parameters", 1024),
    _densenet("densenet161", "densely connected, 26 M parameters", 2208),
    _densenet("densenet169", "densely connected, 12 M parameters", 1664),
    _densenet("densenet201", "densely connected, 18 M parameters", 1920),
    Entry("mobilenet_v3_small", TV, "for mobile devices, 1 M parameters", 576, "classifier"),
    Entry("mobilenet_v3_large", TV, "for mobile devices, 3 M parameters", 960, "classifier"),
    Entry("efficientnet_b0", TV, "EfficientNet, 4 M parameters", 1280, "classifier"),
    Entry("efficientnet_b1", TV, "EfficientNet, 7 M parameters", 1280, "classifier"),
    Entry("efficientnet_b2", TV, "EfficientNet, 8 M parameters", 1408, "classifier"),
    Entry("efficientnet_b3", TV, "EfficientNet, 11 M parameters", 1536, "classifier"),
    Entry("efficientnet_v2_s", TV, "EfficientNet, 20 M parameters", 1280, "classifier"),
    Entry("convnext_tiny", TV, "ConvNeXt, 28 M parameters", 768, "classifier.2", 32),
    Entry("convnext_small", TV, "ConvNeXt, 49 M parameters", 768, "classifier.2", 32),
    Entry("convnext_base", TV, "ConvNeXt, 88 M parameters", 1024, "classifier.2", 32),
    Entry("swin_t", TV, "shifted-window transformer, 28 M parameters", 768, "head", 32),
    Entry("swin_s", TV, "shifted-window transformer, 49 M parameters", 768, "head", 32),
    Entry("vit_b_16", TV, "transformer on 16 x 16 patches, 86 M parameters", 768, "heads", 16, 16),
    Entry("vit_b_32", TV, "transformer on 32 x 32 patches, 87 M parameters", 768, "heads", 32, 32),
    option="--backbone",
    listed="backbones",
    families={"timm": _timm},
)


def build(name: str, weights: str = "none", image_size: int = 224) -> Backbone:
    """Build a backbone by its name; `timm:NAME` is any network of timm.

    weights: `none`, which downloads nothing; `imagenet`, for torchvision the IMAGENET1K_V1
    weights that the papers use, for timm those that belong to the name; or a file.
    """
    entry = BACKBONES.find(name)
    check_size(entry, image_size)
    return entry.load()(entry, weights, image_size)


def check(name: str, image_size: int) -> None:
    """Raise for a backbone that does not exist, or that cannot take such images."""
    entry = BACKBONES.find(name)
    check_size(entry, image_size)
    if entry.check:
        replace(entry, path=entry.check).load()(name)


def check_size(entry: Entry, image_size: int) -> None:
    """Raise if the network cannot take square images of this size."""
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
            f"Use the nearest size that it takes: --set input.crop={near}",
        )
