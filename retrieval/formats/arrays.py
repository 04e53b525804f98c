"""Memory for the arrays of a file, and vectors converted to the dtypes that ranking takes."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import DTypeLike

from retrieval.embeddings import setting
from retrieval.errors import DmlError, damaged
from retrieval.files import temporary_folder
from retrieval.number_format import size
from retrieval.resources import available_memory, slices

if TYPE_CHECKING:
    from retrieval.remote.ranges import Copy

KEPT = ("float16", "float32", "float64", "int8", "uint8")
BLOCK_BYTES = 1 << 26
# Reading takes at most ten times the file and 200 MB. This much of it is for the arrays.
ROOM_RATIO, ROOM_BYTES = 8, 1 << 27
EXACT = 2**53  # float64 holds every whole number up to here
BFLOAT16 = np.dtype("V2")  # NumPy has no bfloat16; ml_dtypes saves it under this name

Range = tuple[int, int]
"""The first byte, and the one after the last."""

copies: dict[Path, Copy] = {}
"""Files of which only parts have been downloaded; their holes read as zeros."""
_budget: ContextVar[Budget | None] = ContextVar("budget", default=None)
sharing: ContextVar[Sharing | None] = ContextVar("sharing", default=None)
OpenFile = tuple[int, int, int, int]
"""The number of a process, that of a file which it holds open, and the device and inode of that."""
BOOT_ID, PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass
class Budget:
    """Memory that the arrays of one file may take together."""

    path: Path
    stored: int
    taken: int = 0


def budget(path: Path) -> AbstractContextManager[Budget | None]:
    """Inside the block, `reserve` counts what is taken for the arrays of this file."""
    return setting(_budget, Budget(path, file_size(path)))


def file_size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder that is read as one."""
    return sum(file.stat().st_size for file in files_in(path))


def files_in(path: Path) -> list[Path]:
    """A file, or the files in a folder and in those below it."""
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def reserve(size: int) -> None:
    """Count `size` bytes as taken; raise if all arrays of a file together take too many."""
    found = _budget.get()
    if found is not None:
        found.taken += size
        refuse_bomb(str(found.path), found.stored, found.taken)


def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An uninitialised array: in memory, or in an unlinked temporary file when it is large."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    reserve(size)
    if size <= available_memory() // 4:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile(dir=temporary_folder()) as file:
            # Reserve the blocks now: a sparse file would end in SIGBUS when the disk fills up.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, dtype, "w+", shape=shape)
    except OSError as error:
        raise _no_room(shape, dtype, error) from error


def _no_room(shape: tuple[int, ...], dtype: np.dtype, error: OSError) -> DmlError:
    needed = size(math.prod(shape) * dtype.itemsize)
    return DmlError(
        f"There is no room for an array of {needed} (shape {shape}, dtype {dtype}).",
        f"Large arrays and sets of files are kept in {tempfile.gettempdir()}, which says: "
        f"{error.strerror}.",
        "Set TMPDIR to a folder on a disk with room.",
    )


class Sharing:
    """Temporary files that one process of a machine writes, and the others map.

    written: those of the other process; without them, this one writes its own.
    """

    def __init__(self, written: Iterable[OpenFile] = ()) -> None:
        self._written = iter(written)
        self.own: list[OpenFile] = []

    def next(self) -> BinaryIO | None:
        """The next file that the other process has written."""
        there = next(self._written, None)
        if there is None:
            return None
        path = f"/proc/{there[0]}/fd/{there[1]}"
        try:
            found = os.stat(path)
            # Of another process it may be a pipe, and opening that would wait for a writer.
            if (found.st_dev, found.st_ino) != there[2:]:
                return None
            return open(path, "rb")
        except OSError:  # not on Linux
            return None

    def add(self, file: BinaryIO) -> None:
        """Keep a file open as long as this process lives, so that the others can open it."""
        process, _, device, inode = _open_file(file)
        self.own.append((process, os.dup(file.fileno()), device, inode))


def machine(boot_id: Path = BOOT_ID, processes: Path = PROCESSES) -> tuple[str, ...]:
    """What the processes that can open each other's files have in common, and no others.

    Names of machines are not unique: they may all be localhost. Containers of one machine have
    processes of their own.
    """
    boot = numbers = ""
    with suppress(OSError):  # other systems, and containers that hide them
        boot = boot_id.read_text().strip()
        numbers = os.readlink(processes)
    return gethostname(), boot, numbers


def _open_file(file: BinaryIO) -> OpenFile:
    found = os.fstat(file.fileno())
    return os.getpid(), file.fileno(), found.st_dev, found.st_ino


class Growing:
    """Rows that are appended to an unlinked temporary file, and mapped once all are there."""

    def __init__(self, like: np.ndarray) -> None:
        self.dim, self.dtype, self.rows = like.shape[1], like.dtype, 0
        shared = sharing.get()
        written = shared.next() if shared else None
        self._written = written is not None
        # Not buffered: a full disk would show only when the file is mapped or closed.
        self._file = written or tempfile.TemporaryFile(  # noqa: SIM115 (open until `close`)
            buffering=0, dir=temporary_folder()
        )
        if shared and not written:
            shared.add(self._file)

    def append(self, array: np.ndarray) -> None:
        """Add rows of the same dimension and dtype, copied in blocks."""
        row_bytes, before = self.dim * self.dtype.itemsize, self.rows
        self.rows += len(array)
        if self._written:
            return
        try:
            for part in file_blocks(len(array), row_bytes):
                put(self._file, (before + part.start) * row_bytes, array[part])
        except OSError as error:
            raise _no_room((self.rows, self.dim), self.dtype, error) from error

    def array(self) -> np.ndarray:
        """All rows, read-only; they stay when the file is closed."""
        if os.fstat(self._file.fileno()).st_size != self.rows * self.dim * self.dtype.itemsize:
            raise DmlError(
                "The processes have read different embeddings.",
                "Those of one machine share a copy of the vectors of a set.",
                "Give all processes the same files.",
            )
        return np.memmap(self._file, self.dtype, "r", shape=(self.rows, self.dim))

    def close(self) -> None:
        self._file.close()


