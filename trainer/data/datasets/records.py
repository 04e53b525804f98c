"""A data set: columns of paths, labels and splits, and a way to read one image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from retrieval.embeddings import SPLITS
from retrieval.errors import DmlError

# (path as in the record, wanted short side or None) -> (H, W, 3) uint8 RGB. Readers are small
# frozen dataclasses, so that a data set can be sent to worker processes.
Reader = Callable[[str, int | None], np.ndarray]
Row = tuple[str, str, str]  # path, label, split


@dataclass(frozen=True)
class FileReader:
    """Images in files of their own under a root folder."""

    root: str
    background: tuple[int, int, int] = (255, 255, 255)
    """The colour behind transparent pixels."""

    def __call__(self, path: str, short_side: int | None = None) -> np.ndarray:
        from trainer.data.images import read_rgb

        return read_rgb(f"{self.root}/{path}", short_side, self.background)


@runtime_checkable
class Drawing(Protocol):
    """A reader that draws its images, so that it has them in any size and number."""

    def draws(self, path: str) -> bool:
        """Whether there is an image of this path."""

    def at_size(self, size: int) -> Reader:
        """The reader of the same images with sides of `size` pixels."""


@dataclass(frozen=True, eq=False)
class DataSet:
    """N images in columns: 60,000 of them cost little more than their paths."""

    name: str
    root: Path | None
    paths: tuple[str, ...]  # (N,) relative to root, with /; what the reader takes
    labels: np.ndarray  # (N,) int64, index into label_names
    label_names: tuple[str, ...]  # (C,)
    splits: np.ndarray  # (N,) int8, index into SPLITS
    reader: Reader
    options: Mapping[str, object] = field(default_factory=dict)  # as loaded, for the record
    notes: tuple[str, ...] = ()  # what the user should know, a sentence each

    def __len__(self) -> int:
        return len(self.paths)

    def rows(self, split: str) -> np.ndarray:
        """(n,) rows of a split, in order; none where the data set has no such split."""
        return np.flatnonzero(self.splits == _split_code(split))

    def classes(self, split: str) -> np.ndarray:
        """(c,) labels that occur in a split, sorted."""
        return np.unique(self.labels[self.rows(split)])

    def targets(self, split: str) -> np.ndarray:
        """(n,) labels of a split renumbered 0 .. c-1 in the order of `classes`."""
        return np.unique(self.labels[self.rows(split)], return_inverse=True)[1]

    def counts(self) -> dict[str, tuple[int, int]]:
        """Images and classes of each split that is there."""
        found = ((s, len(self.rows(s)), len(self.classes(s))) for s in SPLITS)
        return {split: (images, classes) for split, images, classes in found if images}

    def image(self, row: int, short_side: int | None = None) -> np.ndarray:
        """(H, W, 3) uint8 RGB; a JPEG may come smaller, its short side at least short_side."""
        return self.reader(self.paths[row], short_side)

    @property
    def labelled(self) -> bool:
        """Without names the labels mean nothing: such images can be embedded, not trained on."""
        return bool(self.label_names)

    def folder(self) -> str | None:
        """The folder that paths begin at; None where images are not files of their own."""
        return self.reader.root if isinstance(self.reader, FileReader) else None

    def files(self) -> list[str] | None:
        """The file of each row; None where images are not files of their own."""
        root = self.folder()
        return None if root is None else [f"{root}/{path}" for path in self.paths]

    def on(self, background: tuple[int, int, int]) -> DataSet:
        """The same with another colour behind transparent images."""
        if not isinstance(self.reader, FileReader):
            return self
        return replace(self, reader=replace(self.reader, background=background))

    def take(self, rows: np.ndarray, note: str = "") -> DataSet:
        """These rows only, in this order; labels keep their numbers and names."""
        rows = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            paths=tuple(self.paths[row] for row in rows.tolist()),
            labels=self.labels[rows],
            splits=self.splits[rows],
            notes=(*self.notes, note) if note else self.notes,
        )


def unlabelled(data: DataSet) -> DataSet:
    """The same images without labels."""
    return replace(data, labels=np.zeros(len(data), np.int64), label_names=())


def build(
    name: str,
    root: Path | None,
    rows: Iterable[Row],
    reader: Reader | None = None,
    notes: Iterable[str] = (),
    names: Iterable[str] = (),
) -> DataSet:
    """Columns from (path, label, split); labels are numbered as in names, then as they appear."""
    rows = list(rows)
    if not rows:
        raise DmlError(
            f"{name}: there are no images{'' if root is None else f' in {root}'}.",
            "Nothing is left to train on or to test.",
            "Check the folder of the images.",
        )
    paths, labels, splits = zip(*rows, strict=True)
    label_names = tuple(dict.fromkeys([*names, *labels]))
    numbers = {label: number for number, label in enumerate(label_names)}
    return DataSet(
        name,
        root,
        paths,
        np.array([numbers[label] for label in labels], dtype=np.int64),
        label_names,
        np.array([_split_code(split) for split in splits], dtype=np.int8),
        reader or FileReader(str(root)),
        notes=tuple(notes),
    )


def _split_code(split: str) -> int:
    if split not in SPLITS:
        known = f"There are: {', '.join(SPLITS)}."
        raise DmlError(f"There is no split called {split!r}.", known, "Name one of these.")
    return SPLITS.index(split)
