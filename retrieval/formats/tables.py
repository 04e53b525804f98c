"""Which columns of a table are the vectors, the label, the path and the split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrieval.embeddings import Embeddings, Split
from retrieval.errors import DmlError
from retrieval.formats.arrays import allocate, blocks, vectors
from retrieval.formats.naming import (
    LABEL_NAMES,
    LISTED,
    PATH_NAMES,
    SPLIT_NAMES,
    VECTOR_NAMES,
)

SPLIT_COLUMNS = frozenset(["split", "subset", "partition", "evaluation_status"])
# Row numbers, such as the column that pandas adds, are neither vectors nor labels.
ROW_NUMBERS = frozenset(["", "unnamed: 0", "index", "idx", "id", "row", "__index_level_0__"])


@dataclass(frozen=True)
class Column:
    name: str
    kind: str  # number, integer, text, list or other

    @property
    def key(self) -> str:
        return self.name.strip().lower()


@dataclass(frozen=True)
class Roles:
    """Column numbers. `vectors` is one list column, or a column for each dimension."""

    vectors: list[int]
    is_list: bool
    label: int | None
    path: int | None
    split: int | None


def describe(columns: Sequence[Column]) -> str:
    lines = [f"  {column.name or '(unnamed)'}  {column.kind}" for column in columns]
    if len(lines) > LISTED:
        lines = [*lines[:LISTED], f"  and {len(lines) - LISTED} more"]
    return "its columns are:\n" + "\n".join(lines)


def roles(
    columns: Sequence[Column], key: str | None, source: Path, with_labels: bool = True
) -> Roles:
    wanted, _, label_key = (key or "").partition(",")
    label = None
    if label_key:
        label = find(columns, label_key, source)
    elif with_labels:
        label = _known_label(columns, source)
    taken = {label} | {
        n for n, c in enumerate(columns) if c.key in LABEL_NAMES and c.kind != "list"
    }
    path = _named(columns, PATH_NAMES, taken, ("text",))
    split = _named(columns, SPLIT_COLUMNS, taken, ("text",))
    taken |= {path, split}
    free = [n for n, c in enumerate(columns) if n not in taken and c.key not in ROW_NUMBERS]
    chosen, is_list = _vectors(columns, free, wanted, source)
    if with_labels and label is None:
        label = _left_over(columns, [n for n in free if n not in chosen], source, wanted)
    return Roles(chosen, is_list, label, path, split)


def find(columns: Sequence[Column], name: str, source: Path) -> int:
    for number, column in enumerate(columns):
        if column.name == name:
            return number
    raise DmlError(f"{source} has no column called {name}", describe(columns))


def label_column(columns: Sequence[Column], key: str | None, source: Path) -> int:
    """The one column of a labels file."""
    if key:
        return find(columns, key, source)
    known = _known_label(columns, source)
    if known is not None:
        return known
    free = [n for n, c in enumerate(columns) if c.key not in ROW_NUMBERS | PATH_NAMES]
    if len(columns) == 1 or len(free) == 1:
        return free[0] if free else 0
    raise DmlError(
        f"{source} has several columns and none called label",
        describe(columns),
        f"choose one: --labels '{source}::{columns[-1].name}'",
    )


def _known_label(columns: Sequence[Column], source: Path) -> int | None:
    fits = [n for n, c in enumerate(columns) if c.key in LABEL_NAMES and c.kind != "list"]
    if len(fits) > 1:
        exact = [n for n in fits if columns[n].key in ("label", "labels")]
        if len(exact) != 1:
            _ambiguous(columns, fits, source, "")
        fits = exact
    return fits[0] if fits else None


def _named(
    columns: Sequence[Column], names: frozenset[str], taken: set, kinds: tuple[str, ...]
) -> int | None:
    fits = [
        n for n, c in enumerate(columns) if c.key in names and c.kind in kinds and n not in taken
    ]
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
        f"{source} has several columns that could be the label",
        describe(columns),
        f"choose one: dmltool eval '{source}::{wanted},{columns[fits[0]].name}'",
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
        raise DmlError(
            f"{source} has neither a list column called {wanted} nor columns {wanted}0, {wanted}1",
            describe(columns),
        )
    known = [n for n in lists if columns[n].key in VECTOR_NAMES]
    for fits in (lists, known):
        if len(fits) == 1:
            return fits, True
    if lists:
        raise DmlError(
            f"{source} has several columns that could be the embeddings",
            describe(columns),
            f"choose one: dmltool eval '{source}::{columns[lists[0]].name}'",
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
            + ", ".join(f"{prefix}0..." for prefix in groups),
            describe(columns),
            f"choose one: dmltool eval '{source}::{next(iter(groups))}'",
        )
    numbers = [n for n in free if columns[n].kind in ("number", "integer")]
    if not numbers:
        raise DmlError(f"{source} has no columns of numbers", describe(columns))
    return numbers


def _numbered(columns: Sequence[Column], free: list[int]) -> dict[str, list[int]]:
    """Series such as f0, f1, f2, in the order of their numbers."""
    series: dict[str, dict[int, int]] = {}
    for n in free:
        match = re.fullmatch(r"(.*?)([0-9]{1,9})", columns[n].name.strip())
        if match and columns[n].kind in ("number", "integer"):
            series.setdefault(match[1], {})[int(match[2])] = n
    return {
        prefix: [members[number] for number in sorted(members)]
        for prefix, members in series.items()
        if len(members) > 1 and max(members) - min(members) == len(members) - 1
    }


def assemble(
    source: Path,
    format: str,
    rows: np.ndarray,
    labels: np.ndarray | None,
    paths: np.ndarray | None,
    split: np.ndarray | None,
) -> Embeddings:
    """One split called test, or those that the split column names."""
    rows = vectors(rows, str(source))
    if split is None:
        return Embeddings(source, format, {"test": Split(rows, labels, paths)})
    splits = {}
    for name in sorted(set(split.tolist())):
        if name.strip().lower() not in SPLIT_NAMES:
            raise DmlError(
                f"{source} has a split called {name!r}",
                "splits are " + ", ".join(sorted(set(SPLIT_NAMES.values()))),
                "rename it, or rename the split column if it means something else",
            )
        at = np.flatnonzero(split == name)
        splits[SPLIT_NAMES[name.strip().lower()]] = Split(
            _gather(rows, at),
            None if labels is None else labels[at],
            None if paths is None else paths[at],
        )
    return Embeddings(source, format, splits)


def _gather(rows: np.ndarray, at: np.ndarray) -> np.ndarray:
    if at[-1] - at[0] == len(at) - 1:
        return rows[at[0] : at[-1] + 1]
    out = allocate((len(at), rows.shape[1]), rows.dtype)
    for part in blocks(len(at), rows.shape[1] * rows.itemsize):
        out[part] = rows[at[part]]
    return out
