"""Read `.csv` and `.tsv` in blocks, with the standard library alone."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path

import numpy as np

from retrieval.embeddings import Wanted
from retrieval.errors import DmlError
from retrieval.formats import labels
from retrieval.formats.arrays import EXACT, rounded
from retrieval.formats.columns import SPLIT_COLUMNS, Column, Roles, Table, bad_line
from retrieval.formats.named_arrays import LABEL_NAMES, PATH_NAMES, VECTOR_NAMES
from retrieval.formats.text import most_rows, open_text

NUMBER = re.compile(
    r"\s*[-+]?(?:(?:[0-9]++\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|nan|inf|infinity)\s*\Z", re.I
)
WHOLE = re.compile(r"\s*[-+]?[0-9]+\s*\Z")
# Numbers with a decimal comma; a single group of three digits could also be a thousand.
COMMA = re.compile(r"\s*[-+]?(?:[0-9]+,[0-9]*|,[0-9]+)(?:e[-+]?[0-9]+)?\s*\Z", re.I)
SWAPPED = str.maketrans(",.", ".,")
THOUSANDS = re.compile(r"\s*[-+]?[1-9][0-9]{0,2},[0-9]{3}\s*\Z")
ENCLOSED = re.compile(r'"[^"]*"|\[[^\]]*\]')
SAMPLE_ROWS, BLOCK_ROWS = 1000, 2048
BLOCK_CELLS = 1 << 19  # a cell takes some 60 bytes until it is a number
# Of TensorBoard's projector: vectors have no header, metadata of several columns have one, and
# double quotes are characters like others.
VECTORS, METADATA = ("vectors.tsv", "tensors.tsv"), "metadata.tsv"
FIELD_CHARS = 1 << 22  # a list of 4,096 numbers is longer than the csv module's own limit

Row = tuple[int, list[str]]  # line number and cells


@dataclass(frozen=True)
class _Layout:
    """How a file is written."""

    path: Path
    encoding: str
    delimiter: str
    header: bool
    comma: bool  # numbers are written 0,5
    columns: list[Column]
    first_line: int

    def rows(self) -> Iterator[Row]:
        with self.path.open(encoding=self.encoding, newline="") as file:
            rows = _rows(file, self.delimiter, self.path)
            for line, row in islice(rows, int(self.header), None):
                _check_width(row, len(self.columns), self.path, line)
                yield line, row


def table(path: Path, wanted: Wanted) -> Table:
    layout = _layout(path, wanted)

    def blocks(found: Roles) -> Iterator[tuple[np.ndarray | None, dict[str, list[str]]]]:
        rows, height = layout.rows(), _height(len(layout.columns), BLOCK_ROWS)
        vectors = _Vectors(layout, found) if found.vectors else None
        known: dict[str, str] = {}  # one object for each distinct text
        while block := list(islice(rows, height)):
            beside = {
                role: [known.setdefault(row[column.at], row[column.at]) for _, row in block]
                for role, column in found.beside.items()
            }
            yield vectors.read(block) if vectors else None, beside

    def convert(role: str, parts: list[list[str]]) -> np.ndarray:
        cells = list(chain.from_iterable(parts))
        if role == "labels":
            return labels.parsed(cells, str(path), layout.first_line)
        return labels.text(cells, str(path))

    return Table(layout.columns, partial(most_rows, path), blocks, convert)


def _layout(path: Path, wanted: Wanted) -> _Layout:
    csv.field_size_limit(FIELD_CHARS)
    with open_text(path, newline="") as file:
        first = file.readline(FIELD_CHARS)
        delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(first)
        file.seek(0)
        rows = _rows(file, delimiter, path)
        sample = list(islice(rows, 2))
        if sample:
            sample += islice(rows, _height(len(sample[-1][1]), SAMPLE_ROWS))
    comma = _decimal_comma(sample)
    # Some users of pandas forget that the projector's vectors have no header.
    below = (cell for _, row in sample[1:] for cell in row)
    numbered = path.name not in VECTORS or not all(map(WHOLE.match, below))
    names = _header(sample, comma, numbered) if sample else None
    if path.name == METADATA and sample and len(sample[0][1]) > 1:
        names = sample[0][1]
    body = sample[1:] if names else sample
    if not body:
        only = "a header" if names else "blank lines"
        raise DmlError(f"{path} has no rows.", f"It holds {only} only.", "Write it again.")
    width = len(body[0][1])
    for line, row in sample:
        _check_width(row, width, path, line)
    if wanted != "labels":
        _refuse_other_separators(body, path)
    kinds = [_kind([row[n] for _, row in body], comma) for n in range(width)]
    if names:
        columns = [Column(n, names[n], kind, body[0][1][n]) for n, kind in enumerate(kinds)]
    else:
        columns = _name_columns(kinds, wanted != "vectors")
    return _Layout(path, file.encoding, delimiter, bool(names), comma, columns, body[0][0])


def _refuse_other_separators(sample: list[Row], path: Path) -> None:
    """Raise for a table whose cells are separated by blanks or bars."""
    cells = [row[0].strip() for _, row in sample if len(row) == 1]
    if len(cells) < len(sample):
        return
    for separator, name in (("|", "bars (|)"), (" ", "blanks")):
        parts = [part for part in cells[-1].split(separator) if part.strip()]
        if len(parts) > 1 and 2 * sum(map(bool, map(NUMBER.match, parts))) >= len(parts):
            source, target = (shlex.quote(str(p)) for p in (path, path.with_suffix(".new.csv")))
            raise DmlError(
                f"{path} separates its cells by {name}.",
                "Commas, semicolons and tabs are read.",
                f"Convert it: tr -s {shlex.quote(separator)} , < {source} > {target}",
            )


def _height(width: int, most: int) -> int:
    """How many rows to hold as text at once."""
    return max(1, min(most, BLOCK_CELLS // max(1, width)))


def _delimiter(line: str) -> str:
    """The most frequent of comma, semicolon and tab outside quotes and brackets."""
    bare = ENCLOSED.sub("", line.rstrip("\r\n"))
    for other in ";\t":
        # Commas that only make decimals do not separate: 0,5;0,25;cat
        cells = [cell for cell in bare.split(other) if "," in cell]
        if other in bare and cells and all(map(COMMA.match, cells)):
            return other
    return max(",;\t", key=bare.count)


def _decimal_comma(sample: list[Row]) -> bool:
    """Whether numbers are written 0,5: some are, and none has a decimal point."""
    found = False
    for _, row in sample:
        for cell in row:
            if "," in cell and COMMA.match(cell):
                found = found or not THOUSANDS.match(cell)
            elif "." in cell and NUMBER.match(cell):
                return False
    return found


def _pointed(cells: Sequence[str], comma: bool) -> Sequence[str]:
    """Cells with decimal points; if the file uses commas, a cell with a point is no number."""
    return [cell.translate(SWAPPED) for cell in cells] if comma else cells


def _rows(lines: Iterable[str], delimiter: str, path: Path) -> Iterator[Row]:
    ended, last = False, 0

    def and_a_blank_line() -> Iterator[str]:
        nonlocal ended
        yield from lines
        ended = True
        yield "\n"

    quotes = path.name not in (METADATA, *VECTORS)
    reader = csv.reader(
        and_a_blank_line(),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
    )
    try:
        for row in reader:
            if row and ended:
                why = "The rest of the file would be one text"
                raise bad_line(path, last + 1, "a double quote is not closed", why)
            last = reader.line_num
            if row:
                yield last, row
    except csv.Error as error:
        what, why = "the line is not valid CSV", f"The reader says: {error}"
        raise bad_line(path, reader.line_num, what, why) from error


def _header(sample: list[Row], comma: bool, numbered: bool) -> Sequence[str] | None:
    """The first row if it holds names, which, if `numbered`, may be pandas' 0, 1, 2..."""
    first = sample[0][1]
    known = LABEL_NAMES | PATH_NAMES | VECTOR_NAMES | SPLIT_COLUMNS
    named = bool({cell.strip().lower() for cell in first} & known)
    numbers = [cell for cell in _pointed(first, comma) if NUMBER.match(cell)]
    if not numbers:
        # One column of text has a header only if that is a familiar name, or numbers follow it.
        below = _pointed(sample[1][1], comma) if len(sample) > 1 else []
        listed = any(cell.lstrip().startswith("[") for cell in first)
        changed = any(NUMBER.match(cell) or cell.lstrip().startswith("[") for cell in below)
        return first if not listed and (named or changed) else None
    if named:
        return first
    whole = numbered and len(numbers) > 1 and all(map(WHOLE.match, numbers))
    if whole and max(map(len, numbers)) < 20:
        values = [int(cell) for cell in numbers]
        if values[0] in (0, 1) and values == list(range(values[0], values[0] + len(values))):
            # Else it is a row, such as 0,1,cat, and other rows of its class follow.
            texts = [n for n, cell in enumerate(first) if cell not in numbers]
            rows = [row for _, row in sample[1:] if len(row) == len(first)]
            return None if any(row[n] == first[n] for row in rows for n in texts) else first
    return None


