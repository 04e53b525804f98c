"""Read `.npz`: stored arrays are memory-mapped, compressed ones inflated in blocks."""

from __future__ import annotations

import math
import os
import struct
import zipfile
from pathlib import Path

import numpy as np

from retrieval.errors import DmlError, damaged
from retrieval.formats import named_arrays
from retrieval.formats.arrays import allocate, mapped, refuse_bomb, refuse_overrun
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
        size, held = math.prod(shape) * dtype.itemsize, info.file_size - offset
        refuse_overrun(where, size, held)
        if size < held:
            raise damaged(f"{where} has {held:,} bytes for {size:,} bytes of data.")
        lay = shape[::-1] if fortran else shape
        if info.compress_type == zipfile.ZIP_STORED:
            _copy(path, info, None, offset)
            data = mapped(path, dtype, lay, _data_start(path, info) + offset)
        else:
            # Paths are much alike and shrink to a fiftieth: text is measured by the whole file.
            beside = os.path.getsize(path) if dtype.kind in "SU" else info.compress_size
            refuse_bomb(where, beside, size)
            data = allocate(lay, dtype)
            _copy(path, info, data.reshape(-1).view(np.uint8) if size else None, offset)
        return data.T if fortran else data

    return named_arrays.described(shape, dtype, load)


def _data_start(path: Path, info: zipfile.ZipInfo) -> int:
    """Where a member's data begin, by its local header, which may differ from the directory."""
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        name, extra = struct.unpack("<HH", file.read(4))
    start = info.header_offset + 30 + name + extra
    refuse_overrun(f"{path}::{info.filename}", start + info.file_size, os.path.getsize(path))
    return start


def _copy(path: Path, info: zipfile.ZipInfo, target: np.ndarray | None, offset: int) -> None:
    """Copy the bytes of a member from `offset` on, and let zipfile compare the checksum.

    target: (n,) uint8, None for an array that is used where it lies.
    """
    with zipfile.ZipFile(path) as archive, archive.open(info) as member:
        at = len(member.read(offset))
        while block := member.read(1 << 20):
            if target is not None:
                target[at - offset : at - offset + len(block)] = np.frombuffer(block, np.uint8)
            at += len(block)
    refuse_overrun(f"{path}::{info.filename}", info.file_size, at)
