"""Part files: rows that other processes have computed, until rank 0 copies them into the file.

Only one process writes to an embedding file, because writes of several machines to one file of a
network file system may be lost. Every other rank appends its batches to a part file beside it,
`name.h5.part-3`. A killed run leaves part files; they are copied by the next run with --resume,
however many processes it has. Each batch has a checksum: one that was cut short is not read.
"""

from __future__ import annotations

import glob
import os
import struct
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np

from retrieval.files import sync
from retrieval.formats.hdf5.layout import SAME
from retrieval.formats.hdf5.writing import Writer

HEADER = struct.Struct("<IIq")  # checksum of the rest, number of the split, rows
PATIENCE = 90.0  # seconds until a network file system surely shows a file of another machine

Batch = tuple[str, np.ndarray, np.ndarray]  # split, positions (b,), vectors (b, D)


def part_path(out: Writer, rank: int) -> Path:
    return out.path.with_name(f"{out.path.name}.part-{rank}")


class PartFile:
    """Appends batches of rows to the part file of a rank."""

    def __init__(self, out: Writer, rank: int) -> None:
        self.path, self.splits = part_path(out, rank), list(out.lengths)
        self.file = self.path.open("wb", buffering=0)
        self.file.write(identity(out))

    def write(self, split: str, positions: np.ndarray, vectors: np.ndarray) -> None:
        rows = np.ascontiguousarray(vectors, "<f4")
        body = np.ascontiguousarray(positions, "<i8").tobytes() + rows.tobytes()
        tail = HEADER.pack(0, self.splits.index(split), len(positions))[4:] + body
        self.file.write(struct.pack("<I", crc32(tail)) + tail)

    def close(self) -> None:
        """Close the file so that another machine reads all of it."""
        os.fsync(self.file.fileno())
        self.file.close()
        sync(self.path.parent)


def identity(out: Writer) -> bytes:
    """32 bytes that differ between files of other models, images, splits or dimensions."""
    layout = out.layout
    same = {name: layout.attrs.get(name) for name in SAME}
    return sha256(repr((same, layout.lengths, layout.dim, str(layout.dtype))).encode()).digest()


def collect(out: Writer) -> None:
    """Copy the rows of all part files into the file of `out`, and remove the part files."""
    for path in leftovers(out):
        for split, positions, vectors in batches(path, out):
            out.write(split, positions, vectors)
    os.fsync(out.raw.fileno())
    remove(out)


def remove(out: Writer) -> None:
    for path in leftovers(out):
        path.unlink(missing_ok=True)


def leftovers(out: Writer) -> list[Path]:
    """Existing part files, of this run or of a killed one."""
    found = sorted(out.path.parent.glob(f"{glob.escape(out.path.name)}.part-*"))
    return [path for path in found if path.name.rpartition("-")[2].isdecimal()]


def wait_for(out: Writer, ranks: int) -> None:
    """Wait until the part files of all ranks but the first can be seen from here."""
    end = time.monotonic() + PATIENCE
    for rank in range(1, ranks):
        while not part_path(out, rank).exists() and time.monotonic() < end:
            time.sleep(0.5)


def batches(path: Path, out: Writer) -> Iterator[Batch]:
    """The whole batches of a part file; none if it belongs to another embedding file."""
    splits, known = list(out.lengths), identity(out)
    with path.open("rb") as file:
        if file.read(len(known)) != known:
            return
        while len(head := file.read(HEADER.size)) == HEADER.size:
            checksum, split, count = HEADER.unpack(head)
            size = count * (8 + 4 * out.dim)
            body = file.read(size) if 0 <= size <= path.stat().st_size else b""
            if len(body) != size or crc32(head[4:] + body) != checksum:
                return  # killed while it wrote
            positions = np.frombuffer(body, "<i8", count)
            vectors = np.frombuffer(body, "<f4", offset=8 * count).reshape(count, out.dim)
            yield splits[split], positions, vectors
