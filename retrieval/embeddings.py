"""What an embedding file holds, once read, and the one call that reads any of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from retrieval.errors import DmlError
from retrieval.formats import labels as label_arrays
from retrieval.formats import opening
from retrieval.formats.notes import collected


@dataclass(frozen=True)
class Split:
    """One set of items. Arrays may be memory-mapped; vectors keep the dtype of the file."""

    vectors: np.ndarray  # (N, D) float16, float32, float64, int8 or uint8
    labels: np.ndarray | None = None  # (N,) integers of any width, or str
    paths: np.ndarray | None = None  # (N,) str
    taken: dict[str, str] = field(
        default_factory=dict
    )  # vectors, labels, paths -> name in the file


@dataclass(frozen=True)
class Embeddings:
    """The splits of one file: `test`, or `query` and `gallery`; `train` may be there too."""

    source: Path
    format: str
    splits: dict[str, Split]
    label_names: np.ndarray | None = None  # (C,) str
    attrs: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what came up while reading, for people


def load(
    source: str | Path,
    *,
    labels: str | Path | None = None,
    gallery: str | Path | None = None,
    gallery_labels: str | Path | None = None,
) -> Embeddings:
    """Read any embedding file. `file::key` picks an array, `file::key,labels` its labels too.

    With a `gallery`, the source holds the queries. Labels may come from files of their own.
    """
    with collected() as notes:
        found = _load(source, labels, gallery, gallery_labels)
    return replace(found, notes=tuple(notes))


def _load(
    source: str | Path,
    labels: str | Path | None,
    gallery: str | Path | None,
    gallery_labels: str | Path | None,
) -> Embeddings:
    found = opening.read(source, with_labels=labels is None)
    if gallery is not None:
        found = _beside(found, opening.read(gallery, with_labels=gallery_labels is None), gallery)
    splits = dict(found.splits)
    if labels is not None:
        _attach(splits, _main_split(found, "query"), labels)
    if gallery_labels is not None:
        if "gallery" not in splits:
            raise DmlError(
                f"{gallery_labels} is for a gallery, and {source} has none",
                f"its splits are {', '.join(splits)}",
                "give the gallery as well: --gallery gallery.npy",
            )
        _attach(splits, "gallery", gallery_labels)
    query, other = (
        splits.get("query", Split(np.empty(0))),
        splits.get("gallery", Split(np.empty(0))),
    )
    if query.labels is not None and other.labels is not None:
        first, second = label_arrays.alike(query.labels, other.labels)
        splits["query"] = replace(query, labels=first)
        splits["gallery"] = replace(other, labels=second)
    return replace(found, splits=splits)


def _main_split(found: Embeddings, preferred: str) -> str:
    for name in (preferred, "test"):
        if name in found.splits:
            return name
    if len(found.splits) == 1:
        return next(iter(found.splits))
    raise DmlError(
        f"{found.source} has several splits: {', '.join(found.splits)}",
        "one of them is needed here",
        f"choose one: {found.source}::{next(iter(found.splits))}",
    )


def _beside(queries: Embeddings, gallery: Embeddings, name: str | Path) -> Embeddings:
    """Queries from one file, gallery from another, with labels that mean the same."""
    if "gallery" in queries.splits:
        raise DmlError(
            f"{queries.source} has a gallery of its own",
            f"and {name} is given as the gallery as well",
            f"leave out --gallery, or choose the queries: {queries.source}::query",
        )
    queries, gallery = comparable(queries, gallery)
    splits = {
        "query": queries.splits[_main_split(queries, "query")],
        "gallery": gallery.splits[_main_split(gallery, "gallery")],
    }
    return replace(queries, splits=splits)


def comparable(first: Embeddings, second: Embeddings) -> tuple[Embeddings, Embeddings]:
    """Both with labels that mean the same.

    Integers that count through different lists of names are not comparable: the names are.
    """
    if _same_names(first, second):
        return first, second
    return tuple(
        replace(data, label_names=None, splits={n: _named(s, data) for n, s in data.splits.items()})
        for data in (first, second)
    )


def _same_names(first: Embeddings, second: Embeddings) -> bool:
    if first.label_names is None or second.label_names is None:
        return True
    return np.array_equal(first.label_names, second.label_names)


def _named(split: Split, source: Embeddings) -> Split:
    names, values = source.label_names, split.labels
    if values is None or values.dtype.kind == "U" or not len(values):
        return split
    if int(values.min()) < 0 or int(values.max()) >= len(names):
        raise DmlError(
            f"{source.source} has labels that are not among its {len(names)} label names",
            f"they go from {values.min()} to {values.max()}",
        )
    return replace(split, labels=names[values])


def _attach(splits: dict[str, Split], split: str, source: str | Path) -> None:
    values = opening.read_labels(source)
    expected = len(splits[split].vectors)
    if len(values) != expected:
        raise DmlError(
            f"{source} has {len(values):,} labels for {expected:,} vectors",
            f"every item of {split} needs exactly one",
        )
    taken = splits[split].taken | {"labels": str(source)}
    splits[split] = replace(splits[split], labels=values, taken=taken)
