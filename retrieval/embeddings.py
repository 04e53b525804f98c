"""Embeddings and Split: what an embedding file holds, once read, and notes on reading it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from retrieval.results import Source

_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)


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

    source: Path | str  # a path, or the address of what was downloaded
    format: str
    splits: dict[str, Split]
    label_names: np.ndarray | None = None  # (C,) str
    attrs: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what came up while reading, for people
    neighbours: np.ndarray | None = None  # (Q, K) gallery rows that the file lists for its queries

    @property
    def has_only_neighbours(self) -> bool:
        """Whether there are listed neighbours to compare with, and no labels to score by."""
        unlabelled = all(split.labels is None for split in self.splits.values())
        return self.neighbours is not None and unlabelled


def provenance(data: Embeddings) -> Source:
    """Where embeddings came from: the file, what was taken of it and its own metadata."""
    return {
        "file": str(data.source),
        "format": data.format,
        "attrs": {name: plain(value) for name, value in data.attrs.items()},
        "taken": {name: split.taken for name, split in data.splits.items()},
        "notes": list(data.notes),
    }


def plain(value: object) -> object:
    """A metadata value as JSON knows it."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | list | None) else str(value)


def note(text: str) -> None:
    """Add a remark, such as on a file's encoding, to those that `collected` gathers."""
    notes = _notes.get()
    if notes is not None and text not in notes:
        notes.append(text)


@contextmanager
def collected() -> Iterator[list[str]]:
    """The list of remarks made inside the block."""
    notes: list[str] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)
