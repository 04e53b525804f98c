"""Embeddings and Split: what an embedding file holds; names of splits; notes on reading it.

Loads no NumPy: the help of commands names the splits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from retrieval.errors import DmlError

if TYPE_CHECKING:
    import numpy as np

    from retrieval.results import Source

T = TypeVar("T")
Wanted = Literal["all", "vectors", "labels"]
"""What is read of a file: vectors and labels, or only one of them; paths come with vectors."""
SPLITS = ("train", "val", "test", "query", "gallery")
HELD_OUT = ("test", "query", "gallery")
"""What scores are computed on: one test set, or queries and a gallery."""
SPELLINGS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("query", "queries", "probe"), "query"),
    "gallery": "gallery",
}

_notes: ContextVar[list[str]] = ContextVar("notes")
# No parameter: it would have to pass through the reader of every format.
_no_train: ContextVar[bool] = ContextVar("no_train", default=False)


@dataclass(frozen=True)
class Split:
    """One set of items. Arrays may be memory-mapped; vectors keep the dtype of the file."""

    vectors: np.ndarray  # (N, D) float16, float32, float64, int8 or uint8
    labels: np.ndarray | None = None  # (N,) integers of any width, or str
    paths: np.ndarray | None = None  # (N,) str
    taken: dict[str, str] = field(default_factory=dict)
    """vectors, labels, paths -> name in the file, or the other file that they are from"""


@dataclass(frozen=True)
class Embeddings:
    """The splits of one file: `test`, or `query` and `gallery`; `train` may be there too."""

    source: Path | str  # a path, or the address of what was downloaded
    format: str
    splits: dict[str, Split]
    label_names: np.ndarray | None = None  # (C,) str
    attrs: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what came up while reading, for people
    neighbours: np.ndarray | None = None  # (Q, K) gallery rows that the file lists for its queries
    shards: dict[str, list[tuple[Path, int]]] = field(default_factory=dict)
    """Of a set, by split: its files with their numbers of rows."""

    @property
    def has_only_neighbours(self) -> bool:
        """Whether there are listed neighbours to compare with, and no labels to score by."""
        unlabelled = all(split.labels is None for split in self.splits.values())
        return self.neighbours is not None and unlabelled


def class_names(labels: np.ndarray, names: np.ndarray | None) -> list[str] | None:
    """The names of integer labels, empty where there is none; None if labels need no names.

    names: (C,) those of the file, by label.
    """
    if names is None or labels.dtype.kind not in "iu":
        return None
    return [str(names[n]) if 0 <= n < len(names) else "" for n in labels.tolist()]


def provenance(data: Embeddings) -> Source:
    """Where embeddings came from: the file, what was taken of it and its own metadata."""
    return {
        "file": str(data.source),
        "format": data.format,
        "attrs": {name: plain(value) for name, value in data.attrs.items()},
        "taken": {name: split.taken for name, split in data.splits.items()},
        "notes": list(data.notes),
    }


def taken_of(split: dict[str, str]) -> str:
    """vectors from x; labels from y"""
    return "; ".join(f"{role} from {source}" for role, source in split.items())


def plain(value: object) -> object:
    """A metadata value as JSON knows it."""
    if hasattr(value, "tolist"):  # of NumPy
        value = value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[T]:
    """Inside the block, a context variable has this value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def note(text: str) -> None:
    """Add a remark, such as on a file's encoding, to those that `collected` gathers."""
    notes = _notes.get([])
    if text not in notes:
        notes.append(text)


def collected() -> AbstractContextManager[list[str]]:
    """The list of remarks made inside the block."""
    return setting(_notes, [])


@contextmanager
def renamed(
    change: Callable[[str], str], in_fix: Callable[[str], str] | None = None
) -> Iterator[None]:
    """Change the texts of errors and remarks of the block, such as names in them.

    in_fix: changes what to do about an error, if that differs.
    """
    with collected() as notes:
        try:
            yield
        except DmlError as error:
            fix = (in_fix or change)(error.fix)
            raise DmlError(change(error.what), change(error.why), fix) from error
    for text in notes:
        note(change(text))


def leaving_out_train(on: bool = True) -> AbstractContextManager[bool]:
    """Inside the block, the split `train` is not read where there are others to score."""
    return setting(_no_train, on)


def to_read(splits: Collection[str]) -> list[str]:
    """These splits, without `train` where that is left out and there are others to score."""
    without = _no_train.get() and scored_splits(splits)
    return [split for split in splits if split != "train" or not without]


def scored_splits(splits: Collection[str]) -> list[str]:
    """Of the splits of a file, those that are scored: query and gallery, else test, else none."""
    if {"query", "gallery"} <= set(splits):
        return ["query", "gallery"]
    return ["test"] if "test" in splits else []
