"""Decode the chunks of HDF5 data sets with every size checked; HDF5 itself trusts the file.

HDF5 hands out uninitialised memory for a chunk that is shorter than its shape says, and its
checksum and scale-offset filters crash on chunks or parameters that were tampered with.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import h5py
import numpy as np

from retrieval.errors import DmlError, damaged
from retrieval.formats.arrays import ensure, refuse_overrun

DEFLATE, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000
NAMES = {4: "szip", 5: "nbit", 6: "scaleoffset", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle"}
NAMES |= {32013: "zfp", 32015: "zstd", 32026: "blosc2", 307: "bzip2"}
WORDS = 1 << 20  # of a checksum, at a time

Place = tuple[slice, ...]


def blocks(
    dataset: h5py.Dataset, item: int, path: Path, where: str
) -> Iterator[tuple[Place, bytes]]:
    """Every chunk of a data set: its place in the array and its bytes, all of them.

    `item` is the size of one element in the file. `path` is given because h5py cannot tell it of a
    file object: it replaces letters beyond ASCII in the name.
    """
    shape, chunks = dataset.shape, dataset.chunks
    decoders = _decoders(dataset, item, where)
    size = math.prod(chunks) * item
    places = stored(dataset, path, where)
    ensure(path, [(start, start + n) for start, n in places.values()])
    for at, (_, length) in places.items():
        if not decoders and length != size:  # h5py has room for `size` bytes; HDF5 reads `length`
            raise _damaged(where, at, f"it holds {length:,} bytes instead of {size:,}")
        mask, data = dataset.id.read_direct_chunk(at)
        if len(data) != length:  # HDF5 reads on into what follows
            raise _damaged(where, at, f"it holds {length:,} bytes instead of {len(data):,}")
        try:
            for number, decode in reversed(list(enumerate(decoders))):
                if not mask >> number & 1:  # a filter may have been skipped for this chunk
                    data = decode(data, size + 4 * len(decoders))
        except (ValueError, zlib.error) as error:
            raise _damaged(where, at, f"it cannot be decoded: {error}") from error
        if len(data) != size:
            raise _damaged(where, at, f"it holds {len(data):,} bytes instead of {size:,}")
        ends = zip(at, chunks, shape, strict=True)
        yield tuple(slice(a, min(a + c, n)) for a, c, n in ends), data


def read(dataset: h5py.Dataset, dtype: np.dtype, out: np.ndarray, path: Path, where: str) -> None:
    """Fill `out` with a data set whose chunks hold plain NumPy numbers."""
    for place, data in blocks(dataset, dtype.itemsize, path, where):
        block = np.frombuffer(data, dtype).reshape(dataset.chunks)
        out[place] = block[tuple(slice(part.stop - part.start) for part in place)]


def stored(dataset: h5py.Dataset, path: Path, where: str) -> dict[tuple[int, ...], tuple[int, int]]:
    """Where each chunk begins in the file, and its bytes; raises unless all chunks are there."""
    shape, chunks = dataset.shape, dataset.chunks
    present = os.path.getsize(path)
    found: dict[tuple[int, ...], tuple[int, int]] = {}

    def note(info: h5py.h5d.StoreInfo) -> None:
        at = tuple(info.chunk_offset)
        refuse_overrun(where, info.byte_offset + info.size, present)
        if all(a % c == 0 and a < n for a, c, n in zip(at, chunks, shape, strict=True)):
            found[at] = info.byte_offset, info.size

    dataset.id.chunk_iter(note)
    expected(dataset, len(found), where)
    return found


def expected(dataset: h5py.Dataset, present: int, where: str) -> int:
    """How many chunks a data set has; raises if fewer are there."""
    sides = zip(dataset.shape, dataset.chunks, strict=True)
    count = math.prod(-(-n // c) for n, c in sides)
    if present < count:
        raise DmlError(
            f"{where} has shape {dataset.shape} but only {present:,} of {count:,} chunks.",
            "Rows that were never written would read as zeros.",
            "Write the file again to the end.",
        )
    return count


def _damaged(where: str, at: tuple[int, ...], why: str) -> DmlError:
    return damaged(f"{where} has a damaged chunk at {at}.", f"{why[0].upper()}{why[1:]}.")


def _decoders(dataset: h5py.Dataset, item: int, where: str) -> list[Callable[[bytes, int], bytes]]:
    """One function for each filter, in the order of writing."""
    plist = dataset.id.get_create_plist()
    found: list[Callable[[bytes, int], bytes]] = []
    for number in range(plist.get_nfilters()):
        code, _, values, name = plist.get_filter(number)
        if code == DEFLATE:
            found.append(_inflate)
        elif code == SHUFFLE and (not values or values[0] == item):
            found.append(partial(_unshuffle, item=item))
        elif code == FLETCHER32:
            found.append(_verify)
        elif code == LZF:
            from retrieval.formats.hdf5 import lzf  # loads numba

            found.append(lzf.inflate)
        else:
            kind = NAMES.get(code) or name.decode("utf-8", "replace") or "unknown"
            raise DmlError(
                f"{where} is stored with the filter {kind} (number {code}, parameters {values}).",
                "Filters that can be checked are gzip, lzf, shuffle and fletcher32.",
                "Write it again: h5repack -f GZIP=4 old.h5 new.h5",
            )
    return found


def _inflate(data: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj()
    out = stream.decompress(data, limit + 1)
    if not stream.eof:
        raise ValueError("compressed data that end too early or go on for too long")
    return out


def _unshuffle(data: bytes, limit: int, item: int) -> bytes:
    """All first bytes of the elements, then all second ones, ...; a remainder stays in place."""
    count = len(data) // item
    body = np.frombuffer(data, np.uint8, count * item).reshape(item, count)
    return body.T.tobytes() + data[count * item :]


def _verify(data: bytes, limit: int) -> bytes:
    """Check the Fletcher-32 checksum at the end, and remove it."""
    if len(data) < 4:
        raise ValueError("no room for its checksum")
    body, stored = data[:-4], int.from_bytes(data[-4:], "little")
    sums = fletcher32(body)
    swapped = (sums >> 8 & 0x00FF00FF) | (sums & 0x00FF00FF) << 8  # by HDF5 before 1.6.3
    if stored not in (sums, swapped):
        raise ValueError("its checksum does not match")
    return body


def fletcher32(data: bytes) -> int:
    """HDF5's variant: 16-bit big-endian words, sums folded so that only zeros give zero."""
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2")
    first = second = 0
    for start in range(0, len(words), WORDS):
        part = words[start : start + WORDS].astype(np.uint64)
        weights = np.arange(len(part), 0, -1, dtype=np.uint64)
        second += first * len(part) + int((part * weights).sum())
        first += int(part.sum())
    return _fold(second) << 16 | _fold(first)


def _fold(value: int) -> int:
    return value and (value % 65535 or 65535)
