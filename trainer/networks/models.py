"""Networks of torchvision and timm without their classifiers, and smallcnn."""

from __future__ import annotations

import difflib

import torch
from torch import Tensor, nn

from retrieval.errors import DmlError
from trainer.losses import nearest
from trainer.networks import weights
from trainer.networks.backbones import IMAGENET, Backbone, Entry
from trainer.networks.smallcnn import SmallCNN


def smallcnn(entry: Entry, source: str) -> Backbone:
    module, notes = SmallCNN(), []
    if source == "imagenet":
        raise DmlError(
            "smallcnn has no ImageNet weights.",
            "It is trained from scratch.",
            "--set network.weights=none",
        )
    if source != "none":
        path = weights.existing(source)
        notes = weights.load(module, weights.read(path), str(path), entry.name)
    return Backbone(module, entry.features, *entry.normalisation, tuple(notes))


def torchvision(entry: Entry, source: str, image_size: int) -> Backbone:
    from trainer.networks.vision import torchvision as library

    options = {}
    if entry.name == "googlenet":  # left to itself it warns of its way to initialise
        options = {"aux_logits": False, "init_weights": True, "transform_input": False}
    elif entry.patch:
        options = {"image_size": image_size}
    module = library.models.get_model(entry.name, weights=None, **options)
    module.set_submodule(entry.head, nn.Identity())
    if entry.name == "googlenet":  # it belongs to the classifier
        module.dropout = nn.Identity()

    notes: list[str] = []
    if source != "none":
        if source == "imagenet":
            published = library.models.get_model_weights(entry.name).IMAGENET1K_V1
            path = weights.fetched(published.url)
        else:
            path = weights.existing(source)

        def positions(given: Tensor) -> Tensor:
            """Of a ViT, for another size of images."""
            resize = library.models.vision_transformer.interpolate_embeddings
            key = "encoder.pos_embedding"
            return resize(image_size, entry.patch, {key: given})[key]

        adapt = {"encoder.pos_embedding": positions} if entry.patch else {}
        content = weights.read(path)
        notes = weights.load(module, content, str(path), entry.name, (entry.head,), adapt)
        if source == "imagenet":  # that the classifier is left out is no news
            notes = []
    return Backbone(module, entry.features, *entry.normalisation, tuple(notes))


def timm(name: str, source: str, image_size: int) -> Backbone:
    library = _timm()
    model = name.removeprefix("timm:")
    _check_name(library, model)
    published = library.get_pretrained_cfg(model)
    options: dict = {"num_classes": 0}
    if published is not None and published.fixed_input_size:
        options["img_size"] = image_size
    if source == "imagenet":
        content = weights.tensors(weights.read(_timm_file(model, published)))
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": content}}
    try:
        module = library.create_model(model, **options)
        features = _features(module, image_size)
    except Exception as error:  # each of a thousand networks has its own way to refuse a size
        size = published.input_size[-1] if published is not None else 224
        raise DmlError(
            f"{name} cannot be built for images of {image_size} pixels.",
            f"{error or type(error).__name__}",
            f"It was made for {size}: --set input.crop={size}",
        ) from error
    notes: list[str] = []
    if source not in ("none", "imagenet"):
        path = weights.existing(source)
        heads = published.classifier if published is not None else ()
        heads = (heads,) if isinstance(heads, str) else tuple(heads or ())
        notes = weights.load(module, weights.read(path), str(path), name, heads)
    mean, std = IMAGENET if published is None else (published.mean, published.std)
    return Backbone(module, features, tuple(mean), tuple(std), tuple(notes))


def _timm():
    import trainer.networks.vision  # noqa: F401  timm imports torchvision

    try:
        import timm
    except ImportError as error:
        raise DmlError(
            "Names that start with timm: need timm.", f"{error}.", "pip install timm"
        ) from error
    return timm


def check_timm(name: str) -> None:
    _check_name(_timm(), name.removeprefix("timm:"))


def _check_name(library, model: str) -> None:
    known = library.list_models()
    arch, _, tag = model.partition(".")
    if arch not in known:
        near = difflib.get_close_matches(arch, known, n=4, cutoff=0.4) or [nearest(arch, known)]
        raise DmlError(
            f"timm has no network {model!r}.",
            f"Of its {len(known):,} names these are near: {', '.join(near)}.",
            f"Did you mean 'timm:{near[0]}'?",
        )
    tags = [full.partition(".")[2] for full in library.list_pretrained(f"{arch}.*")]
    if tag and tag not in tags:
        raise DmlError(
            f"timm has no weights {tag!r} of {arch}.",
            f"It has: {', '.join(tags) or 'none'}.",
            f"Did you mean 'timm:{arch}.{nearest(tag, tags)}'?" if tags else f"timm:{arch}",
        )


def _timm_file(model: str, published):
    if published is None or not published.hf_hub_id:
        raise DmlError(
            f"timm has no published weights of {model}.",
            "It can be trained from scratch, or from a file.",
            "--set network.weights=none",
        )
    repository, _, revision = published.hf_hub_id.partition("@")
    file = published.hf_hub_filename or "model.safetensors"
    url = f"https://huggingface.co/{repository}/resolve/{revision or 'main'}/{file}"
    return weights.fetched(url, f"{repository.replace('/', '--')}--{file}")


def _features(module: nn.Module, image_size: int) -> int:
    """F, by trying: what timm's networks say of themselves is not always what they return."""
    mode = module.training
    module.eval()
    with torch.no_grad():
        shape = tuple(module(torch.zeros(1, 3, image_size, image_size)).shape)
    module.train(mode)
    if len(shape) != 2:
        raise DmlError(f"It gives an array of shape {shape} for an image, not a vector.")
    return shape[1]
