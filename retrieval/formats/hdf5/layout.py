"""Lay out an embedding file before its rows come, and compare it when it is resumed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import h5py
import numpy as np

from retrieval.formats.hdf5.content import encode, equal, own_version, preallocate, put_text
from retrieval.formats.hdf5.reading import FORMAT, VERSION, attribute

# What must not change between the two halves of a resumed file.
SAME = ("model_sha256", "paths_sha256", "preprocessing", "normalized")
MARK, ALIGNMENT = np.dtype("u1"), 4096


@dataclass(frozen=True)
class Layout:
    """Dictionaries are by split."""

    lengths: dict[str, int]
    dim: int
    dtype: np.dtype
    labels: dict[str, np.ndarray | None]
    paths: dict[str, list[bytes] | None]
    names: np.ndarray | None
    attrs: dict[str, object]

    def bytes_needed(self) -> int:
        """Of the disk, nearly."""
        row = self.dim * self.dtype.itemsize + 16
        return sum(
            count * row + sum(map(len, self.paths[split] or ()))
            for split, count in self.lengths.items()
        )

    def path(self, split: str, row: int, errors: str = "replace") -> str:
        """The path of a row, empty without paths; errors: what becomes of other than UTF-8."""
        paths = self.paths[split]
        return "" if paths is None else paths[row].decode("utf-8", errors)

    def create(self, path: Path) -> None:
        """A file with everything but the rows, and room for them."""
        # Aligned, so that the vectors can be used where they are mapped.
        options = {"alignment_threshold": ALIGNMENT, "alignment_interval": ALIGNMENT}
        with h5py.File(path, "w", locking=False, **options) as file:
            made = {"created": datetime.now(UTC).isoformat(timespec="seconds")}
            made["dmltool"] = own_version()
            file.attrs.update({"format": FORMAT, "version": VERSION, "complete": False})
            file.attrs.update(made | self.attrs)
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
        """In what a file that was begun differs from this one, in words."""
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
            was = file[split]["labels"][:] if "labels" in file[split] else None
            if not equal(was, self.labels[split]):
                found.append(f"labels of {split}")
        was = file["label_names"][:].tolist() if "label_names" in file else None
        if was != (None if self.names is None else encode(self.names)):
            found.append("label names")
        return found
