"""Lay out an embedding file before its rows come, and compare it when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import h5py
import numpy as np

from retrieval import embeddings
from retrieval.errors import DmlError
from retrieval.formats import labels
from retrieval.formats.hdf5.reading import FORMAT, VERSION, attribute
from retrieval.formats.shard_sets import ATTRIBUTE

# What must not change between the two halves of a resumed file.
SAME = ("model_sha256", "paths_sha256", "preprocessing", "normalized", ATTRIBUTE)
MARK, ALIGNMENT = np.dtype("u1"), 4096

Paths = np.ndarray | Sequence[str]
Splits = Mapping[str, tuple[np.ndarray | None, Paths | None]]  # (labels, paths)


@dataclass(frozen=True)
class Layout:
    """What an embedding file holds besides its rows; dictionaries are by split."""

    lengths: dict[str, int]
    dim: int
    dtype: np.dtype
    labels: dict[str, np.ndarray | None]
    paths: dict[str, list[bytes] | None]
    names: np.ndarray | None
    attrs: dict[str, object]

    def bytes_needed(self) -> int:
        """Approximate size of the file on the disk."""
        row = self.dim * self.dtype.itemsize + 16
        return sum(
            count * row + sum(map(len, self.paths[split] or ()))
            for split, count in self.lengths.items()
        )

    def path(self, split: str, row: int, errors: str = "replace") -> str:
        """The path of a row, empty without paths; errors: how to decode what is not UTF-8."""
        paths = self.paths[split]
        return "" if paths is None else paths[row].decode("utf-8", errors)

    def create(self, path: Path) -> None:
        """Create a file with everything but the rows, and with room for them."""
        # Aligned, so that the vectors can be used where they are mapped.
        options = {"alignment_threshold": ALIGNMENT, "alignment_interval": ALIGNMENT}
        with h5py.File(path, "w", locking=False, **options) as file:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            file.attrs.update({"format": FORMAT, "version": VERSION, "complete": False})
            file.attrs.update({"created": now, "dmltool": version("dmltool")} | self.attrs)
            if self.names is not None:
                put_text(file, "label_names", encode(self.names))
            for split, count in self.lengths.items():
                group = file.create_group(split)
                if self.labels[split] is not None:
                    group["labels"] = self.labels[split]
                if (paths := self.paths[split]) is not None:
                    put_text(group, "paths", paths)
                preallocate(group, "embeddings", (count, self.dim), self.dtype)
                marks = preallocate(file.require_group("progress"), split, (count,), MARK)
                marks[:] = 0

    def differences(self, file: h5py.File) -> list[str]:
        """Name what differs between a partial file and this layout."""
        if attribute(file, "format") != FORMAT or attribute(file, "version") != VERSION:
            return ["format"]
        found = [key for key in SAME if attribute(file, key) != self.attrs.get(key)]
        if {name for name in file if name not in ("progress", "label_names")} != set(self.lengths):
            return [*found, "splits"]
        for split in self.lengths:
            stored = file[split]["embeddings"]
            if stored.dtype != self.dtype:
                found.append(f"dtype of {split}")
            if stored.shape != (self.lengths[split], self.dim):
                found.append(f"shape of {split}")
            was = file[split]["labels"][:] if "labels" in file[split] else ()
            wanted = self.labels[split]
            if not np.array_equal(was, () if wanted is None else wanted):
                found.append(f"labels of {split}")
        was = file["label_names"][:].tolist() if "label_names" in file else None
        if was != (None if self.names is None else encode(self.names)):
            found.append("label names")
        return found


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
    what = f"The split {split!r} cannot be written."
    if len(sizes) != 1:
        why = f"Its labels, paths and vectors have the lengths {sorted(sizes)}."
        raise DmlError(what, why, "Give one label and one path for each vector.")
    if split in ("progress", "label_names") or "/" in split:
        why = "This name is used for something else in the file."
        raise DmlError(what, why, "Choose another name, without a slash.")
    return sizes.pop()


def plain(value: object) -> object:
    """An attribute: text and numbers as they are, anything else as JSON."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str | bool | int | float):
        return value
    return json.dumps(value, sort_keys=True, default=embeddings.plain)


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
    """Write text of fixed width with gzip: a ninth of the size of text of variable length."""
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
    """Create a contiguous data set and allocate it at once: a kill then leaves a valid file."""
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
