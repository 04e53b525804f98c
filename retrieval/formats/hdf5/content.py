"""Put labels, text, hashes and room for rows into an HDF5 file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np

from retrieval.errors import DmlError
from retrieval.formats import labels

Paths = np.ndarray | Sequence[str]
Splits = Mapping[str, tuple[np.ndarray | None, Paths | None]]  # (labels, paths)


def integer_labels(
    splits: Splits, names: np.ndarray | None
) -> tuple[dict[str, np.ndarray | None], np.ndarray | None]:
    """Labels as integers; strings become indices into the names."""
    given = {
        split: None if values is None else labels.labels(np.asarray(values), f"labels of {split}")
        for split, (values, _) in splits.items()
    }
    text = [values for values in given.values() if values is not None and labels.is_text(values)]
    if not text:
        return given, None if names is None else _names(names)
    known = np.unique(np.concatenate(text))
    names = known if names is None else _names(names)
    order = np.argsort(names)
    for split, values in given.items():
        if values is None:
            continue
        if not labels.is_text(values) or not np.isin(values, names).all():
            raise DmlError(
                f"The labels of {split} are not all among the label names.",
                "The labels of one file are all integers or all strings.",
                "Give every label a name, or write all labels as integers.",
            )
        given[split] = order[np.searchsorted(names, values, sorter=order)].astype(np.int64)
    return given, names


def _names(values: np.ndarray) -> np.ndarray:
    return labels.text([str(value) for value in values], "label_names")


def length(
    split: str, label: np.ndarray | None, paths: list[bytes] | None, told: int | None
) -> int:
    sizes = {len(part) for part in (label, paths) if part is not None}
    sizes |= set() if told is None else {told}
    if len(sizes) != 1 or split in ("progress", "label_names") or "/" in split:
        raise DmlError(
            f"The split {split!r} cannot be written.",
            f"Its labels, paths and vectors have the lengths {sorted(sizes)}."
            if len(sizes) != 1
            else "This name is used for something else in the file.",
            "Give one label and one path for each vector."
            if len(sizes) != 1
            else "Choose another name, without a slash.",
        )
    return sizes.pop()


def plain(value: object) -> object:
    """An attribute: text and numbers as they are, anything else as JSON."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str | bool | int | float):
        return value
    return json.dumps(value, sort_keys=True)


def encode(values: Paths) -> list[bytes]:
    # surrogateescape: a file name need not be UTF-8 and is to come back as it was.
    try:
        return [str(value).encode("utf-8", "surrogateescape") for value in values]
    except UnicodeEncodeError as error:
        raise DmlError(
            f"The text {error.object[:40]!r} cannot be written.",
            "It holds half of a surrogate pair, which is no character.",
            "Rename it.",
        ) from error


def hash_paths(paths: dict[str, list[bytes] | None]) -> str:
    digest = hashlib.sha256()
    for split, values in paths.items():
        digest.update(f"{split} {-1 if values is None else len(values)}\n".encode())
        for value in values or ():
            digest.update(value + b"\0")
    return digest.hexdigest()


def put_text(group: h5py.Group, name: str, values: list[bytes]) -> None:
    """Fixed width and gzip: for a million paths a ninth of the size of variable length."""
    width = max(map(len, values), default=0) or 1
    if width * len(values) > 1 << 26 and width * len(values) > 8 * sum(map(len, values)):
        group.create_dataset(name, data=values, dtype=h5py.string_dtype())  # one very long path
        return
    fixed = np.array(values, h5py.string_dtype("utf-8", width))
    squeeze = {"compression": "gzip", "compression_opts": 4} if len(values) > 1000 else {}
    group.create_dataset(name, data=fixed, **squeeze)


def preallocate(
    group: h5py.Group, name: str, shape: tuple[int, ...], dtype: np.dtype
) -> h5py.Dataset:
    """Contiguous, with its place in the file fixed at once: a kill then leaves a sound file."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.CONTIGUOUS)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plist.set_obj_track_times(False)  # the same content is the same bytes
    space, kind = h5py.h5s.create_simple(shape), h5py.h5t.py_create(dtype, logical=True)
    return h5py.Dataset(h5py.h5d.create(group.id, name.encode(), kind, space, plist))


def cast(rows: np.ndarray, dtype: np.dtype, path: Path) -> np.ndarray:
    """Rows in the dtype of the file; rounding is allowed, overflow is not."""
    if rows.dtype == dtype:
        return rows
    if dtype.kind in "iu" or rows.dtype.kind not in "fiu":
        raise DmlError(
            f"{path} takes {dtype} rows, not {rows.dtype}.",
            "They would be rounded.",
            f"Convert them to {dtype} first, or write a file of another dtype.",
        )
    with np.errstate(over="ignore"):
        out = rows.astype(dtype)
    if (np.isinf(out) & np.isfinite(rows)).any():
        raise DmlError(
            f"{path}: a value does not fit {dtype}.",
            f"The largest that does is {np.finfo(dtype).max}.",
            "Write float32.",
        )
    return out


def equal(stored: np.ndarray | None, wanted: np.ndarray | None) -> bool:
    if stored is None or wanted is None:
        return stored is None and wanted is None
    return np.array_equal(stored, wanted)


def put(file: BinaryIO, offset: int, data: np.ndarray) -> None:
    """All the bytes of an array, at one place of an unbuffered file."""
    left = np.ascontiguousarray(data).view(np.uint8).reshape(-1).data
    file.seek(offset)
    while left:
        left = left[file.write(left) :]


def own_version() -> str:
    try:
        return metadata.version("dmltool")
    except metadata.PackageNotFoundError:
        return "unknown"
