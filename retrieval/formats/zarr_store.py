"""Read Zarr stores, version 2 and 3: folders of chunks. Only codecs in a fixed list are run.

zarr looks up codecs by name among all that is installed, and one of them unpickles. So the metadata
are read here first, and a store that names any other codec is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.embeddings import Wanted, note
from retrieval.errors import DmlError, damaged
from retrieval.formats.arrays import allocate, file_blocks, file_size, refuse_bomb
from retrieval.formats.named_arrays import Entry, described, refused

METADATA = ("zarr.json", ".zarray", ".zgroup")
CODECS = ("bytes", "transpose", "gzip", "zlib", "zstd", "blosc", "lz4", "crc32c", "vlen-utf8")
SHARDING = "sharding_indexed"
FIXED_WIDTH = {"fixed_length_utf32": ("U", 4), "null_terminated_bytes": ("S", 1)}
"""Names of dtypes -> NumPy's letter, and the bytes of a character."""
LONGEST = 1 << 24  # bytes of a metadata file
MOST_ARRAYS = 10_000


def catalogue(path: Path) -> dict[str, Entry]:
    return {name: _entry(path, name, meta) for name, meta in _arrays(path)}


def trial(path: Path, key: str | None, wanted: Wanted) -> None:
    """Read every array: its chunks are decoded by libraries in C."""
    for found in catalogue(path).values():
        if found.kind != "?":
            found.read()


def _arrays(path: Path) -> Iterator[tuple[str, dict]]:
    """The arrays of a store with their metadata, by name; "" is the store itself."""
    count = 0
    for folder, below, files in os.walk(path):
        here = Path(folder)
        if any((here / name).is_symlink() for name in (*below, *files)):
            raise DmlError(
                f"{here} holds a link.",
                "A store is read only if all of it is inside its folder.",
                "Copy what the link leads to in its place.",
            )
        meta = _metadata(here, files)
        if meta is None or "shape" not in meta:
            below.sort()
            continue
        below.clear()  # its chunks
        count += 1
        if count > MOST_ARRAYS:
            raise damaged(f"{path} holds more than {MOST_ARRAYS:,} arrays.")
        name = here.relative_to(path).as_posix()
        yield "" if name == "." else name, meta


def _metadata(folder: Path, files: list[str]) -> dict | None:
    for name in METADATA:
        if name in files:
            with (folder / name).open("rb") as file:
                found = json.loads(file.read(LONGEST))
            if not isinstance(found, dict):
                raise damaged(f"{folder / name} holds no JSON object.")
            return found
    return None


def _entry(path: Path, name: str, meta: dict) -> Entry:
    where = f"{path}::{name}" if name else str(path)
    shape = tuple(meta["shape"])
    kind = _dtype(meta.get("data_type", meta.get("dtype")))
    if not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise damaged(f"{where} has the shape {shape}.")
    if not isinstance(kind, str) or kind == "|O":
        return refused(shape, str(kind), _unfit(where, f"the dtype {kind}"))
    codecs = set(_codecs(meta))
    if unknown := sorted(codecs - {*CODECS, SHARDING}):
        return refused(shape, kind, _unfit(where, f"the codec {unknown[0]}"))
    if kind == "string":
        return Entry(shape, kind, "S", lambda: _read(path, name, where))
    dtype = np.dtype(kind)
    found = described(shape, dtype, lambda: _read(path, name, where))
    if found.kind != "?":
        size = max(math.prod(shape), _chunk(meta)) * dtype.itemsize
        refuse_bomb(where, file_size(path / name), size)
    return found


def _dtype(kind: Any) -> Any:
    """The name of a dtype. Version 3 describes text of fixed width by an object."""
    if isinstance(kind, dict) and kind.get("name") in FIXED_WIDTH:
        letter, size = FIXED_WIDTH[kind["name"]]
        length = kind["configuration"]["length_bytes"]
        if type(length) is int and 0 < length < 2**31 and not length % size:
            return f"{letter}{length // size}"
    return kind


def _codecs(meta: dict) -> Iterator[str]:
    """The names of all codecs that the metadata of an array ask for."""
    for codec in meta.get("codecs") or ():
        yield str(codec["name"] if isinstance(codec, dict) else codec)
        inside = codec.get("configuration") if isinstance(codec, dict) else None
        for part in ("codecs", "index_codecs"):
            yield from _codecs({"codecs": (inside or {}).get(part)})
    for codec in (meta.get("compressor"), *(meta.get("filters") or ())):
        if codec is not None:
            yield str(codec["id"])
    yield from (str(name) for name in meta.get("storage_transformers") or ())


def _chunk(meta: dict) -> int:
    """Numbers in a chunk, which is decoded whole."""
    grid = meta.get("chunk_grid") or {"configuration": {"chunk_shape": meta.get("chunks")}}
    shape = grid["configuration"]["chunk_shape"]
    if not all(type(n) is int and 0 < n < 2**63 for n in shape):
        raise ValueError(f"chunks of shape {shape}")
    return math.prod(shape)


def _read(path: Path, name: str, where: str) -> np.ndarray:
    import zarr

    array: Any = zarr.open_array(str(path / name), mode="r")
    if missing := array.nchunks - array.nchunks_initialized:  # empty, or lost by a copy
        note(
            f"{where}: {missing:,} of its {array.nchunks:,} chunks are not stored; "
            f"they read as {array.fill_value}"
        )
    if array.dtype.kind not in "fiub":
        refuse_bomb(where, file_size(path / name), array.size * 8)
        return np.asarray(array[...])
    out = allocate(array.shape, array.dtype)
    for part in file_blocks(len(out), out[:1].nbytes):
        out[part] = array[part]
    return out


def _unfit(where: str, what: str) -> DmlError:
    return DmlError(
        f"{where} has {what}.",
        f"These codecs are read: {', '.join(CODECS)}.",
        "Save it as .npy: numpy.save('x.npy', zarr.open(PATH)[:])",
    )
