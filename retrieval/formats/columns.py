"""Find out which columns of a table are vectors, label, path and split, and read them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from retrieval.embeddings import SPELLINGS, SPLITS, Embeddings, Split, Wanted, note, to_read
from retrieval.errors import DmlError, listed
from retrieval.formats import labels as label_arrays
from retrieval.formats.arrays import allocate, gathered, vectors
from retrieval.formats.named_arrays import LABEL_NAMES, LISTED, PATH_NAMES, VECTOR_NAMES

NUMBERS = ("number", "integer")
SPLIT_COLUMNS = frozenset(["split", "subset", "partition", "evaluation_status"])
# Row numbers, such as the column that pandas adds, are neither vectors nor labels.
ROW_NUMBERS = frozenset(["", "unnamed: 0", "index", "idx", "id", "row", "__index_level_0__"])
CONTENT_NAMES = frozenset(["image", "images", "file", "files"])
"""Names of paths, which bytes of this name are not: they are pictures."""


@dataclass(frozen=True)
class Column:
    at: int  # its number
    name: str
    kind: str  # number, integer, text, bytes, list or other
    example: str = ""  # the first cell, where it is text

    @property
    def key(self) -> str:
        return self.name.strip().lower()

    @property
    def is_label(self) -> bool:
        return self.key in LABEL_NAMES and self.kind != "list"


@dataclass(frozen=True)
class Roles:
    """The columns that are read. `vectors` is one list column, or one for each dimension."""

    vectors: Sequence[Column]
    beside: dict[str, Column]  # labels, paths and split, as far as there are such columns

    @property
    def is_list(self) -> bool:
        return bool(self.vectors) and self.vectors[0].kind == "list"


@dataclass(frozen=True)
class Table:
    """The columns of a file, and how to read some of them."""

    columns: list[Column]
    rows: Callable[[int], int]
    """How many rows there are at most, if their vectors have so many numbers."""
    blocks: Callable[[Roles], Iterator[tuple[np.ndarray | None, dict[str, Any]]]]
    """Vectors (n, D), None if only labels are read, and the values of the roles beside them."""
    convert: Callable[[str, list], np.ndarray]
    """A role and its parts of all blocks -> (N,) values."""
    label_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By column, the names that its integers count through."""


NUMBERED = re.compile(r"(.*?)([0-9]{1,9})")


def fold(names: Sequence[str]) -> list[str]:
    """Shorten every run of three or more numbered names: d0 ... d31, 32 columns."""

    def start(item: tuple[int, str]) -> object:
        """A key that is the same for all names of a run."""
        match = NUMBERED.fullmatch(item[1])
        return (match[1], int(match[2]) - item[0]) if match else item[0]

    out: list[str] = []
    for _, group in groupby(enumerate(names), start):
        run = [name or "(unnamed)" for _, name in group]
        out += [f"{run[0]} ... {run[-1]}, {len(run):,} columns"] if len(run) > 2 else run
    return out


def column_names(columns: Iterable[Column]) -> str:
    """Names in one line, folded and cut."""
    return listed(fold([column.name for column in columns]), LISTED)


def describe(columns: Sequence[Column]) -> str:
    lines: list[str] = []
    for kind, group in groupby(columns, lambda column: column.kind):
        lines += [f"{name}  {kind}" for name in fold([column.name for column in group])]
    return "Its columns are:\n  " + listed(lines, LISTED, "\n  ")


def bad_line(path: Path, line: int, what: str, why: str) -> DmlError:
    """The error about one line of a text file."""
    return DmlError(f"{path}, line {line}: {what}.", f"{why}.", "Correct the line or remove it.")


