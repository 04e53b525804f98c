"""Convert labels and paths of any origin to int64, uint64 or str, never through a float.

Text is an array of str, or of Python's own str objects where some are much longer than most.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from retrieval.errors import DmlError, damaged
from retrieval.formats.arrays import file_blocks, reserve

# Canonical, so that "07" and "7", or "-0" and "0", stay different.
INTEGER = re.compile(r"(0|-?[1-9][0-9]*)\Z")
WHOLE_FLOAT = re.compile(r"(0|-?[1-9][0-9]*)\.0\Z")  # how pandas writes integers beside NaN
# NumPy gives every text the room of the longest: one long label can fill the memory.
PADDED_BYTES, PADDED_CHARS = 1 << 24, 16


def labels(array: np.ndarray, where: str) -> np.ndarray:
    """(N,) int64, uint64 where int64 is too small, or str."""
    array = column(array, where)
    kind = array.dtype.kind
    if kind in "bi":
        return array if array.dtype == np.int64 else array.astype(np.int64)
    if kind == "u":
        small = array.dtype.itemsize < 8 or not array.size or int(array.max()) < 2**63
        return array.astype(np.int64 if small else np.uint64)
    if kind == "f":
        return _whole(array, where)
    return strings(array, where)


def column(array: np.ndarray, where: str) -> np.ndarray:
    """A 1-D array; one column or one row of a 2-D array will do."""
    if array.ndim == 2 and 1 in array.shape:
        array = array.reshape(-1)
    if array.ndim != 1:
        raise DmlError(
            f"{where} has the shape {array.shape}.",
            "Labels are a 1-D array, one for each item.",
            "Choose another array with FILE::KEY; for one-hot rows save y.argmax(1).",
        )
    return array


def _whole(array: np.ndarray, where: str) -> np.ndarray:
    # Beyond the mantissa neighbouring integers share a float: distinct classes would merge.
    limit = 2.0 ** min(53, np.finfo(array.dtype).nmant + 1)
    wide = array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(wide) <= limit) & (wide == np.floor(wide)))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise _unfit(
            f"{where} has the label {array[row]} in row {row}.",
            f"Labels stored as {array.dtype} must be whole numbers of at most {limit:.0f}.",
        )
    return wide.astype(np.int64)


def is_text(array: np.ndarray) -> bool:
    """Whether labels that this module has made are text."""
    return array.dtype.kind in "UO"


def strings(array: np.ndarray, where: str, errors: str = "strict") -> np.ndarray:
    """str from str, UTF-8 bytes, or objects that are either."""
    kind = array.dtype.kind
    if kind == "U":
        _check_characters(array, where)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    try:
        if kind in "SOT":
            return _from_objects(array.tolist(), errors, where)
    except (UnicodeDecodeError, TypeError) as error:
        raise DmlError(
            f"{where} holds text that is not UTF-8.",
            f"The reader says: {error}.",
            "Save it as UTF-8.",
        ) from error
    raise _unfit(f"{where} has the dtype {array.dtype}.", "Labels are integers or strings.")


def _unfit(what: str, why: str) -> DmlError:
    return DmlError(what, why, "Save the labels as integers or strings.")


def _check_characters(array: np.ndarray, where: str) -> None:
    """Raise for numbers that are no characters: Python cannot make a str of them."""
    if not array.size or not array.itemsize:
        return
    for rows in file_blocks(len(array), array.itemsize):
        part = np.ascontiguousarray(array[rows])
        codes = part.view(array.dtype.byteorder + "u4").reshape(len(part), -1)
        if int(codes.max()) > sys.maxunicode:
            row = rows.start + int(np.argmax(codes.max(axis=1) > sys.maxunicode))
            raise damaged(
                f"{where} holds {hex(int(codes.max()))} as a character, in row {row}.",
                f"The last character of Unicode is {hex(sys.maxunicode)}: the file is damaged.",
            )


def _from_objects(values: list, errors: str, where: str) -> np.ndarray:
    known: dict[object, str] = {}  # one object for each distinct text
    for value in values:
        if value not in known:
            decoded = value.decode("utf-8", errors) if isinstance(value, bytes) else value
            if not isinstance(decoded, str):
                raise TypeError("some values are neither text nor bytes")
            known[value] = decoded
    return text([known[value] for value in values], where)


def text(values: Sequence[str], where: str) -> np.ndarray:
    """(N,) str, or objects where room for the longest in every row would take too much memory."""
    if not len(values):
        return np.empty(0, "U1")
    for row, value in enumerate(values):
        if value.endswith("\0"):  # NumPy would drop it, and merge two labels
            raise DmlError(
                f"{where} has a text that ends in a zero character, in row {row}: {value[:40]!r}.",
                "Such a text cannot be told from the same text without it.",
                "Remove the zero characters.",
            )
    distinct = set(values)
    padded = max(map(len, distinct)) * len(values)
    room = 2 * sum(map(len, distinct)) + PADDED_CHARS * len(values)
    if 4 * padded > PADDED_BYTES and padded > room:
        return np.array(values, object)
    reserve(4 * padded)
    return np.array(values, np.str_)


def named(numbers: np.ndarray, names: np.ndarray, where: str) -> np.ndarray:
    """The name of each number."""
    if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= len(names)):
        raise DmlError(
            f"{where} has labels that are not among its {len(names)} label names.",
            f"They go from {numbers.min()} to {numbers.max()}.",
            "Write the file again with a name for each label.",
        )
    known = names.tolist()
    return text([known[number] for number in numbers.tolist()], where)


def paths(array: np.ndarray, where: str) -> np.ndarray:
    """File names as text; bytes that are not UTF-8 become surrogates, as in `os.fsdecode`."""
    return strings(column(array, where), where, "surrogateescape")


def parsed(cells: Sequence[str], where: str, first_line: int = 1) -> np.ndarray:
    """Labels from text: integers if every cell is one, otherwise the text itself."""
    if "" in cells:
        raise DmlError(
            f"{where}, line {first_line + list(cells).index('')}: the label is empty.",
            "Every item needs a label.",
            "Fill it in, or remove the item.",
        )
    bare = [cell.strip() for cell in cells]  # of text, spaces are part of the label
    if all(map(INTEGER.match, bare)):
        return _fit(list(map(_integer, bare)), cells)
    if all(map(WHOLE_FLOAT.match, bare)):
        values = [_integer(cell.partition(".")[0]) for cell in bare]
        if _within(values, -(2**53), 2**53):
            return np.array(values, np.int64)
    return text(cells, where)


def from_values(values: Iterable[Any], where: str) -> np.ndarray:
    """Labels from Python objects: integers, whole floats, bools or strings, not mixed."""
    values = list(values)
    kinds = {type(value) for value in values}
    if kinds in ({int}, {bool}):  # True beside 1 could mean the same class or another
        return _fit([int(value) for value in values], [str(value) for value in values])
    if kinds <= {str}:
        return text(values, where)
    if kinds <= {int, float} and _within(
        [value for value in values if type(value) is int], -(2**53), 2**53
    ):
        return labels(np.array(values, np.float64), where)
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    what = f"{where} has labels of the types {names}." if kinds else f"{where} has no labels."
    raise _unfit(what, "Labels are all integers or all strings.")


def _integer(cell: str) -> int:
    """Parse an integer; one too long for Python to parse becomes a number beyond 64 bits."""
    return int(cell) if len(cell) <= 20 else (-1 if cell.startswith("-") else 1) << 70


def _within(values: Sequence[int], low: int, high: int) -> bool:
    return low <= min(values, default=low) and max(values, default=high) <= high


def _fit(values: list[int], cells: Sequence[str]) -> np.ndarray:
    """int64 or uint64; numbers too large for both stay text, which keeps them apart."""
    if _within(values, -(2**63), 2**63 - 1):
        return np.array(values, np.int64)
    if _within(values, 0, 2**64 - 1):
        return np.array(values, np.uint64)
    return text(cells, "labels")


def numbers(values: np.ndarray) -> np.ndarray | None:
    """Text labels as integers; None if some of them are not integers."""
    cells = values.tolist()
    if not all(map(INTEGER.match, cells)):
        return None
    found = _fit(list(map(_integer, cells)), cells)
    return None if is_text(found) else found


def alike(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two label arrays in one dtype: NumPy would compare int64 with uint64 as floats.

    Text labels match integers where every one of them writes an integer; else it is an error.
    """
    if is_text(first) != is_text(second):
        texts, others = (first, second) if is_text(first) else (second, first)
        if names := [cell for cell in texts.tolist() if not INTEGER.match(cell)]:
            raise DmlError(
                "Some labels are names and the others are numbers.",
                f"For example {names[0]!r} and {others[0] if len(others) else 0}: nothing tells "
                "which name belongs to which number.",
                "Write both as names, or both as numbers.",
            )
        found = numbers(texts)
        if found is None:  # beyond 64 bits
            return _as_text(first), _as_text(second)
        first, second = (found if each is texts else each for each in (first, second))
    if {first.dtype.kind, second.dtype.kind} != {"i", "u"}:
        return first, second
    if min(int(a.min(initial=0)) for a in (first, second)) >= 0:
        return first.astype(np.uint64), second.astype(np.uint64)
    return _as_text(first), _as_text(second)


def _as_text(labels: np.ndarray) -> np.ndarray:
    return labels if is_text(labels) else labels.astype(np.str_)
