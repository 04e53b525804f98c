"""Read `.npy`: memory-mapped, never unpickled."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import IO

import numpy as np

from retrieval.errors import DmlError
from retrieval.formats.arrays import mapped, refuse_overrun
from retrieval.formats.named_arrays import Entry, entry

READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def catalogue(path: Path) -> dict[str, Entry]:
    with path.open("rb") as file:
        shape, fortran, dtype = header(file, str(path))
        offset = file.tell()
    present = os.path.getsize(path) - offset
    refuse_overrun(str(path), math.prod(shape) * dtype.itemsize, present)
    data = mapped(path, dtype, shape[::-1] if fortran else shape, offset)
    return {"": entry(data.T if fortran else data)}


def header(
    file: IO[bytes], where: str, allow_objects: bool = False
) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether Fortran order, and dtype; leaves the file at the first byte of data."""
    try:
        version = np.lib.format.read_magic(file)
        # Version 3 differs only in the names of fields, which we do not take anyway.
        if version not in READERS:
            raise ValueError(f".npy version {version[0]}.{version[1]}")
        shape, fortran, dtype = READERS[version](file)
        # Texts of no length would be any number of labels in no bytes.
        if any(length < 0 for length in shape) or (not dtype.itemsize and 0 not in shape):
            raise ValueError(f"the shape is {shape}, the dtype {dtype}")
    except Exception as error:  # NumPy evaluates the header as a literal: anything may come
        raise DmlError(
            f"{where} cannot be read.",
            f"Its header is not that of a plain array: {error}.",
            "Save it again with numpy.save.",
        ) from error
    if dtype.hasobject and not allow_objects:
        raise pickled(where)
    return shape, fortran, dtype


def pickled(where: str) -> DmlError:
    """The error about an array of objects, which NumPy saves as a pickle."""
    name = where.partition("::")[2]
    name = name if name.isidentifier() else "array"
    return DmlError(
        f"{where} holds pickled Python objects (dtype=object).",
        "Unpickling can run any code, so it is never done.",
        f"Save text as text: {name}.astype(str), and numbers with .astype('float32').",
    )
