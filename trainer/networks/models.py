"""Build the backbones of the table: networks of torchvision and timm, and our own."""

from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from retrieval.errors import DmlError, install
from retrieval.registry import nearest
from trainer.networks import weights
from trainer.networks.entry import Backbone, Entry

POSITIONS = "encoder.pos_embedding"
WIDTHS = (32, 64, 128, 256)  # few at first: the first, largest maps take most of the time


class SmallCNN(nn.Module):
    """(B, 3, H, W) -> (B, 1024); images from 16 pixels on, meant for 28 to 64.

    Features are averaged over each quarter of the image. An average over all of it forgets where
    strokes are: on Omniglot letters held out of training, Recall@1 (cos) after 12 epochs, one
    seed, was 0.82 so and 0.93 with quarters for ce, 0.56 and 0.78 for spce.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in pairwise((3, *WIDTHS)):
            layers += [
                nn.Conv2d(before, width, 3, padding=1, bias=False),  # BatchNorm has a bias
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2, ceil_mode=True),  # 28 -> 14 -> 7 -> 4
            ]
        layers[-1] = nn.AdaptiveAvgPool2d(2)
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).flatten(1)


def smallcnn(entry: Entry, source: str, image_size: int) -> Backbone:
    """Our own network for small images, of any size from entry.smallest on."""
    module = SmallCNN()
    notes = weights.fill(module, source, entry.name)
    return Backbone(module, entry.features, *entry.normalisation, notes)


def torchvision(entry: Entry, source: str, image_size: int) -> Backbone:
    """The network of that name in torchvision, without its classifier."""
    from trainer.networks.vision import torchvision as library

    options = {"image_size": image_size} if entry.patch else entry.options
    module = library.models.get_model(entry.name, weights=None, **options)
    for part in (entry.head, *entry.also_removed):
        module.set_submodule(part, nn.Identity())

    def positions(given: Tensor) -> Tensor:
        """The positions of a ViT, for another size of images."""
        resize = library.models.vision_transformer.interpolate_embeddings
        return resize(image_size, entry.patch, {POSITIONS: given})[POSITIONS]

    url = library.models.get_model_weights(entry.name).IMAGENET1K_V1.url
    adapt = {POSITIONS: positions} if entry.patch else {}
    notes = weights.fill(module, source, entry.name, url, (entry.head,), adapt, entry.renamed)
    return Backbone(module, entry.features, *entry.normalisation, notes)


def timm(entry: Entry, source: str, image_size: int) -> Backbone:
    """Any network of timm, built for this image size."""
    name = entry.name
    library, model = check_timm(name), name.removeprefix("timm:")
    published = library.get_pretrained_cfg(model) or library.models.PretrainedCfg()
    options: dict = {"num_classes": 0}
    if published.fixed_input_size:
        options["img_size"] = image_size
    if source == "imagenet":
        content = weights.tensors(weights.read(_timm_file(model, published)))
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": content}}
    try:
        module = library.create_model(model, **options)
        features = _features(module, image_size)
    except Exception as error:  # each of a thousand networks has its own way to refuse a size
        size = published.input_size[-1]
        raise DmlError(
            f"{name} cannot be built for images of {image_size} pixels.",
            f"{error or type(error).__name__}",
            f"It was made for {size}: --set input.crop={size}",
        ) from error
    heads = published.classifier or ()
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    file = source if weights.is_file(source) else "none"
    notes = weights.fill(module, file, name, heads=heads)
    return Backbone(module, features, tuple(published.mean), tuple(published.std), notes)


def check_timm(name: str) -> ModuleType:
    """Return timm; raise if it has no network of this name."""
    import trainer.networks.vision  # noqa: F401  timm imports torchvision

    try:
        import timm as library
    except ImportError as error:
        raise DmlError(
            "Names that start with timm: need timm.", f"{error}.", install("extras")
        ) from error
    model = name.removeprefix("timm:")
    known = library.list_models()
    arch, _, tag = model.partition(".")
    if arch not in known:
        near = nearest(arch, known)
        raise DmlError(
            f"The library timm has no network {model!r}.",
            f"It has {len(known):,} others.",
            f"Did you mean 'timm:{near}'? --backbone timm:{near}"
            if near
            else "List them: python -c 'import timm; print(timm.list_models())'",
        )
    tags = [full.partition(".")[2] for full in library.list_pretrained(f"{arch}.*")]
    if tag and tag not in tags:
        near = nearest(tag, tags)
        raise DmlError(
            f"The library timm has no weights {tag!r} of {arch}.",
            f"It has: {', '.join(tags) or 'none'}.",
            f"Did you mean 'timm:{arch}.{near}'?" if near else f"Leave the tag out: timm:{arch}",
        )
    return library


def _timm_file(model: str, published: Any) -> Path:
    if not published.hf_hub_id:
        raise weights.unpublished(f"timm:{model}")
    repository, _, revision = published.hf_hub_id.partition("@")
    file = published.hf_hub_filename or "model.safetensors"
    url = f"https://huggingface.co/{repository}/resolve/{revision or 'main'}/{file}"
    return weights.fetched(url, f"{repository.replace('/', '--')}--{file}")


def _features(module: nn.Module, image_size: int) -> int:
    """The number of features F, by a trial: timm's own number is not always right."""
    module.eval()
    with torch.no_grad():
        shape = tuple(module(torch.zeros(1, 3, image_size, image_size)).shape)
    module.train()
    if len(shape) != 2:
        raise DmlError(
            f"It gives an array of shape {shape} for an image, not a vector.",
            "An embedding is one vector for each image.",
            "Choose another backbone: dmltool list backbones",
        )
    return shape[1]
