"""Check and build what a run needs before its first step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from retrieval.errors import DmlError
from retrieval.number_format import counted
from trainer import losses, validate
from trainer.config import Config
from trainer.data import datasets
from trainer.data.datasets.splitting import Division, check_batches
from trainer.data.source import Source, open_images
from trainer.networks.embedder import Embedder
from trainer.run import checkpoint
from trainer.run.scoring import gallery_and_queries
from trainer.run.watch import Watch


def open_data(config: Config, watch: Watch) -> Source:
    """Open the data set with its validation classes; every image is checked to be readable."""
    source = open_images(
        load_data(config),
        config.input,
        cache=config.data.cache,
        skip_bad=config.data.skip_bad,
        progress=lambda done, total: watch.stage("reading images", done, total),
    )
    data = source.data
    check_splits(data, config.run.select)
    if config.batches.classes:
        check_batches(
            data, config.batches.classes, config.batches.images, repeat=config.batches.repeat
        )
    batch, classes = config.batches.size, len(data.classes("train"))
    if (
        losses.LOSSES.find(config.loss.name).compares
        and not (config.batches.classes or config.batches.balance)
        and batch < 2 * classes
    ):
        watch.note(
            f"{config.loss.name} compares images of a batch; random ones of {batch} hold few of "
            f"each of {classes:,} classes: --batch 16x4 draws 4 of each of 16"
        )
    for text in data.notes:
        watch.note(text)
    counts = (
        f"{counted(n, f'{split} image')} of {counted(c, 'class', 'classes')}"
        for split, (n, c) in data.counts().items()
    )
    watch.note(f"{data.name}: {', '.join(counts)}")
    return source


def balanced(config: Config, data: datasets.DataSet, processes: int, watch: Watch) -> Config:
    """Choose classes x images of a batch if that is left to dmltool; note what is repeated."""
    sizes = np.unique(data.targets("train"), return_counts=True)[1]
    batches = config.batches
    if batches.balance and not batches.classes:
        typical = max(2, int(np.median(sizes)))
        classes = max(2, min(len(sizes), batches.size // min(4, typical)))
        classes -= classes % processes if classes > processes else 0
        images = max(2, min(typical, batches.size // classes))
        batches = replace(batches, classes=classes, images=images, repeat=True)
        watch.note(f"{config.loss.name} compares images of a batch: {classes} classes x {images}")
    small = int(np.count_nonzero(sizes < batches.images))
    if small and batches.repeat:
        watch.note(
            f"{counted(small, 'class has', 'classes have')} fewer than {batches.images} images: "
            f"some are repeated in a batch; --min-images {batches.images} leaves such classes out"
        )
    config = replace(config, batches=batches)
    validate.check_anchors(config)
    return config


def tell_unused(config: Config, watch: Watch) -> None:
    """Note a momentum that no optimiser of the run uses: only sgd does."""
    spec = config.optimizer
    if spec.momentum and "sgd" not in (spec.name, config.optimizer_in(0).name):
        watch.note(
            f"optimizer.momentum = {spec.momentum} is not used: {spec.name} has its own averages; "
            "--set optimizer.name=sgd uses it"
        )


def check_names(config: Config, folder: Path) -> None:
    """Raise for errors that can be found before any image is read."""
    validate.check_names(config)
    check_place(config, folder)


def check_place(config: Config, folder: Path) -> None:
    """Raise if the folder of a run or sweep would become a part of the data set."""
    if config.data.root and datasets.DATASETS.find(config.data.dataset).takes_all_images:
        root = Path(config.data.root).expanduser().resolve()
        if folder.resolve().is_relative_to(root):
            raise DmlError(
                f"{folder} would lie inside its data set {root}.",
                "Its pictures would be taken for images of one more class.",
                "Choose another --out.",
            )


def load_data(config: Config) -> datasets.DataSet:
    """Load the data set; hold out validation classes if they pick the best epoch."""
    data = datasets.load(config.data.dataset, config.data.root or None, **config.data.options)
    return Division.of_run(vars(config.data), config.run.select).of(data)


def check_splits(data: datasets.DataSet, select: str) -> None:
    """Raise if there is too little to train on, or nothing to pick the best epoch by."""
    images, classes = data.counts().get("train", (0, 0))
    if images < 2 or classes < 2:
        raise DmlError(
            f"{data.name}: {counted(images, 'training image')} of "
            f"{counted(classes, 'class', 'classes')} are too few.",
            "Training compares images of at least two classes.",
            "Add images, or hold out fewer classes.",
        )
    there = [split for split in ("query", "gallery") if len(data.rows(split))]
    if len(there) == 1:
        raise DmlError(
            f"{data.name} has {there[0]} images, but not those of the other split.",
            "Each query is ranked against the gallery, so both splits are needed.",
            "Name both splits, query and gallery, or one, test.",
        )
    if select != "last" and not len(gallery_and_queries(data, select)[0]):
        raise DmlError(
            f"{data.name} has no images to choose the best epoch by.",
            f"--select {select} needs a {'validation' if select == 'val' else 'test'} set.",
            "Hold out classes with --set data.val_fraction=0.1, or keep the last: --select last",
        )


def build_embedder(config: Config, pretrained: bool) -> Embedder:
    """Build the network; a checkpoint brings its own weights, so none are fetched for it."""
    network = config.network if pretrained else replace(config.network, weights="none")
    return Embedder(**vars(network), image_size=config.input.crop)


def load_embedder(source: str | Path | dict[str, Any]) -> Embedder:
    """Return the trained network of a run, in evaluation mode.

    Parameters
    ----------
    source : str, Path or dict
        A run folder, whose best.pt is taken; a checkpoint; or the content of one.

    Returns
    -------
    Embedder
        A module from images (B, 3, H, W), RGB in [0, 1], to embeddings (B, dim).
    """
    if isinstance(source, dict):
        state = source
    else:
        path = Path(source)
        state = checkpoint.load(path / checkpoint.BEST if path.is_dir() else path)
    embedder = build_embedder(checkpoint.config_of(state), pretrained=False)
    load_weights(embedder, state["embedder"])
    return embedder.eval()


def load_weights(module: nn.Module, weights: dict[str, Any]) -> None:
    """Load the weights of a checkpoint; DmlError if they do not fit."""
    try:
        module.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:  # missing, odd or misshapen ones
        raise DmlError(
            "The checkpoint's weights do not fit its network.",
            " ".join(str(error).split())[:300],
            "Train again, or use the dmltool that wrote it, unless the file is damaged.",
        ) from error