def put(file: BinaryIO, offset: int, data: np.ndarray) -> None:
    """All the bytes of an array, at one place of an unbuffered file."""
    left = np.ascontiguousarray(data).view(np.uint8).reshape(-1).data
    file.seek(offset)
    while left:
        left = left[file.write(left) :]


def rounded(where: str) -> DmlError:
    """The error about an integer that float64 cannot represent."""
    return DmlError(
        f"{where} is beyond 2^53.",
        "It cannot be converted to float64 without rounding.",
        "Scale such numbers, or rename the column if it is not part of the vector.",
    )


def refuse_rounded(array: np.ndarray, where: str) -> None:
    """Raise for an integer that float64 cannot represent."""
    if array.dtype.kind in "iu" and array.size:
        low, high = int(array.min()), int(array.max())
        if low < -EXACT or high > EXACT:
            raise rounded(f"{where}: {low if low < -EXACT else high}")


_UNCOMPRESSED = (
    "If you trust the file, write it again without compression: np.save, or for HDF5 "
    "h5repack -f NONE old.h5 new.h5"
)


def refuse_bomb(
    where: str, stored: int, expanded: int, room: int | None = None, fix: str = _UNCOMPRESSED
) -> None:
    """Raise if `stored` bytes claim to expand implausibly far; `room` more bytes are allowed."""
    if expanded > ROOM_RATIO * stored + (ROOM_BYTES if room is None else room):
        raise DmlError(
            f"{where} claims {expanded:,} bytes of data but stores {stored:,}.",
            f"More than {ROOM_RATIO}-fold growth is not plausible for embeddings, and may fill the "
            "memory.",
            fix,
        )


def refuse_overrun(where: str, claimed: int, present: int) -> None:
    """Raise if a header claims more bytes than the file has left."""
    if claimed > present:
        raise damaged(
            f"{where} claims {claimed:,} bytes of data but only {present:,} are there.",
            "The file is truncated or its header is damaged.",
        )


def ensure(path: Path, wanted: Iterable[Range] | None = None) -> None:
    """Download what is missing of these ranges of a file, or of all of it, before it is read."""
    if copy := copies.get(path):
        copy.ensure([(0, copy.size)] if wanted is None else list(wanted))


def mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
    """A read-only view of the bytes of a file. An empty array is new: mmap refuses it."""
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    ensure(path, [(offset, offset + math.prod(shape) * dtype.itemsize)])
    return np.memmap(path, dtype, "r", offset, shape)


def file_blocks(rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices that cover `rows`, each about 64 MB: what is read from a file, or written, at once."""
    return slices(rows, max(1, BLOCK_BYTES // max(1, row_bytes)))


def gathered(rows: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Some rows of (N, D), by number in ascending order: a view of rows that follow each other.

    Others are copied; a large copy is on disk.
    """
    if not len(at) or at[-1] - at[0] == len(at) - 1:
        first = int(at[0]) if len(at) else 0
        return rows[first : first + len(at)]
    out = allocate((len(at), rows.shape[1]), rows.dtype)
    for part in file_blocks(len(at), rows.shape[1] * rows.itemsize):
        out[part] = rows[at[part]]
    return out


def vectors(array: np.ndarray, where: str) -> np.ndarray:
    """Vectors as they are if the engine takes their dtype, else converted without loss."""
    if array.ndim != 2 or not array.size:
        why = "Embeddings are a 2-D array: one row for each item, one column for each dimension."
        fix = "Choose another array with FILE::KEY, or save it as x.reshape(len(x), -1)."
        if array.ndim == 2:
            why = "It has no rows." if array.shape[1] else "Its rows have no numbers."
            fix = "Write it again, or choose another array with FILE::KEY."
        raise DmlError(f"{where} has the shape {array.shape}.", why, fix)
    dtype = array.dtype
    if dtype.name in KEPT:
        return array if dtype.isnative else _convert(array, dtype.newbyteorder("="), where)
    if dtype == BFLOAT16:
        return _convert(array, np.dtype(np.float32), where)
    if dtype == np.bool_:
        return array.view(np.uint8)
    if dtype.kind in "iu":
        return _convert(array, np.dtype(np.float64), where)
    raise DmlError(
        f"{where} has the dtype {dtype}.",
        "Embeddings are float16, bfloat16, float32, float64 or integers.",
        "Convert them, for example with .astype('float32'), and save them again.",
    )


def _convert(array: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    out = allocate(array.shape, dtype)
    for rows in file_blocks(len(array), array.shape[1] * 8):
        block = array[rows]
        refuse_rounded(block, where)
        if array.dtype == BFLOAT16:  # the upper half of a float32: a shift is exact
            bits = np.ascontiguousarray(block).view("<u2").astype(np.uint32) << 16
            block = bits.view(np.float32)
        out[rows] = block
    return out
