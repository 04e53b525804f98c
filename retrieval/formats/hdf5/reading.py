"""Read dmltool's own embedding files and other HDF5 layouts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from retrieval.embeddings import Embeddings, Wanted
from retrieval.errors import DmlError, command, damaged
from retrieval.formats import labels
from retrieval.formats.hdf5.objects import datasets, entries, look, open_file
from retrieval.formats.named_arrays import Catalogue, Choice
from retrieval.formats.trial import attempt

FORMAT, VERSION = "dmltool-embeddings", 1


def read(path: Path, key: str | None, wanted: Wanted) -> Any:
    with open_file(path) as file:
        listed = Catalogue(entries(datasets(file, path), path), path)
        if wanted != "labels":
            if attribute(file, "format") == FORMAT:
                return _read_own(file, listed, key)
            names = set(listed.entries)
            if not key and {"train", "test"} <= names and {"neighbors", "distances"} & names:
                return _read_ann_benchmarks(file, listed)
        return listed.read(key, wanted, "hdf5")


def _read_ann_benchmarks(file: h5py.File, listed: Catalogue) -> Embeddings:
    """Queries `test`, gallery `train`, and the true `neighbors` of the queries."""
    chosen = {"query": Choice("test"), "gallery": Choice("train")}
    attrs = {"distance": attribute(file, "distance")} if "distance" in file.attrs else {}
    data = listed.read_chosen(chosen, "ann-benchmarks", attrs)
    if "neighbors" not in listed.entries:
        return data
    path, rows = listed.source, listed.entries["neighbors"].read()
    queries, gallery = (len(data.splits[name].vectors) for name in ("query", "gallery"))
    fits = rows.ndim == 2 and rows.dtype.kind in "iu" and len(rows) == queries and rows.size
    if not fits or int(rows.min()) < 0 or int(rows.max()) >= gallery:
        raise DmlError(
            f"{path}::neighbors has shape {rows.shape} and dtype {rows.dtype}.",
            f"It must name rows of train, 0 to {gallery - 1:,}, for each of {queries:,} queries.",
            "Write it again, or score by labels: "
            f"{command('eval', f'{path}::train', '--labels', 'FILE')}",
        )
    return replace(data, neighbours=rows.astype(np.int64))


def trial(path: Path, key: str | None, wanted: Wanted) -> None:
    """Open every object; read whatever HDF5 itself, and not NumPy, is to read later."""
    with open_file(path) as file:
        for name in file.attrs:
            attribute(file, name)
        found = datasets(file, path)
        for name, entry in entries(found, path).items():
            if entry.kind == "?":
                continue
            with suppress(DmlError):  # not every data set of a file is wanted
                look(found, path, name)


def attributes(path: Path) -> dict[str, object]:
    """The attributes of a file, which may be half-written; none if it cannot be read."""

    def read() -> dict[str, object]:
        with open_file(path) as file:
            return {name: attribute(file, name) for name in file.attrs}

    try:
        attempt(read, path, "HDF5")
        return read()
    except (DmlError, OSError, RuntimeError, KeyError, ValueError):
        return {}


def attribute(file: h5py.File, name: str) -> object:
    try:
        value = file.attrs.get(name)
    except (OSError, TypeError):  # a type that h5py cannot represent
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.item() if isinstance(value, np.generic) else value


def _read_own(file: h5py.File, listed: Catalogue, key: str | None) -> Embeddings:
    path, names = listed.source, listed.entries
    attrs = {name: attribute(file, name) for name in file.attrs}
    _check_version(attrs, path)
    if attrs.get("complete") is not True:
        raise DmlError(
            f"{path} is half-written.",
            "Its writer has not finished; rows may be missing.",
            "Let it be finished, or write it again.",
        )
    chosen = {}
    for name in names:
        split, _, role = name.partition("/")
        if role == "embeddings" and key in (None, split, name):
            beside = (f"{split}/{role}" for role in ("labels", "paths"))
            chosen[split] = Choice(name, *(each if each in names else None for each in beside))
    if not chosen:
        raise DmlError(
            f"{path} has no split called {key}." if key else f"{path} has no splits.",
            listed.describe(),
            "Choose one that it holds with FILE::SPLIT." if names else "Write the file again.",
        )
    data = listed.read_chosen(chosen, "hdf5", attrs)
    if "label_names" not in names:
        return data
    called = labels.paths(names["label_names"].read(), f"{path}::label_names")
    return replace(data, label_names=called)


def _check_version(attrs: dict[str, object], path: Path) -> None:
    version = attrs.get("version")
    if not isinstance(version, int) or version < 1:
        known = f"Versions 1 to {VERSION} are known: the file is damaged."
        raise damaged(f"{path} has the version {version!r}.", known)
    if version > VERSION:
        raise DmlError(
            f"{path} has version {version}, written by dmltool {attrs.get('dmltool', 'unknown')}.",
            f"This dmltool reads versions up to {VERSION}.",
            "Update dmltool: git pull in its repository, then install it again.",
        )
