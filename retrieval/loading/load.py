"""Load any embedding file, optionally with labels or a gallery from other files, and save one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from retrieval import signals
from retrieval.distributed.world import ALONE, World
from retrieval.embeddings import (
    Embeddings,
    Split,
    Wanted,
    collected,
    leaving_out_train,
    note,
    to_read,
)
from retrieval.errors import DmlError, install
from retrieval.files import check_target
from retrieval.formats import find_format
from retrieval.formats import labels as label_arrays
from retrieval.formats.arrays import budget, copies, file_size
from retrieval.formats.shard_sets import note_part, require_no_part
from retrieval.loading.folders import note_outdated
from retrieval.loading.sources import Place, addresses_in_errors, locate
from retrieval.number_format import counted
from retrieval.resources import StageProgress

Find = Callable[..., Place]


def load(
    source: str | Path,
    *,
    labels: str | Path | None = None,
    gallery: str | Path | None = None,
    gallery_labels: str | Path | None = None,
    train: bool = True,
    progress: StageProgress | None = None,
    places: Mapping[str, Place] | None = None,
    world: World = ALONE,
) -> Embeddings:
    """Read an embedding file of any format that the README lists.

    Parameters
    ----------
    source : str or Path
        The file. `file::key` picks an array in it, `file::key,labels` its labels too. A run
        folder stands for the embeddings in it, a pattern or another folder for its files, which
        are joined in natural order of their names. Files behind an address such as
        s3://bucket/x.npy are downloaded to a cache, as for the other parameters; of large HDF5,
        Parquet and safetensors files, only the parts that are read.
    labels : str or Path, optional
        A file of labels, one for each row, in place of those of the source.
    gallery : str or Path, optional
        A file of gallery embeddings; the source then holds the queries.
    gallery_labels : str or Path, optional
        A file with the labels of the gallery.
    train : bool
        Read the split `train` too, where there is a `test` split, or queries and a gallery. Rows
        of `train` in a table with a column of splits are read in any case, and then left out.
    progress : function, optional
        Called with (stage, done, total) while files are downloaded.
    places : dict, optional
        The files that names stand for, where these have been found before: `Inputs.places`.
    world : World, optional
        The processes that read the same files. Only the first looks for what a note is for.

    Returns
    -------
    Embeddings
        Its `splits` hold vectors (N, D), maybe memory-mapped, labels (N,) and paths (N,).
    """

    def find(name: str | Path, labels: bool = False) -> Place:
        place = (places or {}).get(str(name)) or locate(name, progress, labels=labels)
        for copy in filter(None, map(copies.get, place.files)):
            copy.progress, copy.requests = progress, 0
        return place

    def remark(data: Embeddings) -> None:
        if world.rank == 0:
            note_outdated(data, progress)

    names = source, labels, gallery, gallery_labels
    with collected() as notes, addresses_in_errors(*names), leaving_out_train(not train):
        found = _labelled(source, labels, "query", find)
        remark(found)
        if gallery is not None:
            items = _labelled(gallery, gallery_labels, "gallery", find)
            remark(items)
            found = _beside(found, items, gallery)
        elif gallery_labels is not None:
            if "gallery" not in found.splits:
                raise DmlError(
                    f"{gallery_labels} is for a gallery, and {source} has none.",
                    f"Its splits are {', '.join(found.splits)}.",
                    "Give the gallery as well: --gallery gallery.npy",
                )
            found = _attach(found, "gallery", gallery_labels, find)
        found = _with_labels_alike(found)
        splits = {split: found.splits[split] for split in to_read(found.splits)}
    return replace(found, splits=splits, notes=tuple(notes))


def loaded(data: Embeddings | str | Path) -> Embeddings:
    """Return embeddings as they are, and the content of a file."""
    return data if isinstance(data, Embeddings) else load(data)


def _with_labels_alike(found: Embeddings) -> Embeddings:
    """With labels of one dtype, where there are queries and a gallery."""
    empty = Split(np.empty(0))
    queries, items = (found.splits.get(name, empty) for name in ("query", "gallery"))
    if queries.labels is None or items.labels is None:
        return found
    first, second = label_arrays.alike(queries.labels, items.labels)
    sides = {"query": replace(queries, labels=first), "gallery": replace(items, labels=second)}
    return replace(found, splits=found.splits | sides)


def _labelled(source: str | Path, labels: str | Path | None, split: str, find: Find) -> Embeddings:
    """A source with labels of its own, or of another file for its main split."""
    if labels is None:
        return read(find(source))
    found = read(find(source), "vectors")
    return _attach(found, _main_split(found, split), labels, find)


def _main_split(found: Embeddings, preferred: str) -> str:
    for name in (preferred, "test"):
        if name in found.splits:
            return name
    if len(found.splits) == 1:
        return next(iter(found.splits))
    raise DmlError(
        f"{found.source} has several splits: {', '.join(found.splits)}.",
        "One of them is needed here.",
        f"Choose one: {found.source}::{next(iter(found.splits))}",
    )


def _beside(queries: Embeddings, gallery: Embeddings, name: str | Path) -> Embeddings:
    """Queries from one file, gallery from another, with labels that mean the same."""
    if "gallery" in queries.splits:
        raise DmlError(
            f"{queries.source} has a gallery of its own.",
            f"{name} is given as the gallery as well.",
            f"Leave out --gallery, or choose the queries: {queries.source}::query",
        )
    queries, gallery = comparable(queries, gallery)
    items = gallery.splits[_main_split(gallery, "gallery")]
    vectors = "::".join([str(gallery.source), *filter(None, [items.taken.get("vectors")])])
    splits = {
        "query": queries.splits[_main_split(queries, "query")],
        "gallery": replace(items, taken=items.taken | {"vectors": vectors}),
    }
    models = {data.attrs.get("model_sha256") for data in (queries, gallery)} - {None, ""}
    if len(models) > 1:
        note("queries and gallery were embedded by different models")
    return replace(queries, splits=splits)


def comparable(first: Embeddings, second: Embeddings) -> tuple[Embeddings, Embeddings]:
    """Both with labels that mean the same: by name where both have names, else by number.

    Names are `label_names` or text labels. Integers that count through the same list of names stay.
    Text labels that all write integers are these integers beside a file of integers.
    """
    names, others = first.label_names, second.label_names
    if names is not None and others is not None and np.array_equal(names, others):
        return first, second
    both = (first, second)
    if all(data.label_names is not None or _is_text(data) for data in both):
        first, second = (_relabelled(data, partial(_named, data)) for data in both)
    else:
        first, second = (_relabelled(d, _numbered) if _is_text(d) else d for d in both)
    return first, second


def _is_text(data: Embeddings) -> bool:
    return all(label_arrays.is_text(s.labels) for s in data.splits.values() if s.labels is not None)


def _relabelled(data: Embeddings, change: Callable[[np.ndarray], np.ndarray]) -> Embeddings:
    splits = {
        name: part if part.labels is None else replace(part, labels=change(part.labels))
        for name, part in data.splits.items()
    }
    return replace(data, label_names=None, splits=splits)


def _numbered(labels: np.ndarray) -> np.ndarray:
    found = label_arrays.numbers(labels)
    return labels if found is None else found


def _named(data: Embeddings, labels: np.ndarray) -> np.ndarray:
    if data.label_names is None or label_arrays.is_text(labels) or not len(labels):
        return labels
    return label_arrays.named(labels, data.label_names, str(data.source))


def _attach(data: Embeddings, split: str, source: str | Path, find: Find = locate) -> Embeddings:
    """The labels of a file of their own in place of those of a split, and of their names."""
    with leaving_out_train(False):  # files of labels may be of one array, whatever their names
        place = find(source, labels=True)
    part = data.splits[split]
    values = read(place, "labels", data.shards.get(split, ()))
    if len(values) != len(part.vectors):
        raise DmlError(
            f"{source} has {counted(len(values), 'label')} for "
            f"{counted(len(part.vectors), 'vector')}.",
            f"Every item of {split} needs exactly one.",
            "Give a file of labels with one for each vector, in the same order.",
        )
    part = replace(part, labels=values, taken=part.taken | {"labels": str(place)})
    return replace(data, label_names=None, splits=data.splits | {split: part})


# One file, or one set of files


def read(place: Place, wanted: Wanted = "all", rows: Sequence[tuple[Path, int]] = ()) -> Any:
    """The `Embeddings` in one file or set of shards, or its labels where only those are wanted.

    rows: of labels, the files of the vectors that they are for, as in `Embeddings.shards`.
    """
    if wanted == "all" and place.labels:
        found = _read_file(place.files[0], place.key, "vectors")
        return replace(_attach(found, _main_split(found, "test"), place.labels), source=place.name)
    if not place.is_set:
        found = _read_file(place.files[0], place.key, wanted)
        if wanted != "labels":
            if place.folder:
                require_no_part(place.folder, found)
            note_part(found)
        return found
    from retrieval.formats import shards

    chosen = [] if place.is_named else shards.of_split(place.files, place.key)
    each = partial(_read_shard if chosen else _read_file, key=place.key, wanted=wanted)
    if wanted == "labels":
        return shards.join_labels(place.name, chosen or place.files, each, rows)
    return shards.join(place.name, chosen or place.files, each)


def _read_shard(path: Path, key: str | None, wanted: Wanted) -> Any:
    """The split `key` of a file whose name tells it, and which may hold other splits too."""
    try:
        return _read_file(path, key, wanted)
    except DmlError:  # nothing in the file has that name
        return _read_file(path, None, wanted)


def _read_file(path: Path, key: str | None, wanted: Wanted) -> Any:
    """`Embeddings`, or an array of labels where only those are wanted."""
    format = find_format(path)
    if format.labels_only and wanted != "labels":
        from retrieval.formats.refused import labels_only

        raise labels_only(path)
    # A damaged file may fail anywhere inside a library: whatever it raises, the user is told
    # which file it was. The cause stays attached for --debug.
    try:
        signals.expect_size(str(path), file_size(path))
        if work := format.trial(path, key, wanted):
            from retrieval.formats import trial

            trial.attempt(work, path, format.name)
        with budget(path):
            return format.read(path, key, wanted)
    except (DmlError, MemoryError):
        raise
    except ModuleNotFoundError as error:
        raise DmlError(
            f"{path} needs {error.name}, which is not installed.",
            f"Reading {path.suffix or format.name} files needs an optional package.",
            install(format.extra or "cpu"),
        ) from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise DmlError(
            f"{path} cannot be read as {format.name}.",
            f"The reader says: {type(error).__name__}: {lines[0][:300].rstrip('.')}.",
            "Copy or write the file again, or give it the suffix of its format.",
        ) from error


def save(
    path: str | Path,
    data: Embeddings | Split | Mapping[str, Split],
    *,
    label_names: np.ndarray | None = None,
    attrs: Mapping[str, object] | None = None,
    force: bool = False,
) -> None:
    """Write embeddings to an HDF5 file, whole or not at all.

    Parameters
    ----------
    path : str or Path
        The file, with a name that ends in .h5, .hdf5 or .he5.
    data : Embeddings, Split or dict of Split
        What to write: all splits of an `Embeddings`, a `Split` as the split "test", or splits by
        name ("test", or "query" and "gallery"; "train" may be there too).
    label_names : array of str (C,), optional
        Names of the integer labels. Default: those of an `Embeddings`.
    attrs : dict, optional
        Metadata, such as {"model": "resnet50"}. Default: that of an `Embeddings`.
    force : bool
        Overwrite a file that exists.
    """
    from retrieval.formats.hdf5.writing import KIND, write

    check_target(path, KIND, force)
    splits: Mapping[str, Split]
    if isinstance(data, Embeddings):
        splits = data.splits
        label_names = data.label_names if label_names is None else label_names
        attrs = data.attrs if attrs is None else attrs
    else:
        splits = {"test": data} if isinstance(data, Split) else data
    write(path, dict(splits), label_names, None if attrs is None else dict(attrs), force)