@dataclass(frozen=True)
class Choice:
    """Which columns are read; whatever can be read in two ways is an error, not a guess."""

    columns: Sequence[Column]
    source: Path

    def _fail(self, what: str, fix: str) -> NoReturn:
        raise DmlError(f"{self.source} has {what}.", describe(self.columns), fix)

    def roles(self, key: str | None, wanted: Wanted) -> Roles:
        if wanted == "labels":
            return Roles([], {"labels": self._only_label(key)})
        prefix, _, label_key = (key or "").partition(",")
        label = None
        if label_key:
            label = self._named(label_key)
        elif wanted == "all":
            label = self._known_label()
        known = {label, *(column for column in self.columns if column.is_label)}
        texts = [c for c in self.columns if c.kind in ("text", "bytes") and c not in known]
        named = (c for c in texts if c.kind == "text" or c.key not in CONTENT_NAMES)
        path = _single(column for column in named if column.key in PATH_NAMES)
        split = _single(column for column in texts if column.key in SPLIT_COLUMNS)
        known |= {path, split}
        free = [c for c in self.columns if c not in known and c.key not in ROW_NUMBERS]
        vectors = self._vectors(free, prefix)
        used, names = set(vectors), {column.name for column in vectors}
        if twice := [c.name for c in free if c.name in names and c not in used]:
            self._fail(
                f"several columns called {twice[0]}", "Rename or remove all but one of them."
            )
        if wanted == "all" and label is None:
            label = self._left_over([c for c in free if c not in used], prefix)
        beside = {"labels": label, "paths": path, "split": split}
        found = Roles(vectors, {role: column for role, column in beside.items() if column})
        if not key:
            self._note_unused([c for c in free if c not in used and c != label])
        return found

    def _note_unused(self, unused: Sequence[Column]) -> None:
        numbers = column_names(column for column in unused if column.kind != "text")
        texts = column_names(column for column in unused if column.kind == "text")
        if unused:
            shown = filter(None, (numbers, texts and f"{texts} (text)"))
            note(f"{self.source}: not used: {', '.join(shown)}")

    def _named(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        self._fail(
            f"no column called {name}", f"Choose one of these columns: {self.source}::COLUMN"
        )

    def _only_label(self, key: str | None) -> Column:
        """The one column of a labels file."""
        if key:
            return self._named(key)
        if known := self._known_label():
            return known
        others = ROW_NUMBERS | PATH_NAMES | SPLIT_COLUMNS
        free = [column for column in self.columns if column.key not in others]
        if len(free) == 1 or len(self.columns) == 1:
            return (free or self.columns)[0]
        example = (free or self.columns[-1:])[0].name
        self._fail(
            "several columns and none called label",
            f"Choose one: --labels '{self.source}::{example}'",
        )

    def _known_label(self) -> Column | None:
        fits = [column for column in self.columns if column.is_label]
        exact = [column for column in fits if column.key in ("label", "labels")]
        return self._one_label(exact if len(fits) > 1 and len(exact) == 1 else fits, "")

    def _left_over(self, left: Sequence[Column], prefix: str) -> Column | None:
        for kind in ("text", "integer"):
            fits = [c for c in left if c.kind == kind and c.key not in PATH_NAMES]
            if fits:
                return self._one_label(fits, prefix)
        return None

    def _one_label(self, fits: Sequence[Column], prefix: str) -> Column | None:
        if len(fits) > 1:
            choice = shlex.quote(f"{self.source}::{prefix},{fits[0].name}")
            self._fail("several columns that could be the label", f"Choose one: {choice}")
        return _single(fits)

    def _vectors(self, free: Sequence[Column], prefix: str) -> Sequence[Column]:
        """The one column of lists or series of numbered columns; without either, all numbers."""
        found = {column.name: [column] for column in free if column.kind == "list"}
        series = _series(free)
        if prefix:
            if prefix in found or prefix in series:
                return found.get(prefix) or series[prefix]
            self._refuse_gaps(free)
            self._fail(
                f"neither a list column called {prefix} nor columns {prefix}0, {prefix}1",
                "Choose a list column, or what the names of the numbered columns begin with.",
            )
        for several, what in ((found, ""), (series, "series of ")):
            known = [v for n, v in several.items() if n.strip("_-. ").lower() in VECTOR_NAMES]
            for fits in (list(several.values()), known):
                if len(fits) == 1:
                    return fits[0]
            if several:
                self._fail(
                    f"several {what}columns that could be the embeddings: {', '.join(several)}",
                    f"Choose one: {shlex.quote(f'{self.source}::{next(iter(several))}')}",
                )
        self._refuse_gaps(free)
        if numbers := [column for column in free if column.kind in NUMBERS]:
            return numbers
        self._fail(
            "no columns of numbers",
            "Give a file with a column for each dimension, or one column of [lists].",
        )

    def _refuse_gaps(self, free: Sequence[Column]) -> None:
        """Raise if a column inside a series is mostly not numbers: it would be left out."""
        for numbered in _numbered(free).values():
            members = list(numbered.values())
            good = [n for n, column in enumerate(members) if column.kind in NUMBERS]
            for column in members[good[0] : good[-1]] if good else ():
                if column.kind not in NUMBERS:
                    cell = f", for example {column.example[:40]!r}" if column.example else ""
                    raise DmlError(
                        f"{self.source}: the column {column.name} is mostly not numbers{cell}.",
                        f"It stands in the middle of {column_names(members)}, and a vector needs "
                        "all of them.",
                        "Correct the column, or rename it to leave it out.",
                    )


def _single(columns: Iterable[Column]) -> Column | None:
    found = list(columns)
    return found[0] if len(found) == 1 else None


def _numbered(free: Sequence[Column]) -> dict[str, dict[int, Column]]:
    """Columns such as f0, f1, f2: by the prefix of their names, sorted by number."""
    found: dict[str, dict[int, Column]] = {}
    for column in free:
        if match := NUMBERED.fullmatch(column.name.strip()):
            found.setdefault(match[1], {})[int(match[2])] = column
    return {prefix: dict(sorted(members.items())) for prefix, members in found.items()}


def _series(free: Sequence[Column]) -> dict[str, list[Column]]:
    """Numbered columns of numbers without gaps."""
    numbered = _numbered([column for column in free if column.kind in NUMBERS])
    return {
        prefix: list(members.values())
        for prefix, members in numbered.items()
        if len(members) > 1 and max(members) - min(members) == len(members) - 1
    }


def read(table: Table, key: str | None, source: Path, wanted: Wanted, format: str) -> Any:
    """Read the columns that are wanted: `Embeddings`, or labels alone."""
    found = Choice(table.columns, source).roles(key, wanted)
    kept: dict[str, list] = {role: [] for role in found.beside}
    rows, count = np.empty((0, 0)), 0
    for block, beside in table.blocks(found):
        if block is not None:
            if not count:
                shape = table.rows(block.shape[1]), block.shape[1]
                # A file that is one block is used where it lies.
                rows = block if block.shape == shape else allocate(shape, block.dtype)
            if rows is not block:
                rows[count : count + len(block)] = block
            count += len(block)
        for role, values in beside.items():
            kept[role].append(values)
    columns = {role: table.convert(role, parts) for role, parts in kept.items()}
    if wanted == "labels":
        return columns["labels"]
    taken = {"vectors": column_names(found.vectors)}
    taken |= {role: column_names([column]) for role, column in found.beside.items()}
    names = None
    if "labels" in columns and not label_arrays.is_text(columns["labels"]):
        names = table.label_names.get(found.beside["labels"].name)
    return Embeddings(
        source,
        format,
        _splits(source, rows[:count], columns, taken),
        label_arrays.text(names, str(source)) if names else None,
    )


def _splits(
    source: Path, rows: np.ndarray, beside: dict[str, np.ndarray], taken: dict[str, str]
) -> dict[str, Split]:
    """One split called test, or those that the split column names.

    beside: (N,) labels, paths and split, as far as there are such columns.
    """
    rows = vectors(rows, str(source))
    split = beside.pop("split", None)
    if split is None:
        return {"test": Split(rows, **beside, taken=taken)}
    names: dict[str, list[str]] = {}  # a split can be called `test` here and `Test` there
    for name in sorted(set(split.tolist())):
        if name.strip().lower() not in SPELLINGS:
            raise DmlError(
                f"{source} has a split called {name!r}.",
                f"Splits are {', '.join(SPLITS)}.",
                "Rename it, or rename the split column if it means something else.",
            )
        names.setdefault(SPELLINGS[name.strip().lower()], []).append(name)
    splits = {}
    for known in to_read(names):
        at = np.flatnonzero(np.isin(split, names[known]))
        parts = {role: values[at] for role, values in beside.items()}
        splits[known] = Split(gathered(rows, at), **parts, taken=taken)
    return splits
