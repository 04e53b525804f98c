"""What lies in an HDF5 file: found without leaving the file, checked before memory is taken."""

from __future__ import annotations

import math
import os
from pathlib import Path

import h5py
import numpy as np

from retrieval.errors import DmlError
from retrieval.formats import naming
from retrieval.formats.arrays import allocate, blocks, mapped, refuse_bomb, refuse_overrun

OBJECTS = 10_000


def open_file(path: Path) -> h5py.File:
    """Read-only. Locks fail on some network disks, and our own files change only by renaming."""
    return h5py.File(path, "r", locking=False)


def datasets(file: h5py.File, path: Path) -> dict[str, h5py.Dataset]:
    """Every data set by its path, soft links included; links out of the file are refused."""
    found: dict[str, h5py.Dataset] = {}
    soft: dict[str, str] = {}
    seen = {h5py.h5o.get_info(file.id).addr}
    waiting: list[tuple[str, h5py.Group]] = [("", file)]
    while waiting:
        prefix, group = waiting.pop(0)
        for name in group:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise _leaves(path, prefix + name, f"is a link into {link.filename}")
            if isinstance(link, h5py.SoftLink):
                base = "" if link.path.startswith("/") else prefix
                soft[prefix + name] = (base + link.path).lstrip("/")
                continue
            item = group[name]
            if isinstance(item, h5py.Dataset):
                _refuse_outside(item, path, prefix + name)
                found[prefix + name] = item
            elif isinstance(item, h5py.Group):
                address = h5py.h5o.get_info(item.id).addr
                if address not in seen:  # hard links can form a circle
                    seen.add(address)
                    waiting.append((f"{prefix}{name}/", item))
            if len(found) + len(seen) > OBJECTS:
                raise DmlError(
                    f"{path} holds more than {OBJECTS:,} objects",
                    "embeddings are one 2-D array, not one object for each item",
                    "stack them: np.save('embeddings.npy', np.stack(vectors))",
                )
    # A link to a data set that was walked cannot lead out of the file; others are left alone.
    found.update({name: found[target] for name, target in soft.items() if target in found})
    return found


def _leaves(path: Path, name: str, how: str) -> DmlError:
    return DmlError(
        f"{path}::{name} {how}",
        "data outside the file are not followed",
        "copy them into one file, for example with h5copy or h5repack",
    )


def _refuse_outside(dataset: h5py.Dataset, path: Path, name: str) -> None:
    plist = dataset.id.get_create_plist()
    if plist.get_external_count():
        raise _leaves(path, name, "keeps its data in another file")
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        for n in range(plist.get_virtual_count()):
            if plist.get_virtual_filename(n) != ".":
                raise _leaves(path, name, f"is made of {plist.get_virtual_filename(n)}")


def entries(found: dict[str, h5py.Dataset], path: Path) -> dict[str, naming.Entry]:
    return {name: _entry(dataset, path, name) for name, dataset in found.items()}


def _entry(dataset: h5py.Dataset, path: Path, name: str) -> naming.Entry:
    where = f"{path}::{name}"
    try:
        dtype, shape = dataset.dtype, dataset.shape or ()
    except TypeError:  # a type that NumPy lacks
        return naming.Entry((), "unknown", "?", lambda: np.empty(0, object))
    text = h5py.check_string_dtype(dtype)
    kind = "S" if text else dtype.kind if dtype.kind in "fiub" else "?"
    return naming.Entry(
        shape, "text" if text else dtype.name, kind, lambda: array(dataset, path, where)
    )


def array(dataset: h5py.Dataset, path: Path, where: str) -> np.ndarray:
    """Memory-mapped if it lies in the file as NumPy would have it, else read in blocks."""
    _check_size(dataset, path, where)
    dtype, shape, offset = dataset.dtype, dataset.shape, dataset.id.get_offset()
    # Only plain numbers: mapping text of variable length would take file bytes for pointers.
    plain = dtype.kind in "fiub" and dataset.id.get_type() == h5py.h5t.py_create(
        dtype, logical=True
    )
    if plain and offset is not None:
        refuse_overrun(where, offset + dataset.nbytes, os.path.getsize(path))
        return mapped(path, dtype, shape, offset)
    if dtype.hasobject or dataset.ndim == 0:
        return np.atleast_1d(dataset[()])
    out = allocate(shape, dtype)
    for rows in blocks(shape[0], math.prod(shape[1:]) * dtype.itemsize):
        out[rows] = dataset[rows]
    return out


def _check_size(dataset: h5py.Dataset, path: Path, where: str) -> None:
    """Raise if the data are not there. HDF5 itself would invent zeros for the missing ones."""
    claimed = dataset.size * dataset.id.get_type().get_size()
    if not claimed:
        return
    plist, stored = dataset.id.get_create_plist(), dataset.id.get_storage_size()
    layout = plist.get_layout()
    if layout == h5py.h5d.COMPACT:
        return
    if layout == h5py.h5d.VIRTUAL:
        refuse_bomb(where, os.path.getsize(path), claimed)
        return
    refuse_overrun(where, stored, os.path.getsize(path))
    if layout == h5py.h5d.CONTIGUOUS:
        refuse_overrun(where, claimed, stored)
        return
    pieces = math.prod(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True))
    present = dataset.id.get_num_chunks()
    if present < pieces:
        raise DmlError(
            f"{where} has shape {dataset.shape} but only {present:,} of {pieces:,} chunks",
            "rows that were never written would read as zeros",
            "write the file again to the end",
        )
    expanded = pieces * math.prod(dataset.chunks) * dataset.id.get_type().get_size()
    refuse_bomb(where, stored, expanded)
