"""Part files: rows that other processes have computed, until rank 0 copies them into the file.

Only one process writes to an embedding file, because writes of several machines to one file of a
network file system may be lost. Every other rank appends its batches to a part file beside it,
`name.h5.part-3`. A killed run leaves part files; they are copied by the next run with --resume,
however many processes it has. Each batch has a checksum: one that was cut short is not read.
"""

from __future__ import annotations

import glob
import os
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np

from retrieval.distributed.processes import gather
from retrieval.distributed.world import World
from retrieval.errors import DmlError
from retrieval.files import sync
from retrieval.formats.hdf5.layout import SAME, Layout
from retrieval.formats.hdf5.writing import Writer, failures

HEADER = struct.Struct("<IIq")  # checksum of the rest, number of the split, rows
PATIENCE = 90.0  # seconds until a network file system surely shows a file of another machine
NEW = 10.0  # seconds until it shows one whose name was never looked up

Batch = tuple[str, np.ndarray, np.ndarray]  # split, positions (b,), vectors (b, D)


def part_path(out: Writer, rank: int) -> Path:
    return out.path.with_name(f"{out.path.name}.part-{rank}")


class PartFile:
    """Appends batches of rows to the part file of a rank, with room for `rows`."""

    def __init__(self, out: Writer, rank: int, rows: int) -> None:
        self.path, self.splits = part_path(out, rank), list(out.lengths)
        with failures(self.path), ExitStack() as opened:
            self.file = opened.enter_context(self.path.open("wb"))
            head = identity(out)
            if rows and hasattr(os, "posix_fallocate"):  # better refused now than after hours
                size = len(head) + rows * (HEADER.size + 8 + 4 * out.dim)
                os.posix_fallocate(self.file.fileno(), 0, size)
            self.file.write(head)
            self.file.flush()
            opened.pop_all()  # nothing failed: `close` closes it

    def write(self, split: str, positions: np.ndarray, vectors: np.ndarray) -> None:
        rows = np.ascontiguousarray(vectors, "<f4")
        body = np.ascontiguousarray(positions, "<i8").tobytes() + rows.tobytes()
        tail = HEADER.pack(0, self.splits.index(split), len(positions))[4:] + body
        with failures(self.path):
            self.file.write(struct.pack("<I", crc32(tail)) + tail)
            self.file.flush()

    def close(self) -> None:
        """Close the file so that another machine reads all of it."""
        with failures(self.path):
            self.file.truncate()
            os.fsync(self.file.fileno())
            self.file.close()
        sync(self.path.parent)


def identity(out: Writer) -> bytes:
    """32 bytes that differ between files of other models, images, splits or dimensions."""
    return sha256(repr(_contents(out.layout)).encode()).digest()


def _contents(layout: Layout) -> tuple[dict[str, object], dict[str, int], int, str]:
    same = {name: layout.attrs.get(name) for name in SAME}
    return same, layout.lengths, layout.dim, str(layout.dtype)


def require_same(out: Writer, world: World) -> None:
    """Raise unless all ranks embed the same images with the same model."""
    (same, lengths, *rest), *others = gather(_contents(out.layout), world)
    for rank, (their_same, their_lengths, *their_rest) in enumerate(others, 1):
        if their_lengths != lengths or their_same["paths_sha256"] != same["paths_sha256"]:
            counts = [sum(each.values()) for each in (lengths, their_lengths)]
            why = "Rank {} has a list of {:,} images; that of rank 0 has {:,}{}."
            names = " other ones" if counts[0] == counts[1] else ""
            why = why.format(rank, counts[1], counts[0], names)
            raise _different("images", why, "images")
        if their_same != same or their_rest != rest:
            why = f"The model or the settings of rank {rank} are not those of rank 0."
            raise _different("models", why, "model")


def _different(what: str, why: str, which: str) -> DmlError:
    return DmlError(
        f"The processes have different {what}.",
        why,
        f"Give all of them the same {which}, by copies on every machine or a shared disk.",
    )


def show_folder(out: Writer) -> str:
    """Create an empty file that all ranks must see, and return its name; rank 0 removes it."""
    path = part_path(out, secrets.randbits(60))  # a new name: no file system remembers its absence
    path.touch()
    sync(path.parent)
    return path.name


def require_folder(out: Writer, name: str, world: World, patience: float = NEW) -> None:
    """Raise unless this rank sees the file of rank 0: it would write its rows elsewhere.

    patience: seconds until a new file of another machine is seen.
    """
    if not _appears(out.path.with_name(name), patience):
        raise DmlError(
            f"Rank {world.rank} does not see the file that rank 0 writes, {out.path.name}.",
            f"{out.path.parent.resolve()} is not the same folder on both machines.",
            "Write to a disk that all machines share, or let each machine embed a part on its "
            f"own, without torchrun: --shard 1/{world.size} to --shard {world.size}/{world.size}",
        )


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
        _appears(part_path(out, rank), end - time.monotonic())


def _appears(path: Path, seconds: float) -> bool:
    """Wait until a file can be seen from here."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


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
