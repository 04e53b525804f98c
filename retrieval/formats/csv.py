"""`.csv`, `.tsv`: read in blocks by the standard library, so that a plain install can."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import TextIO

import numpy as np

from retrieval.embeddings import Embeddings
from retrieval.errors import DmlError
from retrieval.formats import labels
from retrieval.formats.arrays import allocate
from retrieval.formats.naming import LABEL_NAMES, PATH_NAMES, VECTOR_NAMES
from retrieval.formats.tables import SPLIT_COLUMNS, Column, Roles, assemble, label_column, roles

NUMBER = re.compile(
    r"\s*[-+]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|nan|inf|infinity)\s*\Z", re.I
)
WHOLE = re.compile(r"\s*[-+]?[0-9]+\s*\Z")
SAMPLE_ROWS, BLOCK_ROWS = 1000, 2048
FIELD_CHARS = 1 << 22  # a list of 4,096 numbers is longer than the csv module's own limit

Row = tuple[int, list[str]]  # line number and cells


def read(path: Path, key: str | None, with_labels: bool) -> Embeddings:
    with path.open(encoding="utf-8-sig", newline="") as file:
        columns, sample, rest = _open(file, path)
        found = roles(columns, key, path, with_labels)
        reader = _Reader(path, columns, found, sample)
        rows = chain(sample, rest)
        while block := list(islice(rows, BLOCK_ROWS)):
            reader.add(block)
    return reader.result()


def read_labels(path: Path, key: str | None) -> np.ndarray:
    with path.open(encoding="utf-8-sig", newline="") as file:
        columns, sample, rest = _open(file, path)
        at = label_column(columns, key, path)
        cells = []
        for line, row in chain(sample, rest):
            _check_width(row, len(columns), path, line)
            cells.append(row[at])
    first = sample[0][0] if sample else 1
    return labels.parsed(cells, str(path), first)


def _open(file: TextIO, path: Path) -> tuple[list[Column], list[Row], Iterator[Row]]:
    """The columns, the first rows, and the rest."""
    csv.field_size_limit(FIELD_CHARS)
    first = file.readline(FIELD_CHARS)
    file.seek(0)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t", key=first.count)
    rows = _rows(csv.reader(file, delimiter=delimiter), path)
    sample = list(islice(rows, SAMPLE_ROWS))
    if not sample:
        raise DmlError(f"{path} has no rows", "it holds blank lines only")
    names = _header(sample)
    body = sample[1:] if names else sample
    if not body:
        raise DmlError(f"{path} has a header and no rows", "nothing to read")
    width = len(body[0][1])
    for line, row in sample:
        _check_width(row, width, path, line)
    kinds = [_kind([row[n] for _, row in body]) for n in range(width)]
    columns = [Column(names[n] if names else "", kind) for n, kind in enumerate(kinds)]
    return columns if names else _name_columns(kinds), body, rows


def _rows(reader, path: Path) -> Iterator[Row]:
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise DmlError(f"{path}, line {reader.line_num}: {error}", "not valid CSV") from error


def _header(sample: list[Row]) -> list[str] | None:
    """The first row if it holds names, which may be pandas' 0, 1, 2..."""
    first = sample[0][1]
    known = LABEL_NAMES | PATH_NAMES | VECTOR_NAMES | SPLIT_COLUMNS
    numbers = [cell for cell in first if NUMBER.match(cell)]
    if not numbers:
        # One column of text has a header only if that is a familiar name, or numbers follow it.
        below = sample[1][1] if len(sample) > 1 else []
        listed = any(cell.lstrip().startswith("[") for cell in first)
        named = bool({cell.strip().lower() for cell in first} & known)
        changed = any(NUMBER.match(cell) or cell.lstrip().startswith("[") for cell in below)
        return first if not listed and (named or changed) else None
    if {cell.strip().lower() for cell in first} & known:
        return first
    if len(numbers) > 1 and all(map(WHOLE.match, numbers)):
        values = [int(cell) for cell in numbers]
        if values[0] in (0, 1) and values == list(range(values[0], values[0] + len(values))):
            return first
    return None


def _kind(cells: list[str]) -> str:
    if all(map(WHOLE.match, cells)):
        return "integer"
    # A column that is mostly numbers is one with a mistake in it, which is then told by line.
    if 2 * sum(map(bool, map(NUMBER.match, cells))) >= len(cells):
        return "number"
    if all(cell.lstrip().startswith(("[", "(")) for cell in cells):
        return "list"
    return "text"


