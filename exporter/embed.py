"""`embed_with`: any ONNX model that embeds images, on any images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from exporter.embedding.decoding import side_by_side
from exporter.embedding.writing import embed
from exporter.export import chosen_splits
from exporter.onnx.foreign import Given, foreign_preprocessing
from exporter.onnx.model import describe
from retrieval.errors import DmlError
from retrieval.files import check_target
from retrieval.formats.hdf5.file import check_name
from retrieval.resources import StageProgress
from trainer.data.datasets import DATASETS, DataSet, csv, folder, load
from trainer.data.source import Source


def embed_with(
    model: Path,
    data: str,
    target: Path,
    *,
    output_name: str | None = None,
    provider: str = "auto",
    threads: int | None = None,
    splits: Sequence[str] = (),
    progress: StageProgress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """data: a folder with a folder for each class, a table, or the name of a data set.

    options: batch_size, half, force, resume and skip_bad of `embed`, and for models of other
    programs what `Given` lists.
    """
    described = describe(model, output_name)
    said = {part.name: options.pop(part.name) for part in fields(Given) if part.name in options}
    prepared = foreign_preprocessing(described, **said)
    images = find_data(data).on(prepared.background)
    given = [model, *described.beside, Path(data)]
    target = check_target(target, options.get("force") or options.get("resume"), given)
    same_name = [Path(file) for file in images.files() or () if Path(file).name == target.name]
    check_target(target, True, same_name)
    check_name(target)
    rows = all_or_chosen(images, splits)
    session, lanes = side_by_side(described, provider, prepared, threads)
    own = described.metadata
    attrs = {
        "model": model.name,
        "model_sha256": described.sha256,
        "normalized": bool(own and own.normalized),
        "backend": "onnx",
    }
    found = embed(
        session.run,
        session.dim,
        Source(images, prepared.spec()),
        prepared,
        rows,
        target,
        attrs=attrs,
        lanes=lanes,
        stop=session.stop,
        progress=progress,
        **options,
    )
    return asdict(found) | {
        "path": str(found.path),
        "run_by": session.why,
        "labelled": images.labelled,
    }


def find_data(text: str) -> DataSet:
    """`photos/`, `images.csv`, `cub:CUB_200_2011`, `glyphs`, or `glyphs:query`.

    `photos/` is all images, labelled or not; `folder:photos` is divided as for training.
    """
    name, colon, root = text.partition(":")
    names = DATASETS.entries
    if colon and name in names:
        return load(name, root) if names[name].needs_root else load(name, variant=root)
    path = Path(text)
    if path.is_dir():
        return folder.read_flat(path) or load("folder", path, test_fraction=0.0)
    if path.is_file():
        return csv.read_unlabelled(path) or load("csv", path, test_fraction=0.0)
    if text in names and not names[text].needs_root:
        return load(text)
    fix = f"{text}:FOLDER" if text in names else f"One of {', '.join(names)} goes as NAME:FOLDER."
    raise DmlError(
        f"There is nothing to embed at {text}.",
        "A folder of images or of a folder for each class, a table (.csv), or a data set's name.",
        fix,
    )


def all_or_chosen(data: DataSet, splits: Sequence[str]) -> dict[str, np.ndarray]:
    """Images that are not divided are one split, called test: they are there to be searched."""
    there = data.counts()
    if not splits and set(there) == {"train"}:
        return {"test": data.rows("train")}
    return chosen_splits(data, splits)
