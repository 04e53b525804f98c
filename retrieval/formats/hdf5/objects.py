"""List the data sets of an HDF5 file, and check them before memory is taken."""

from __future__ import annotations

import math
import os
from pathlib import Path

import h5py
import numpy as np

from retrieval.errors import DmlError
from retrieval.formats import arrays, named_arrays
from retrieval.formats.hdf5 import chunks

OBJECTS = 10_000


def open_file(path: Path) -> h5py.File:
    """Open a file for reading, without a lock, which fails on some network disks.

    None is needed: our own files change only by renaming.
    """
    copy = arrays.copies.get(path)
    return h5py.File(copy.reader() if copy else path, "r", locking=False)


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
                    f"{path} holds more than {OBJECTS:,} objects.",
                    "Embeddings are one 2-D array, not one object for each item.",
                    "Stack them: np.save('embeddings.npy', np.stack(vectors))",
                )
    # A link to a data set that was walked cannot lead out of the file; others are left alone.
    found.update({name: found[target] for name, target in soft.items() if target in found})
    return found


def _leaves(path: Path, name: str, how: str) -> DmlError:
    return DmlError(
        f"{path}::{name} {how}.",
        "Data outside the file are not followed.",
        "Copy them into one file, for example with h5copy or h5repack.",
    )


def _refuse_outside(dataset: h5py.Dataset, path: Path, name: str) -> None:
    plist = dataset.id.get_create_plist()
    if plist.get_external_count():
        raise _leaves(path, name, "keeps its data in another file")
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        for n in range(plist.get_virtual_count()):
            if plist.get_virtual_filename(n) != ".":
                raise _leaves(path, name, f"is made of {plist.get_virtual_filename(n)}")


Found = dict[str, h5py.Dataset]


def entries(found: Found, path: Path) -> dict[str, named_arrays.Entry]:
    return {name: _entry(found, path, name) for name in found}


def _entry(found: Found, path: Path, name: str) -> named_arrays.Entry:
    dataset = found[name]
    try:
        dtype, shape = dataset.dtype, dataset.shape or ()
    except TypeError:  # a type that NumPy lacks
        return named_arrays.refused((), "unknown")
    if h5py.check_string_dtype(dtype):
        return named_arrays.Entry(shape, "text", "S", lambda: array(found, path, name))
    return named_arrays.described(shape, dtype, lambda: array(found, path, name))


def array(found: Found, path: Path, name: str) -> np.ndarray:
    """A data set as an array: memory-mapped if it is stored as in NumPy, else read in blocks."""
    dataset, where = found[name], f"{path}::{name}"
    if dataset.shape is None:
        raise DmlError(f"{where} is empty.", "It holds no values at all.", "Write it again.")
    dtype, shape = dataset.dtype, dataset.shape
    layout = dataset.id.get_create_plist().get_layout()
    if layout == h5py.h5d.VIRTUAL:
        arrays.refuse_bomb(where, os.path.getsize(path), dataset.size * dtype.itemsize)
        return _assemble(found, path, name)
    item = _item_bytes(dataset, where)
    _check_size(dataset, path, where, item)
    if not dataset.size:
        return np.empty(shape, "S1" if dtype.hasobject else dtype)
    plain = is_plain(dataset)
    if plain and layout == h5py.h5d.CONTIGUOUS:
        offset = dataset.id.get_offset()
        arrays.refuse_overrun(where, offset + dataset.nbytes, os.path.getsize(path))
        return arrays.mapped(path, dtype, shape, offset)
    if dtype.hasobject:
        return _texts(dataset, path, where, item)
    out = arrays.allocate(shape, dtype)
    if plain and layout == h5py.h5d.CHUNKED:
        chunks.read(dataset, dtype, out, path, where)
        return out
    if layout == h5py.h5d.CHUNKED:
        for _ in chunks.blocks(dataset, item, path, where):  # raises unless all are whole
            pass
    if dataset.ndim == 0:
        return np.atleast_1d(dataset[()])
    for rows in arrays.file_blocks(shape[0], math.prod(shape[1:]) * dtype.itemsize):
        out[rows] = dataset[rows]
    return out


def look(found: Found, path: Path, name: str) -> None:
    """Make the HDF5 calls that `array` makes, but do not read numbers that NumPy decodes."""
    dataset = found[name]
    if not is_plain(dataset):
        array(found, path, name)
    elif dataset.shape and dataset.size and dataset.chunks is not None:
        chunks.stored(dataset, path, f"{path}::{name}")


def is_plain(dataset: h5py.Dataset) -> bool:
    """Numbers whose bytes in the file are those of NumPy's dtype.

    Text of variable length is not: its bytes in the file are places in a heap.
    """
    dtype = dataset.dtype
    return dtype.kind in "fiub" and dataset.id.get_type() == h5py.h5t.py_create(dtype, logical=True)


