"""Read `.safetensors`: a JSON header with the place of each tensor, memory-mapped.

The header is read here, with its bounds checked, so that the library is not needed.
"""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise
from pathlib import Path

import numpy as np

from retrieval.errors import DmlError, damaged
from retrieval.formats import named_arrays
from retrieval.formats.arrays import BFLOAT16, ensure, mapped, refuse_overrun

DTYPES = {
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BOOL": np.dtype("?"),
    **{f"{k.upper()}{8 * n}": np.dtype(f"<{k}{n}") for k in "iu" for n in (1, 2, 4, 8)},
}
HEADER_BYTES = 100_000_000  # the format's own limit


def catalogue(path: Path) -> dict[str, named_arrays.Entry]:
    size = os.path.getsize(path)
    with path.open("rb", buffering=0) as file:  # no bytes ahead of those that are there
        length = int.from_bytes(file.read(8), "little")
        refuse_overrun(f"the header of {path}", length, min(size - 8, HEADER_BYTES))
        ensure(path, [(0, 8 + length)])
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise damaged(f"{path} has a header that is not a JSON object.")
    header.pop("__metadata__", None)
    found = {name: _entry(path, name, info, 8 + length, size) for name, info in header.items()}
    places = sorted((info["data_offsets"], name) for name, info in header.items())
    filled = [((begin, end), name) for (begin, end), name in places if begin < end]
    for ((_, end), first), ((begin, _), second) in pairwise(filled):
        if begin < end:
            raise damaged(f"{path}::{first} and {path}::{second} share bytes.")
    return found


def _entry(path: Path, name: str, info: dict, start: int, size: int) -> named_arrays.Entry:
    where = f"{path}::{name}"
    shape, (begin, end) = tuple(info["shape"]), info["data_offsets"]
    numbers = (*shape, begin, end)
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or begin > end:
        raise damaged(f"{where} has the shape {shape} and the offsets {begin} and {end}.")
    refuse_overrun(where, end, size - start)
    dtype = DTYPES.get(info["dtype"])
    if dtype is None:
        error = DmlError(
            f"{where} has the dtype {info['dtype']}.",
            f"These are read: {' '.join(DTYPES)}.",
            "Convert it to one of these and save it again.",
        )
        return named_arrays.refused(shape, str(info["dtype"]), error)
    claimed = math.prod(shape) * dtype.itemsize
    if claimed != end - begin:
        raise damaged(f"{where} claims {claimed:,} bytes, its offsets enclose {end - begin:,}.")
    return named_arrays.described(shape, dtype, lambda: mapped(path, dtype, shape, start + begin))
