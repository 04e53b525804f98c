"""Open a text file in its own encoding, and read labels: one per line in `.txt`, a list in `.json`.

The encoding is UTF-8, UTF-16 or UTF-32 with a mark, else Latin-1.
"""

from __future__ import annotations

import codecs
import json
import os
from pathlib import Path
from typing import TextIO

import numpy as np

from retrieval.embeddings import Wanted, note
from retrieval.errors import DmlError
from retrieval.formats import labels, named_arrays

# UTF-32 first: its mark begins with that of UTF-16.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
BLOCK = 1 << 20


def read(path: Path, key: str | None, wanted: Wanted) -> np.ndarray:
    with open_text(path) as file:  # whatever ends a line is read as a newline
        text = file.read()
    if path.suffix.lower() != ".json":
        return labels.parsed(text.rstrip("\n").split("\n"), str(path))
    from retrieval.formats.refused import json_records

    if error := json_records(path):
        raise error
    value = json.loads(text)
    if isinstance(value, dict):
        lists = {k: v for k, v in value.items() if isinstance(v, list)}
        entries = {
            k: named_arrays.Entry((len(v),), "list", "S", lambda: np.empty(0))
            for k, v in lists.items()
        }
        value = lists[named_arrays.Catalogue(entries, path).choose_labels(key)]
    if not isinstance(value, list):
        raise DmlError(
            f"{path} holds no list.",
            "Labels are a JSON list of integers or strings.",
            "Write them as [1, 2, 3].",
        )
    return labels.from_values(value, str(path))


def most_rows(path: Path, dim: int) -> int:
    """How many rows with so many numbers there are at most in a text file, by its bytes and lines.

    A number takes a digit and a separator. A lone carriage return ends a line as well.
    """
    lines, last = 1, b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            joined = last + block  # a pair may lie across two blocks
            lines += block.count(b"\n") + block.count(b"\r") - joined.count(b"\r\n")
            last = block[-1:]
    return min(lines, os.path.getsize(path) // max(1, 2 * dim - 1) + 1)


def open_text(path: Path, newline: str | None = None) -> TextIO:
    return path.open(encoding=charset(path), newline=newline)


def charset(path: Path) -> str:
    """The encoding of a text by its byte order mark, else one that fits all of its bytes."""
    with path.open("rb") as file:
        start = file.read(4)
    for mark, name in MARKS:
        if start.startswith(mark):
            return name
    # Windows writes its own Latin-1, which gives signs to what the other leaves to controls.
    found = next(name for name in ("utf-8", "cp1252", "latin-1") if _fits(path, name))
    if found != "utf-8":
        note(f"{path} is not UTF-8; it is read as Latin-1")
    return found


def _fits(path: Path, encoding: str) -> bool:
    with path.open(encoding=encoding, newline="") as file:
        try:
            while block := file.read(BLOCK):
                if "\0" in block:
                    raise DmlError(
                        f"{path} is not a text file.",
                        "It holds zero bytes, which are not in UTF-8 text.",
                        "Check what wrote it; UTF-16 text must begin with its byte order mark.",
                    )
        except UnicodeDecodeError:
            return False
    return True
