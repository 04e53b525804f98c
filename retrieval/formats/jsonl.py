"""Read `.jsonl`: one object per line, with a list of numbers and a label."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from retrieval.embeddings import Embeddings
from retrieval.errors import DmlError
from retrieval.formats import labels
from retrieval.formats.arrays import EXACT, allocate, refuse_bomb, rounded, stored_size
from retrieval.formats.columns import Column, assemble, bad_line, label_column, roles
from retrieval.formats.text import open_text

BLOCK_ROWS, BLOCK_VALUES = 2048, 1 << 19


def read(path: Path, key: str | None, with_labels: bool) -> Embeddings:
    with open_text(path, "\n") as file:
        first = _first(file, path)
        columns = [Column(name, _kind(value)) for name, value in first.items()]
        found = roles(columns, key, path, with_labels)
        names = [columns[n].name for n in found.vectors]
        size = len(first[names[0]]) if found.is_list else len(names)
        rows = _vectors(_records(file, path), path, names, found.is_list, size)
        # A value takes a digit and a comma: this bounds the rows before any are read.
        most = os.path.getsize(path) // (2 * size) + 1
        refuse_bomb(str(path), stored_size(path), 8 * most * size)
        out = allocate((most, size), np.float64)
        keep = {role: columns[at].name for role, at in found.beside.items()}
        kept: dict[str, list] = {role: [] for role in keep}
        count = 0
        height = max(1, min(BLOCK_ROWS, BLOCK_VALUES // size))
        while block := list(islice(rows, height)):
            out[count : count + len(block)] = [values for values, _, _ in block]
            count += len(block)
            for role, name in keep.items():
                kept[role].extend(_field(r, name, path, line) for _, r, line in block)
    beside = {
        role: labels.from_values(values, str(path))
        if role == "labels"
        else labels.text([str(value) for value in values], str(path))
        for role, values in kept.items()
    }
    return assemble(path, "jsonl", out[:count], beside, found.taken)


def read_labels(path: Path, key: str | None) -> np.ndarray:
    with open_text(path, "\n") as file:
        first = _first(file, path)
        columns = [Column(name, _kind(value)) for name, value in first.items()]
        name = columns[label_column(columns, key, path)].name
        values = [_field(record, name, path, line) for line, record in _records(file, path)]
    return labels.from_values(values, str(path))


def _first(file: TextIO, path: Path) -> dict:
    """The first object; leaves the file at its start."""
    for text in file:
        if text.strip():
            file.seek(0)
            return next(_records([text], path))[1]
    raise DmlError(f"{path} has no rows.", "It holds blank lines only.", "Write it again.")


def _records(lines: Iterable[str], path: Path) -> Iterator[tuple[int, dict]]:
    for line, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            what, why = "the line is not valid JSON", f"The reader says: {error}"
            raise bad_line(path, line, what, why) from error
        if not isinstance(record, dict):
            what, why = "this is not a JSON object", "Every line is one object: {...}"
            raise bad_line(path, line, what, why)
        yield line, record


def _vectors(
    records: Iterator[tuple[int, dict]], path: Path, names: list[str], is_list: bool, size: int
) -> Iterator[tuple[list, dict, int]]:
    for line, record in records:
        fields = [_field(record, name, path, line) for name in names]
        values = fields[0] if is_list else fields
        if not isinstance(values, list) or len(values) != size:
            found = f"a list of {len(values)}" if isinstance(values, list) else "not a list"
            what, why = f"{names[0]} is {found}", f"The first has {size} numbers"
            raise bad_line(path, line, what, why)
        kinds = set(map(type, values))
        if not kinds <= {float, int}:
            what = f"{names[0]} holds values that are not numbers"
            raise bad_line(path, line, what, "A vector is a list of numbers")
        if int in kinds:
            _refuse_rounded(values, f"{path}, line {line}")
        yield values, record, line


def _refuse_rounded(values: list, where: str) -> None:
    for value in values:
        whole = type(value) is int and abs(value) > EXACT
        if whole and (abs(value) >= 2**1023 or int(float(value)) != value):
            raise rounded(f"{where}: {str(value)[:40]}")


def _field(record: dict, name: str, path: Path, line: int) -> object:
    value = record.get(name)
    if value is None:
        raise bad_line(path, line, f"{name} is missing", "Every line needs it")
    return value


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "list" if value and set(map(type, value)) <= {float, int} else "other"
    kinds = {int: "integer", bool: "integer", float: "number", str: "text"}
    return kinds.get(type(value), "other")
