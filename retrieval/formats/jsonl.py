"""Read `.jsonl`: one object per line, with a list of numbers and a label."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from retrieval.embeddings import Wanted
from retrieval.errors import DmlError
from retrieval.formats import labels
from retrieval.formats.arrays import EXACT, rounded
from retrieval.formats.columns import Column, Roles, Table, bad_line
from retrieval.formats.text import most_rows, open_text

BLOCK_ROWS, BLOCK_VALUES = 2048, 1 << 19


def table(path: Path, wanted: Wanted) -> Table:
    first = next((record for _, record in _records(path)), None)
    if first is None:
        raise DmlError(f"{path} has no rows.", "It holds blank lines only.", "Write it again.")
    columns = [Column(n, name, _kind(first[name])) for n, name in enumerate(first)]

    def blocks(found: Roles) -> Iterator[tuple[np.ndarray | None, dict[str, list]]]:
        names = [column.name for column in found.vectors]
        keep = {role: column.name for role, column in found.beside.items()}
        size = len(first[names[0]]) if found.is_list else len(names)
        records = _records(path)
        while block := list(islice(records, max(1, min(BLOCK_ROWS, BLOCK_VALUES // max(1, size))))):
            vectors = [_vector(path, *row, names, found.is_list, size) for row in block if names]
            yield (
                np.array(vectors, np.float64) if names else None,
                {role: [_field(path, *row, name) for row in block] for role, name in keep.items()},
            )

    def convert(role: str, parts: list[list]) -> np.ndarray:
        values = chain.from_iterable(parts)
        if role == "labels":
            return labels.from_values(values, str(path))
        return labels.text(list(map(str, values)), str(path))

    return Table(columns, partial(most_rows, path), blocks, convert)


def _records(path: Path) -> Iterator[tuple[int, dict]]:
    """Line numbers and objects."""
    with open_text(path, "\n") as file:
        for line, text in enumerate(file, 1):
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


def _vector(
    path: Path, line: int, record: dict, names: list[str], is_list: bool, size: int
) -> list:
    fields = [_field(path, line, record, name) for name in names]
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
    return values


def _refuse_rounded(values: list, where: str) -> None:
    for value in values:
        whole = type(value) is int and abs(value) > EXACT
        if whole and (abs(value) >= 2**1023 or int(float(value)) != value):
            raise rounded(f"{where}: {str(value)[:40]}")


def _field(path: Path, line: int, record: dict, name: str) -> object:
    value = record.get(name)
    if value is None:
        raise bad_line(path, line, f"{name} is missing", "Every line needs it")
    return value


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "list" if value and set(map(type, value)) <= {float, int} else "other"
    kinds = {int: "integer", bool: "integer", float: "number", str: "text"}
    return kinds.get(type(value), "other")