def _kind(cells: Sequence[str], comma: bool) -> str:
    cells = _pointed(cells, comma)
    if all(map(WHOLE.match, cells)):
        return "integer"
    # A column that is mostly numbers is one with a mistake in it, which is then told by line.
    if 2 * sum(map(bool, map(NUMBER.match, cells))) >= len(cells):
        return "number"
    if all(cell.lstrip().startswith(("[", "(")) for cell in cells):
        return "list"
    return "text"


def _name_columns(kinds: list[str], with_labels: bool) -> list[Column]:
    """Name the columns of a file without a header; the label is text, or integers at an edge.

    If the labels are in another file, such integers are a dimension of the vectors.
    """
    text = [n for n, kind in enumerate(kinds) if kind == "text"]
    whole = [n for n, kind in enumerate(kinds) if kind == "integer"]
    at_edge = len(kinds) > 1 and whole in ([0], [len(kinds) - 1])
    fits = text or (whole if with_labels and at_edge else [])
    label = fits[0] if len(fits) == 1 else None
    return [Column(n, "label" if n == label else f"column{n}", k) for n, k in enumerate(kinds)]


def _check_width(row: list[str], width: int, path: Path, line: int) -> None:
    if len(row) != width:
        raise DmlError(
            f"{path}, line {line}: there are {len(row)} cells where other rows have {width}.",
            "The line is cut short, or a text holds the delimiter without quotes.",
            "Correct the line, or put texts that hold the delimiter in double quotes.",
        )


