"""Read `.fvecs`, `.bvecs`, `.ivecs`: each row is an int32 length and that many values."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from retrieval.errors import DmlError, damaged
from retrieval.formats.named_arrays import Entry, entry

VALUES: dict[str, np.dtype] = {
    ".fvecs": np.dtype("<f4"),
    ".ivecs": np.dtype("<i4"),
    ".bvecs": np.dtype("u1"),
}
CHECKED_ROWS = 1 << 20


def catalogue(path: Path) -> dict[str, Entry]:
    """One array (N, D), a strided view of the mapped file."""
    dtype = VALUES[path.suffix.lower()]
    size = os.path.getsize(path)
    with path.open("rb") as file:
        dim = int.from_bytes(file.read(4), "little", signed=True)
    stride = 4 + dim * dtype.itemsize
    if size < 4 or dim < 1 or size % stride:
        raise DmlError(
            f"{path} is {size:,} bytes long and its first row claims {dim:,} values.",
            f"Rows of {stride:,} bytes do not fill the file." if dim > 0 else "No row has so few.",
            "Copy or write the file again: it is truncated or of another format.",
        )
    raw = np.memmap(path, np.uint8, "r", shape=(size // stride, stride))
    # Reading the length of every row would read the whole file: very long ones are sampled.
    sample = raw[:: max(1, len(raw) // CHECKED_ROWS), :4]
    lengths = np.ascontiguousarray(sample).view("<i4")
    if (lengths != dim).any():
        raise damaged(f"{path} has rows of different lengths.", f"The first has {dim} values.")
    return {"": entry(raw[:, 4:].view(dtype))}
