"""Copies of large files that are downloaded part by part, as readers request their bytes.

Such a copy has the size of the file and holes where nothing has been downloaded. A hole reads as
zeros, so a reader calls `ensure` of `retrieval.formats.arrays` before it reads: then the missing
blocks are downloaded.
"""

from __future__ import annotations

import io
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DmlError
from retrieval.files import is_at
from retrieval.formats.arrays import Range
from retrieval.resources import StageProgress

BLOCK = 1 << 18  # bytes that are marked as present together
LEAST = 32 * BLOCK  # smaller files are downloaded whole: one request is faster than several
PIECE = 64 * BLOCK  # bytes of one request
REQUESTS = 4  # of one load, after which the width of a request doubles, up to a piece
IN_PARTS = " in parts"  # ends the version of a copy with holes: others must not take it as whole


class Copy:
    """A partly downloaded copy, with a byte for each block that tells whether it is there."""

    def __init__(
        self, path: Path, marks: Path, version: Path, download: Callable[[Copy, list[Range]], None]
    ) -> None:
        self.path, self.version = path, version
        self.download = download
        self.file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self.file)
        self.size = os.fstat(self.file).st_size
        self.marks = np.memmap(marks, np.uint8, "r+")  # shared with other processes
        self.requests = 0
        self.progress: StageProgress | None = None
        self.missed: list[Range] | None = None
        """In a child process, which cannot download: what was not there."""

    def missing(self, wanted: Sequence[Range]) -> list[Range]:
        """The ranges of whole blocks that are not there, in order, each of at most a piece."""
        found = []
        for start, stop in wanted:
            first = max(start, 0) // BLOCK
            blocks = self.marks[first : -(-stop // BLOCK)]
            if not blocks.all():
                found.append(first + np.flatnonzero(blocks == 0))
        if not found:
            return []
        absent = np.unique(np.concatenate(found))
        runs = np.split(absent, np.flatnonzero(np.diff(absent) > 1) + 1)
        return [
            (at, min(at + PIECE, last * BLOCK + BLOCK, self.size))
            for first, last in ((int(run[0]), int(run[-1])) for run in runs)
            for at in range(first * BLOCK, last * BLOCK + BLOCK, PIECE)
        ]

    def write(self, start: int, data: bytes) -> None:
        """Fill a part of the file."""
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self.file, rest, start)
            start, rest = start + count, rest[count:]

    def mark(self, pieces: Sequence[Range]) -> None:
        """Count whole blocks as present, once they are on the disk."""
        os.fsync(self.file)
        for start, stop in pieces:
            self.marks[start // BLOCK : -(-stop // BLOCK)] = 1
        self.marks.flush()

    def state(self) -> tuple[int, str]:
        """Size and version, as `Inputs` compares them; filling holes changes neither."""
        told = self.version.read_text() if self.version.is_file() else ""
        return self.size if is_at(self.file, self.path) else -1, told.removesuffix(IN_PARTS)

    def reader(self) -> Reader:
        """The file for a library that reads here and there."""
        return Reader(self)

    def ensure(self, wanted: Sequence[Range]) -> None:
        """Download the blocks of these ranges that are not there."""
        missing = self.missing(wanted)
        if missing and self.missed is not None:
            self.missed.extend(missing)
            raise Missing
        if not is_at(self.file, self.path):
            raise changed(str(self.path))
        if missing:
            width = min(BLOCK << self.requests // REQUESTS, PIECE)
            self.requests += 1
            if sum(stop - start for start, stop in missing) < width:
                wide = [(at // width * width, -(-to // width) * width) for at, to in missing]
                missing = self.missing(wide)
            self.download(self, missing)


class Missing(Exception):
    """Bytes that a child process needs and that its parent has to download."""


class Reader(io.RawIOBase):
    """A copy with holes as a file, for libraries that read here and there, such as HDF5."""

    def __init__(self, copy: Copy) -> None:
        self.copy, self.at = copy, 0

    def __repr__(self) -> str:
        return str(self.copy.path)  # h5py shows it in messages

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.copy.size}[whence]
        self.at = base + offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self.at + len(view), self.copy.size)
        self.copy.ensure([(self.at, stop)])
        data = os.pread(self.copy.file, max(0, stop - self.at), self.at)
        view[: len(data)] = data
        self.at += len(data)
        return len(data)


def suits(size: int | None, version: str) -> bool:
    """Whether to download a file in parts: it is large, its version known, and not on Windows."""
    return bool(version) and (size or 0) >= LEAST and sys.platform != "win32"


def ends(size: int | None) -> list[Range]:
    """What is read of every file: its first and its last block."""
    return [(0, 1), ((size or 0) - BLOCK, size or 0)]


def changed(where: str) -> DmlError:
    """The error about a file that changed between the downloads of its parts."""
    return DmlError(
        f"{where} was changed while it was downloaded.",
        "Half of it may be old and half of it new.",
        "Run the command again once the file is complete.",
    )