class _Vectors:
    """Turns cells into the numbers of vectors."""

    def __init__(self, layout: _Layout, found: Roles) -> None:
        self.path, self.comma = layout.path, layout.comma
        self.roles, self.dim = found, 0
        at = [column.at for column in found.vectors]
        span = at == list(range(at[0], at[0] + len(at)))
        self.taken = itemgetter(slice(at[0], at[-1] + 1)) if span else itemgetter(*at)

    def read(self, block: list[Row]) -> np.ndarray:
        """Vectors (n, D) as float64, because later lines may have more digits."""
        self.dim = self.dim or len(self._texts(block[0][1]))
        try:
            values = np.array([self._floats(line, row) for line, row in block])
        except ValueError:
            values = np.array([self._checked_floats(line, row) for line, row in block])
        if (np.abs(values) >= EXACT).any():
            self._refuse_rounded(block, values)
        return values

    def _texts(self, row: list[str]) -> Sequence[str]:
        """The numbers of a row as text, with decimal points."""
        cells = self.taken(row)
        return _numbers(cells[0]) if self.roles.is_list else _pointed(cells, self.comma)

    def _floats(self, line: int, row: list[str]) -> list[float]:
        texts = self._texts(row)
        joined = "".join(texts)
        if "_" in joined or not joined.isascii():  # Python reads 1_0 as 10
            raise ValueError
        values = list(map(float, texts))
        if len(values) != self.dim:
            what, why = f"the vector has {len(values)} numbers", f"The first vector has {self.dim}"
            raise bad_line(self.path, line, what, why)
        return values

    def _checked_floats(self, line: int, row: list[str]) -> list[float]:
        """The numbers of a row, NaN for empty cells, which pandas leaves; raises for other text."""
        is_list, texts = self.roles.is_list, self._texts(row)
        for n, text in enumerate(texts):
            if text.strip() and not NUMBER.match(text):
                column = self.roles.vectors[0 if is_list else n]
                told = text if is_list else row[column.at]
                mixed = self.comma and "." in told and not is_list
                raise DmlError(
                    f"{self.path}, line {line}, column {column.at + 1} ({column.name}): "
                    f"{told[:40]!r} is not a number.",
                    "Other numbers have a decimal comma."
                    if mixed
                    else "Every item needs all numbers of its vector.",
                    "Correct the cell, or leave it empty for NaN.",
                )
        return [float(text.strip() or "nan") for text in texts]

    def _refuse_rounded(self, block: list[Row], values: np.ndarray) -> None:
        for row, at in np.argwhere(np.abs(values) >= EXACT):
            line, cells = block[row]
            text, value = self._texts(cells)[at].strip(), values[row, at]
            if WHOLE.match(text) and (np.isinf(value) or int(text) != int(value)):
                raise rounded(f"{self.path}, line {line}: {text[:40]}")


def _numbers(cell: str) -> list[str]:
    """`[0.1, 0.2]` and NumPy's `[0.1 0.2]`."""
    return cell.strip().strip("[]()").replace(",", " ").split()
