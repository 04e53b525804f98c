"""Embed any images with any ONNX model that takes images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from exporter.embedding import writing
from exporter.embedding.engine import onnx_engine, own_processors
from exporter.embedding.writing import EmbedSettings
from exporter.onnx.foreign import Given, foreign_preprocessing
from exporter.onnx.metadata import Metadata
from exporter.onnx.model import describe
from exporter.results import EmbeddingsResult
from retrieval.distributed.world import ALONE, World
from retrieval.errors import DmlError
from retrieval.files import check_target
from retrieval.formats.hdf5.writing import KIND
from retrieval.number_format import counted
from retrieval.ranking.backends.choice import require_device
from retrieval.registry import nearest
from retrieval.resources import StageProgress
from trainer.data.datasets import DATASETS, DataSet, csv, folder, kind_of, load, options_of
from trainer.data.datasets.splitting import Division, chosen_splits


def embed(
    model: str | Path,
    data: str | Path,
    target: str | Path,
    *,
    output_name: str | None = None,
    progress: StageProgress | None = None,
    world: World = ALONE,
    **options: Any,
) -> EmbeddingsResult:
    """Embed images with an ONNX model and write the embeddings to an HDF5 file.

    Parameters
    ----------
    model : str or Path
        The ONNX file.
    data : str or Path
        A folder with a folder for each class, a flat folder, a table (.csv), the name of a data
        set such as "glyphs", or "NAME:FOLDER".
    target : str or Path
        The embedding file (.h5).
    output_name : str, optional
        The output that holds the embeddings, if the model has several.
    progress : function, optional
        Called with (stage, done, total).
    world : World, optional
        The processes that share the images; all of them call this.
    options
        Fields of `EmbedSettings`: provider, device, threads, splits, batch_size, shard, half,
        skip_bad, resume, force. For models of other programs also those of `Given`: size, mean,
        std, ...

    Returns
    -------
    dict
        The path, the rows of each split, the images left out, and what ran the model.
    """
    model, data = Path(model), str(data)
    described = describe(model, output_name)
    given = Given(**{f.name: options.pop(f.name) for f in fields(Given) if f.name in options})
    settings = EmbedSettings(**options)
    require_device(settings.device)
    prepared = foreign_preprocessing(described, given)
    images = find_data(data, settings.skip_bad).on(prepared.background)
    images = divided(images, settings.splits, data, described.metadata)
    inputs = [model, *described.beside, Path(data)]
    overwrite = settings.force or settings.resume or world.rank > 0
    target = check_target(target, KIND, overwrite, inputs)
    rows = all_or_chosen(images, settings.splits, data)
    threads = settings.threads or own_processors(world)
    engine = onnx_engine(described, settings.provider, threads, prepared)
    found = writing.embed(engine, images, rows, target, settings, progress=progress, world=world)
    told = writing.told(found, engine.why)
    return {**told, "labelled": images.labelled, "notes": list(images.notes)}


def find_data(text: str, incomplete: bool = False) -> DataSet:
    """Load what the user names: `photos/`, `images.csv`, `cub:CUB_200_2011` or `glyphs:query`.

    `photos/` stands for all images in it, labelled or not; `folder:photos` is split into training
    and test classes as for training. incomplete: leave out images that are listed and missing.
    """
    name, colon, root = text.partition(":")
    names = DATASETS.entries
    if colon and name in names:
        if not names[name].needs_root:
            return load(name, variant=root)
        takes = incomplete and "allow_incomplete" in options_of(name)
        options = {"allow_incomplete": True} if takes else {}
        return load(name, root, **options)
    path = Path(text)
    if path.is_dir() and not any(path.iterdir()):
        raise DmlError(f"{text} is an empty folder.", "It has no images.", "Name another folder.")
    if path.is_dir():
        return folder.read_flat(path) or load(kind_of(path), path, test_fraction=0.0)
    if path.is_file() and path.suffix.lower() in folder.SUFFIXES:
        raise DmlError(
            f"{text} is a single image.",
            "Images are embedded by the folder, or as a table (.csv) lists them.",
            f"Name the folder: {path.parent}",
        )
    if path.is_file():
        found = csv.read_unlabelled(path, incomplete)
        return found or load(kind_of(path), path, test_fraction=0.0, allow_incomplete=incomplete)
    if text in names and not names[text].needs_root:
        return load(text)
    if text in names:
        raise DmlError(
            f"The images of {text} have to be in a folder.",
            "The data set is not part of dmltool.",
            f"Name the folder: {text}:FOLDER",
        )
    name, colon, place = text.partition(":")
    if near := nearest(name, names) if colon else "":
        raise DmlError(
            f"There is no data set {name!r}.",
            f"There are {', '.join(names)}.",
            f"Did you mean {near}:{place}?",
        )
    raise DmlError(
        f"There is nothing to embed at {text}.",
        "It is not a folder of images, a table (.csv) or the name of a data set.",
        f"Check the path, or name a data set as NAME:FOLDER; there are {', '.join(names)}.",
    )


def is_named(text: str) -> bool:
    """Whether the user names a data set, which is divided as for training; else it is a path."""
    return text.partition(":")[0] in DATASETS.entries and not Path(text).exists()


def divided(data: DataSet, splits: Sequence[str], text: str, model: Metadata | None) -> DataSet:
    """Hold out validation classes as the training did, where `train` or `val` is embedded.

    A model that records no training on this data set is taken for one that was trained with the
    usual settings. Images that are not divided at all stay together.

    text: what the user called the data. model: the metadata of the model.
    """
    whole = set(data.counts()) == {"train"} and not is_named(text)
    if whole or not {"train", "val"} & set(splits) or not len(data.rows("train")):
        return data
    if model and model.division and model.dataset == data.name:
        return model.division.of(data)
    try:
        found = Division().of(data)
    except DmlError:  # too few classes, so that a training cannot have held out any either
        if "val" in splits:
            raise
        return data
    held_out = len(found.classes("val"))
    if held_out == len(data.classes("val")):
        return data
    note = (
        f"The model does not record how its training divided {text}: "
        f"{counted(held_out, 'class', 'classes')} of {len(data.classes('train')):,} are held out "
        "for validation, as train does by default."
    )
    return replace(found, notes=(*found.notes, note))


def all_or_chosen(data: DataSet, splits: Sequence[str], text: str) -> dict[str, np.ndarray]:
    """Rows by split; images that are not split at all become the split `test`.

    text: what the user called the data, for the error.
    """
    if set(data.counts()) != {"train"}:
        return chosen_splits(data, splits)
    names = list(dict.fromkeys(splits)) or ["test"]
    why = "All its images are embedded, as one split."
    if refused := [name for name in names if name not in ("test", "train")]:
        fix = "Leave out --split."
        if not is_named(text):
            fix = f"Leave out --split, or divide the classes as train does: {kind_of(text)}:{text}"
        raise DmlError(f"{text} is not split, so it has no split {', '.join(refused)}.", why, fix)
    if len(names) > 1:
        what = f"{text} is not split, so {' and '.join(names)} would hold the same images."
        raise DmlError(what, why, f"Choose one of them: --split {names[0]}")
    return {names[0]: data.rows("train")}
