"""Read `.npz`: stored arrays are memory-mapped, compressed ones inflated in blocks."""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from retrieval.errors import DmlError, damaged
from retrieval.formats import named_arrays
from retrieval.formats.arrays import BLOCK_BYTES, allocate, mapped, refuse_bomb, refuse_overrun
from retrieval.formats.npy import header, pickled


def catalogue(path: Path) -> dict[str, named_arrays.Entry]:
    with zipfile.ZipFile(path) as archive:
        return {
            info.filename.removesuffix(".npy"): _entry(archive, info, path)
            for info in archive.infolist()
            if info.filename.endswith(".npy")
        }


def _entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> named_arrays.Entry:
    where = f"{path}::{info.filename.removesuffix('.npy')}"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DmlError(
            f"{where} is compressed in a way that NumPy does not use.",
            "Only deflated and uncompressed arrays are read.",
            "Save it again with numpy.savez.",
        )
    refuse_overrun(where, info.compress_size, os.path.getsize(path))
    with archive.open(info) as member:
        try:
            shape, fortran, dtype = header(member, where, allow_objects=True)
        except DmlError as error:
            return named_arrays.refused((), "object", error)  # need not spoil the others
        offset = member.tell()
    if dtype.hasobject:
        return named_arrays.refused(shape, "object", pickled(where))

    def load() -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        refuse_overrun(where, size, info.file_size - offset)
        if size < info.file_size - offset:
            held = info.file_size - offset
            raise damaged(f"{where} has {held:,} bytes for {size:,} bytes of data.")
        lay = shape[::-1] if fortran else shape
        if info.compress_type == zipfile.ZIP_STORED:
            start = _data_start(path, info)
            _check_sum(path, start, info, where)
            data = mapped(path, dtype, lay, start + offset)
        else:
            # Paths are much alike and shrink to a fiftieth: text is measured by the whole file.
            beside = os.path.getsize(path) if dtype.kind in "SU" else info.compress_size
            refuse_bomb(where, beside, size)
            data = _inflate(path, info, lay, dtype, offset, where)
        return data.T if fortran else data

    return named_arrays.described(shape, dtype, load)


def _data_start(path: Path, info: zipfile.ZipInfo) -> int:
    """The local header repeats the name, and its extra field may differ from the directory's."""
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        name, extra = struct.unpack("<HH", file.read(4))
    start = info.header_offset + 30 + name + extra
    refuse_overrun(f"{path}::{info.filename}", start + info.file_size, os.path.getsize(path))
    return start


def _check_sum(path: Path, start: int, info: zipfile.ZipInfo, where: str) -> None:
    """Compare the checksum of a member that is used where it lies; zipfile does so for others."""
    total, left = 0, info.file_size
    with path.open("rb") as file:
        file.seek(start)
        while left and (block := file.read(min(left, 1 << 20))):
            total = zlib.crc32(block, total)
            left -= len(block)
    if total != info.CRC or left:
        why = f"Its checksum is {total:08x} and should be {info.CRC:08x}."
        raise damaged(f"{where} is damaged.", why)


def _inflate(
    path: Path,
    info: zipfile.ZipInfo,
    shape: tuple[int, ...],
    dtype: np.dtype,
    offset: int,
    where: str,
) -> np.ndarray:
    out = allocate(shape, dtype)
    target = out.reshape(-1).view(np.uint8).data if out.size else memoryview(b"")
    with zipfile.ZipFile(path) as archive, archive.open(info) as member:
        member.read(offset)
        at = 0
        while at < len(target):
            block = member.read(min(BLOCK_BYTES, len(target) - at))
            if not block:
                refuse_overrun(where, len(target), at)
            target[at : at + len(block)] = block
            at += len(block)
        if member.read(1):  # reaching the end makes zipfile compare the checksum
            raise damaged(f"{where} goes on after its end.")
    return out