def _name_columns(kinds: list[str]) -> list[Column]:
    """Without a header: the one text column, or integers at an edge of floats, are the label."""
    text = [n for n, kind in enumerate(kinds) if kind == "text"]
    whole = [n for n, kind in enumerate(kinds) if kind == "integer"]
    label = None
    if len(text) == 1:
        label = text[0]
    elif not text and len(whole) == 1 and whole[0] in (0, len(kinds) - 1) and len(kinds) > 1:
        label = whole[0]
    return [Column("label" if n == label else f"column{n}", k) for n, k in enumerate(kinds)]


def _check_width(row: list[str], width: int, path: Path, line: int) -> None:
    if len(row) != width:
        raise DmlError(
            f"{path}, line {line}: {len(row)} cells where other rows have {width}",
            "the line is cut short, or a text cell holds the delimiter without quotes",
        )


class _Reader:
    """Collects blocks of rows; the vectors go straight to where they stay."""

    def __init__(self, path: Path, columns: list[Column], found: Roles, sample: list[Row]) -> None:
        self.path, self.columns, self.roles, self.count = path, columns, found, 0
        at = found.vectors
        span = at == list(range(at[0], at[0] + len(at)))
        self.cells = itemgetter(slice(at[0], at[-1] + 1)) if span else itemgetter(*at)
        first = sample[0][1]
        self.dim = len(_numbers(first[at[0]])) if found.is_list else len(at)
        # A value takes a digit and a separator: this bounds the rows before any are read.
        rows = os.path.getsize(path) // max(1, 2 * self.dim - 1) + 1
        lines = _count_lines(path)
        # float64: how many digits a later line has cannot be known, and float32 could lose some.
        self.out = allocate((min(rows, lines), self.dim), np.float64)
        self.kept: dict[str, list[str]] = {"label": [], "path": [], "split": []}
        self.seen: dict[str, str] = {}  # one object for each distinct label
        self.first_line = sample[0][0]

    def add(self, block: list[Row]) -> None:
        for line, row in block:
            _check_width(row, len(self.columns), self.path, line)
        try:
            if self.roles.is_list:
                values = [self._list(line, row) for line, row in block]
            else:
                values = [list(map(float, self.cells(row))) for _, row in block]
        except ValueError:
            self._blame(block)
            values = [
                [float(cell.strip() or "nan") for cell in self.cells(row)] for _, row in block
            ]
        self.out[self.count : self.count + len(block)] = values
        self.count += len(block)
        for role, kept in self.kept.items():
            at = getattr(self.roles, role)
            if at is not None:
                kept.extend(self.seen.setdefault(row[at], row[at]) for _, row in block)

    def _list(self, line: int, row: list[str]) -> list[float]:
        values = list(map(float, _numbers(row[self.roles.vectors[0]])))
        if len(values) != self.dim:
            raise DmlError(
                f"{self.path}, line {line}: a vector of {len(values)} numbers",
                f"the first has {self.dim}",
            )
        return values

    def _blame(self, block: list[Row]) -> None:
        for line, row in block:
            for at in self.roles.vectors:
                for text in _numbers(row[at]) if self.roles.is_list else [row[at]]:
                    try:
                        float(text.strip() or "nan")  # pandas leaves NaN empty
                    except ValueError as error:
                        raise DmlError(
                            f"{self.path}, line {line}, column {at + 1} "
                            f"({self.columns[at].name}): {text[:40]!r} is not a number",
                            "every item needs all of its vector",
                        ) from error

    def result(self) -> Embeddings:
        where, kept = str(self.path), self.kept
        label = paths = split = None
        if self.roles.label is not None:
            label = labels.parsed(kept["label"], where, self.first_line)
        if self.roles.path is not None:
            paths = np.array(kept["path"], np.str_)
        if self.roles.split is not None:
            split = np.array(kept["split"], np.str_)
        return assemble(self.path, "csv", self.out[: self.count], label, paths, split)


def _numbers(cell: str) -> list[str]:
    """`[0.1, 0.2]` and NumPy's `[0.1 0.2]`."""
    return cell.strip().strip("[]()").replace(",", " ").split()


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return 1 + sum(
            max(block.count(b"\n"), block.count(b"\r"))
            for block in iter(lambda: file.read(1 << 20), b"")
        )