def _item_bytes(dataset: h5py.Dataset, where: str) -> int:
    """The size of one element in the file."""
    if not dataset.dtype.hasobject:
        return dataset.id.get_type().get_size()
    if not h5py.check_string_dtype(dataset.dtype):
        raise DmlError(
            f"{where} holds elements of variable length.",
            "Embeddings are one 2-D array of numbers, labels numbers or text.",
            "Write them as plain arrays.",
        )
    address, _ = dataset.file.id.get_create_plist().get_sizes()
    return 4 + address + 4  # length, then heap and number


def _texts(dataset: h5py.Dataset, path: Path, where: str, item: int) -> np.ndarray:
    """Text of variable length. Many elements may be the same long text, stored once."""
    stored, total = os.path.getsize(path), 0
    if dataset.chunks is not None:
        for place, data in chunks.blocks(dataset, item, path, where):
            lengths = np.frombuffer(data, np.uint8).reshape(*dataset.chunks, item)[..., :4]
            inside = lengths[tuple(slice(part.stop - part.start) for part in place)]
            total += int(np.ascontiguousarray(inside).view("<u4").sum(dtype=np.uint64))
    elif (offset := dataset.id.get_offset()) is not None:
        raw = arrays.mapped(path, np.dtype(np.uint8), (dataset.size, item), offset)
        total = int(np.ascontiguousarray(raw[:, :4]).view("<u4").sum(dtype=np.uint64))
    else:  # in the header of the data set, of at most 64 kB
        step = max(1, arrays.ROOM_BYTES // stored)
        flat = range(0, len(dataset) if dataset.ndim else 0, step)
        for at in flat:
            total += sum(map(len, dataset[at : at + step].reshape(-1)))
            arrays.refuse_bomb(where, stored, total)
    arrays.refuse_bomb(where, stored, total)
    return np.atleast_1d(dataset[()])


def _assemble(found: Found, path: Path, name: str) -> np.ndarray:
    """A virtual data set, from its parts in the same file; each element exactly once."""
    dataset, why = found[name], "some of its elements belong to no part"
    plist = dataset.id.get_create_plist()
    out, there = arrays.allocate(dataset.shape, dataset.dtype), np.zeros(dataset.shape, bool)
    for number in range(plist.get_virtual_count()):
        source = plist.get_virtual_dsetname(number).lstrip("/")
        try:
            box = _box(plist.get_virtual_vspace(number), dataset.shape)
            part = _part(found, path, source, plist.get_virtual_srcspace(number))
            if part.shape != out[box].shape:
                raise ValueError("of another shape than its place")
            if there[box].any():
                raise ValueError("one that overlaps another")
        except ValueError as error:
            why = f"its part {source} is {error}"
            break
        out[box], there[box] = part, True
    else:
        if there.all():
            return out
    raise DmlError(
        f"{path}::{name} is a virtual data set that is not whole: {why}.",
        "What is missing would read as zeros.",
        "Write it as one array: h5repack -l CONTI old.h5 new.h5",
    )


def _part(found: Found, path: Path, source: str, space: h5py.h5s.SpaceID) -> np.ndarray:
    if source not in found:
        raise ValueError("missing")
    dataset = found[source]
    if dataset.id.get_create_plist().get_layout() == h5py.h5d.VIRTUAL:
        raise ValueError("virtual itself")
    if not is_plain(dataset):
        raise ValueError("not made of plain numbers")
    return array(found, path, source)[_box(space, dataset.shape)]


def _box(space: h5py.h5s.SpaceID, shape: tuple[int, ...]) -> chunks.Place:
    """The rectangle that a selection covers."""
    if space.get_select_type() == h5py.h5s.SEL_ALL:
        return tuple(slice(0, n) for n in shape)
    try:
        low, high = space.get_select_bounds()
        count = space.get_select_npoints()
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ValueError("of unlimited size") from error
    box = tuple(slice(int(a), int(b) + 1) for a, b in zip(low, high, strict=True))
    if len(box) != len(shape) or any(p.stop > n for p, n in zip(box, shape, strict=True)):
        raise ValueError("larger than the data")
    if count != math.prod(p.stop - p.start for p in box):
        raise ValueError("not a block of rows and columns")
    return box


def _check_size(dataset: h5py.Dataset, path: Path, where: str, item: int) -> None:
    """Raise if the data are not there. HDF5 itself would invent zeros for the missing ones."""
    claimed = dataset.size * item
    if not claimed:
        return
    plist, stored = dataset.id.get_create_plist(), dataset.id.get_storage_size()
    layout = plist.get_layout()
    if layout == h5py.h5d.COMPACT:
        return
    arrays.refuse_overrun(where, stored, os.path.getsize(path))
    if layout == h5py.h5d.CONTIGUOUS:
        arrays.refuse_overrun(where, claimed, stored)
        return
    pieces = chunks.expected(dataset, dataset.id.get_num_chunks(), where)
    # Paths are much alike and shrink to a fiftieth: text is measured by the whole file.
    beside = os.path.getsize(path) if dataset.dtype.kind in "SO" else stored
    arrays.refuse_bomb(where, beside, pieces * math.prod(dataset.chunks) * item)
