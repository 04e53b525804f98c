"""Find out which columns of a table are vectors, label, path and split, and read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.embeddings import SPELLINGS, SPLITS, Embeddings, Split, note, to_read
from retrieval.errors import DmlError
from retrieval.formats import Wanted
from retrieval.formats.arrays import allocate, blocks, vectors
from retrieval.formats.named_arrays import LABEL_NAMES, LISTED, PATH_NAMES, VECTOR_NAMES

NUMBERS = ("number", "integer")
SPLIT_COLUMNS = frozenset(["split", "subset", "partition", "evaluation_status"])
# Row numbers, such as the column that pandas adds, are neither vectors nor labels.
ROW_NUMBERS = frozenset(["", "unnamed: 0", "index", "idx", "id", "row", "__index_level_0__"])


@dataclass(frozen=True)
class Column:
    name: str
    kind: str  # number, integer, text, list or other
    example: str = ""  # the first cell, where it is text

    @property
    def key(self) -> str:
        return self.name.strip().lower()


@dataclass(frozen=True)
class Roles:
    """Column numbers. `vectors` is one list column, or a column for each dimension."""

    vectors: list[int]
    is_list: bool
    beside: dict[str, int]  # labels, paths and split, as far as there are such columns
    taken: dict[str, str]  # role -> names, for people


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


NUMBERED = re.compile(r"(.*?)([0-9]{1,9})")


def fold(names: Sequence[str]) -> list[str]:
    """Names with each run of three and more that count upwards as one: d0 ... d31, 32 columns."""
    out: list[str] = []
    run: list[str] = []
    before: tuple[str, int] | None = None
    for name in [*names, None]:
        match = None if name is None else NUMBERED.fullmatch(name)
        place = (match[1], int(match[2])) if match else None
        if name is not None and before and place == (before[0], before[1] + 1):
            run.append(name)
        else:
            folded = len(run) > 2
            out += [f"{run[0]} ... {run[-1]}, {len(run):,} columns"] if folded else run
            run = [] if name is None else [name]
        before = place
    return out


def listed(names: Sequence[str]) -> str:
    """Names in one line, folded and cut."""
    folded = [name or "(unnamed)" for name in fold(names)]
    more = [f"and {len(folded) - LISTED} more"] if len(folded) > LISTED else []
    return ", ".join([*folded[:LISTED], *more])


def describe(columns: Sequence[Column]) -> str:
    lines = []
    for kind, group in groupby(columns, lambda column: column.kind):
        names = fold([column.name for column in group])
        lines += [f"  {name or '(unnamed)'}  {kind}" for name in names]
    if len(lines) > LISTED:
        lines = [*lines[:LISTED], f"  and {len(lines) - LISTED} more"]
    return "Its columns are:\n" + "\n".join(lines)


def chosen(columns: Sequence[Column], key: str | None, source: Path, wanted: Wanted) -> Roles:
    """The columns that are read; whatever can be read in two ways is an error, not a guess."""
    if wanted == "labels":
        return Roles([], False, {"labels": _label_column(columns, key, source)}, {})
    return _roles(columns, key, source, wanted == "all")


def _roles(columns: Sequence[Column], key: str | None, source: Path, with_labels: bool) -> Roles:
    wanted, _, label_key = (key or "").partition(",")
    label = None
    if label_key:
        label = _find(columns, label_key, source)
    elif with_labels:
        label = _known_label(columns, source)
    known = {label} | {
        n for n, c in enumerate(columns) if c.key in LABEL_NAMES and c.kind != "list"
    }
    path, split = (_text_column(columns, names, known) for names in (PATH_NAMES, SPLIT_COLUMNS))
    known |= {path, split}
    free = [n for n, c in enumerate(columns) if n not in known and c.key not in ROW_NUMBERS]
    chosen, is_list = _vectors(columns, free, wanted, source)
    if with_labels and label is None:
        used = set(chosen)
        label = _left_over(columns, [n for n in free if n not in used], source, wanted)
    single = {"labels": label, "paths": path, "split": split}
    beside = {role: n for role, n in single.items() if n is not None}
    taken = {"vectors": listed([columns[n].name for n in chosen])}
    taken |= {role: listed([columns[n].name]) for role, n in beside.items()}
    if not key:
        used = {*chosen, *beside.values()}
        _note_unused([columns[n] for n in free if n not in used], source)
    return Roles(chosen, is_list, beside, taken)


def _note_unused(unused: Sequence[Column], source: Path) -> None:
    names = listed([column.name for column in unused if column.kind != "text"])
    texts = listed([column.name for column in unused if column.kind == "text"])
    if unused:
        shown = [names] * bool(names) + [f"{texts} (text)"] * bool(texts)
        note(f"{source}: not used: {', '.join(shown)}")


def bad_line(path: Path, line: int, what: str, why: str) -> DmlError:
    """The error about one line of a text file."""
    return DmlError(f"{path}, line {line}: {what}.", f"{why}.", "Mend the line or remove it.")


def _find(columns: Sequence[Column], name: str, source: Path) -> int:
    for number, column in enumerate(columns):
        if column.name == name:
            return number
    raise DmlError(
        f"{source} has no column called {name}.", describe(columns), "Choose one of these columns."
    )


def _label_column(columns: Sequence[Column], key: str | None, source: Path) -> int:
    """The one column of a labels file."""
    if key:
        return _find(columns, key, source)
    known = _known_label(columns, source)
    if known is not None:
        return known
    others = ROW_NUMBERS | PATH_NAMES | SPLIT_COLUMNS
    free = [n for n, c in enumerate(columns) if c.key not in others]
    if len(columns) == 1 or len(free) == 1:
        return free[0] if free else 0
    raise DmlError(
        f"{source} has several columns and none called label.",
        describe(columns),
        f"Choose one: --labels '{source}::{columns[(free or [-1])[0]].name}'",
    )


def _known_label(columns: Sequence[Column], source: Path) -> int | None:
    fits = [n for n, c in enumerate(columns) if c.key in LABEL_NAMES and c.kind != "list"]
    if len(fits) > 1:
        exact = [n for n in fits if columns[n].key in ("label", "labels")]
        if len(exact) != 1:
            _ambiguous(columns, fits, source, "")
        fits = exact
    return fits[0] if fits else None


def _text_column(columns: Sequence[Column], names: frozenset[str], known: set) -> int | None:
    """The one column of text with such a name."""
    text = [n for n, c in enumerate(columns) if c.kind == "text" and c.key in names]
    fits = [n for n in text if n not in known]
    return fits[0] if len(fits) == 1 else None


def _left_over(columns: Sequence[Column], left: list[int], source: Path, wanted: str) -> int | None:
    for kind in ("text", "integer"):
        fits = [n for n in left if columns[n].kind == kind and columns[n].key not in PATH_NAMES]
        if len(fits) == 1:
            return fits[0]
        if fits:
            _ambiguous(columns, fits, source, wanted)
    return None


def _ambiguous(columns: Sequence[Column], fits: list[int], source: Path, wanted: str) -> None:
    raise DmlError(
        f"{source} has several columns that could be the label.",
        describe(columns),
        f"Choose one: dmltool eval '{source}::{wanted},{columns[fits[0]].name}'",
    )


def _vectors(
    columns: Sequence[Column], free: list[int], wanted: str, source: Path
) -> tuple[list[int], bool]:
    lists = [n for n in free if columns[n].kind == "list"]
    if wanted:
        exact = [n for n in lists if columns[n].name == wanted]
        if exact:
            return exact, True
        groups = _numbered(columns, free)
        if wanted in groups:
            return groups[wanted], False
        _refuse_gaps(columns, free, source)
        raise DmlError(
            f"{source} has neither a list column called {wanted} nor columns {wanted}0, {wanted}1.",
            describe(columns),
            "Choose a list column, or what the names of the numbered columns begin with.",
        )
    known = [n for n in lists if columns[n].key in VECTOR_NAMES]
    for fits in (lists, known):
        if len(fits) == 1:
            return fits, True
    if lists:
        raise DmlError(
            f"{source} has several columns that could be the embeddings.",
            describe(columns),
            f"Choose one: dmltool eval '{source}::{columns[lists[0]].name}'",
        )
    return _wide(columns, free, source), False


def _wide(columns: Sequence[Column], free: list[int], source: Path) -> list[int]:
    groups = _numbered(columns, free)
    known = {prefix: g for prefix, g in groups.items() if prefix.rstrip("_-. ") in VECTOR_NAMES}
    for fits in (groups, known):
        if len(fits) == 1:
            return next(iter(fits.values()))
    if groups:
        raise DmlError(
            f"{source} has several series of columns that could be the embeddings: "
            + ", ".join(f"{prefix}0" for prefix in groups)
            + ".",
            describe(columns),
            f"Choose one: dmltool eval '{source}::{next(iter(groups))}'",
        )
    _refuse_gaps(columns, free, source)
    numbers = [n for n in free if columns[n].kind in NUMBERS]
    if not numbers:
        raise DmlError(
            f"{source} has no columns of numbers.",
            describe(columns),
            "Give a file with a column for each dimension, or one column of [lists].",
        )
    return numbers


def _series(columns: Sequence[Column], free: list[int]) -> dict[str, dict[int, int]]:
    """Columns such as f0, f1, f2: prefix -> number -> column."""
    series: dict[str, dict[int, int]] = {}
    for n in free:
        if match := NUMBERED.fullmatch(columns[n].name.strip()):
            series.setdefault(match[1], {})[int(match[2])] = n
    return series


def _numbered(columns: Sequence[Column], free: list[int]) -> dict[str, list[int]]:
    """Series without gaps that hold numbers, in the order of their numbers."""
    found = {}
    for prefix, members in _series(columns, free).items():
        good = sorted(number for number, n in members.items() if columns[n].kind in NUMBERS)
        if len(good) > 1 and good[-1] - good[0] == len(good) - 1:
            found[prefix] = [members[number] for number in good]
    return found


def _refuse_gaps(columns: Sequence[Column], free: list[int], source: Path) -> None:
    """Raise if a column in the middle of a series is mostly not numbers: it would be left out."""
    for members in _series(columns, free).values():
        good = [number for number, n in members.items() if columns[n].kind in NUMBERS]
        for number, n in sorted(members.items()):
            if number not in good and good and min(good) < number < max(good):
                column = columns[n]
                cell = f", for example {column.example[:40]!r}" if column.example else ""
                names = listed([columns[members[number]].name for number in sorted(members)])
                raise DmlError(
                    f"{source}: the column {column.name} is mostly not numbers{cell}.",
                    f"It stands in the middle of {names}, and a vector needs all of them.",
                    "Mend the column, or rename it to leave it out.",
                )


def read(table: Table, key: str | None, source: Path, wanted: Wanted, format: str) -> Any:
    """Read the columns that are wanted: `Embeddings`, or labels alone."""
    found = chosen(table.columns, key, source, wanted)
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
    return Embeddings(source, format, _splits(source, rows[:count], columns, found.taken))


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
        splits[known] = Split(_gather(rows, at), **parts, taken=taken)
    return splits


def _gather(rows: np.ndarray, at: np.ndarray) -> np.ndarray:
    if at[-1] - at[0] == len(at) - 1:
        return rows[at[0] : at[-1] + 1]
    out = allocate((len(at), rows.shape[1]), rows.dtype)
    for part in blocks(len(at), rows.shape[1] * rows.itemsize):
        out[part] = rows[at[part]]
    return out
