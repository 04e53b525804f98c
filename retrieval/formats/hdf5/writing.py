"""Write dmltool's embedding files row by row, and resume them.

    attrs: format, version, complete, paths_sha256, created, dmltool, and what the exporter adds
    /<split>/embeddings  (N, D) contiguous, so that it can be memory-mapped
    /<split>/labels      (N,)   int64; uint64 where that is too small
    /<split>/paths       (N,)   UTF-8, optional
    /label_names         (C,)   UTF-8, optional

While a file is written it is called `name.partial` and has `/progress/<split>`, a byte for each
row that says whether it has arrived. HDF5 lays out the whole file first and closes it; rows and
then their marks are written straight to their places. So a kill finds HDF5 at rest, and a full
disk is an ordinary error (inside HDF5 it ends in a crash when the file is closed).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import h5py
import numpy as np

from retrieval import files
from retrieval.embeddings import Split
from retrieval.errors import FULL, DmlError, remedy
from retrieval.formats import FORMATS
from retrieval.formats.arrays import KEPT, file_blocks, put
from retrieval.formats.hdf5 import layout
from retrieval.formats.hdf5.reading import attribute

_HDF5 = FORMATS.find("hdf5")
KIND = files.Kind("an embedding file", _HDF5.suffixes, re.escape(next(iter(_HDF5.magic))))


class Writer:
    """Writes `name.partial` row by row, in any order, and renames it once every row is there."""

    def __init__(
        self,
        path: str | Path,
        splits: layout.Splits,
        dim: int,
        dtype: str = "float32",
        label_names: np.ndarray | None = None,
        attrs: Mapping[str, object] | None = None,
        force: bool = False,
        resume: bool = False,
        lengths: dict[str, int] | None = None,
    ) -> None:
        """`splits` gives (labels, paths); `lengths` is for a split that has neither."""
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.dim, self.dtype = dim, np.dtype(dtype)
        self.force, self.resume = force, resume
        if self.dtype.name not in KEPT or dim < 1 or not splits:
            raise DmlError(
                f"{path} cannot hold {len(splits)} splits of {dim} dimensions as {dtype}.",
                f"The dtypes of files are {', '.join(KEPT)}.",
                "Give at least one split, one dimension, and one of these dtypes.",
            )
        labels, names = layout.integer_labels(splits, label_names)
        paths = {s: None if p is None else layout.encode(p) for s, (_, p) in splits.items()}
        self.lengths = {
            split: layout.length(split, labels[split], paths[split], (lengths or {}).get(split))
            for split in splits
        }
        made = {key: layout.plain(value) for key, value in (attrs or {}).items()}
        made.setdefault("paths_sha256", layout.hash_paths(paths))
        self.layout = layout.Layout(self.lengths, dim, self.dtype, labels, paths, names, made)
        self.marks: dict[str, np.ndarray] = {}  # (N,) bool
        self.places: dict[str, tuple[int, int]] = {}  # where in the file: rows, marks

    def __enter__(self) -> Writer:
        self._refuse_overwriting()
        with failures(self.partial), ExitStack() as opened:
            self.raw = self._begin(opened)
            opened.pop_all()  # nothing failed: __exit__ closes it
        return self

    def _begin(self, opened: ExitStack) -> BinaryIO:
        """The file to write to, claimed or new; what is opened is closed with `opened`."""
        files.remove_leftovers(self.partial)
        old = self._claim()
        if old is not None:
            opened.enter_context(old)
        self._refuse_overwriting()  # again: its writer may just have finished
        if old is not None:
            if self.resume:
                self._check_resumable()
                return old
            self._refuse_losing()
        raw, name = files.create_temporary(self.partial, buffering=0)
        opened.enter_context(raw)
        raw = opened.enter_context(self._create(raw, name, old))
        self._locate()
        for split, (start, _) in self.places.items():
            # Take the blocks now: better refused here than after hours of work.
            if hasattr(os, "posix_fallocate"):
                size = self.lengths[split] * self.dim * self.dtype.itemsize
                os.posix_fallocate(raw.fileno(), start, size)
        return raw

    def _claim(self) -> BinaryIO | None:
        """The partial file that is there, locked; None if there is none."""
        try:
            return files.claim(self.partial)
        except FileNotFoundError:
            return None
        except BlockingIOError as error:
            raise self._in_use() from error

    def _in_use(self) -> DmlError:
        return DmlError(
            f"{self.partial} is in use.",
            "Another process is writing it.",
            "Wait until it has finished, or choose another name.",
        )

    def _refuse_overwriting(self) -> None:
        if self.path.exists() and not self.force:
            raise files.exists_already(self.path)

    def _refuse_losing(self) -> None:
        if not self.force and h5py.is_hdf5(self.partial):
            raise DmlError(
                f"{self.partial} is left from a command that did not finish.",
                "It may hold most of the work.",
                "Add --resume to continue it, or --force to start again.",
            )

    def _reserve(self, raw: BinaryIO) -> None:
        """Raise if the disk or a quota lacks room: HDF5 would crash while it creates the file."""
        needed = self.layout.bytes_needed()
        free = shutil.disk_usage(self.partial.parent).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free")
        raw.truncate(needed)  # fails where the size of files is limited
        if hasattr(os, "posix_fallocate"):  # fails where a quota is reached
            rows = sum(self.lengths.values()) * self.dim * self.dtype.itemsize  # see `_begin`
            os.posix_fallocate(raw.fileno(), 0, max(needed - rows, 1))
        raw.truncate(0)

    def _create(self, raw: BinaryIO, name: Path, old: BinaryIO | None) -> BinaryIO:
        """Create the file under another name, so that every .partial file can be resumed.

        It is locked before it gets its name, so that of several writers one begins.
        """
        with old or nullcontext():  # ours: its lock keeps others away until it is replaced
            try:
                self._reserve(raw)
                self.layout.create(name)
                if old is not None:
                    files.release(old)
                return files.rename_open(raw, name, self.partial, force=old is not None)
            except (FileExistsError, BlockingIOError) as error:
                raise self._in_use() from error
            finally:
                files.release(raw)
                name.unlink(missing_ok=True)

    def _locate(self) -> None:
        """Where the rows and their marks lie in the file, and which rows are there."""
        with h5py.File(self.partial, "r", locking=False) as file:
            for split, count in self.lengths.items():
                if "progress" not in file:  # killed after the last row, before the renaming
                    self.marks[split] = np.full(count, attribute(file, "complete") is True)
                    continue
                rows, marks = file[split]["embeddings"], file["progress"][split]
                self.marks[split] = marks[:] != 0
                self.places[split] = rows.id.get_offset(), marks.id.get_offset()

    def _check_resumable(self) -> None:
        try:
            with h5py.File(self.partial, "r", locking=False) as file:
                different = self.layout.differences(file)
            if not different:
                self._locate()
        except (KeyError, OSError, RuntimeError) as error:
            different = [f"its structure, which is damaged ({error})"]
        if different:
            raise DmlError(
                f"{self.partial} cannot be resumed.",
                f"It differs from what is to be written in: {', '.join(different)}.",
                "Add --force to start again, or give the same model and images as before.",
            )

    def done(self, split: str) -> np.ndarray:
        """(N,) bool: the rows that are already there."""
        return self.marks[split].copy()

    def write(self, split: str, at: int | Sequence[int] | np.ndarray, rows: np.ndarray) -> None:
        """Rows (B, D) from row `at` on, or at the rows that `at` lists."""
        rows = np.asarray(rows)
        at = np.arange(at, at + len(rows)) if isinstance(at, int) else np.asarray(at)
        count = self.lengths[split]
        if rows.shape != (len(at), self.dim) or (len(at) and not 0 <= at.min() <= at.max() < count):
            raise DmlError(
                f"Rows of shape {rows.shape} do not fit {split}, which is ({count}, {self.dim}).",
                f"They were meant for {len(at)} rows of {self.path}.",
                f"Give each row {self.dim} values and a place below {count}.",
            )
        if not len(at) or split not in self.places:
            return
        order = np.argsort(at, kind="stable")
        at, rows = at[order], layout.cast(rows[order], self.dtype, self.path)
        cuts = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
        vectors_at, marks_at = self.places[split]
        with failures(self.partial):
            for a, b in pairwise(cuts):
                place = int(at[a]) * self.dim * self.dtype.itemsize
                put(self.raw, vectors_at + place, rows[a:b])
            # Only now: a mark without its row would be a hole in the finished file.
            for a, b in pairwise(cuts):
                put(self.raw, marks_at + int(at[a]), np.ones(b - a, layout.MARK))
        self.marks[split][at] = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with closing(self.raw):
            if kind is None:
                with failures(self.partial):
                    self._finish()

    def _finish(self) -> None:
        missing = {split: int((~marks).sum()) for split, marks in self.marks.items()}
        if any(missing.values()):
            raise DmlError(
                f"{self.path} is not finished.",
                ", ".join(f"{n:,} rows of {s} are missing" for s, n in missing.items() if n) + ".",
                f"The other rows are in {self.partial}; add --resume to continue.",
            )
        os.fsync(self.raw.fileno())
        with h5py.File(self.partial, "r+", locking=False) as file:
            # In place, and before the marks go: whenever we are killed, resuming can tell.
            file.attrs.modify("complete", True)
            file.flush()
            if "progress" in file:
                del file["progress"]
        os.fsync(self.raw.fileno())
        self._refuse_overwriting()
        files.release(self.raw)
        files.rename_durably(self.partial, self.path)


@contextmanager
def failures(path: Path) -> Iterator[None]:
    """Raise a DmlError that names the file if writing fails."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        text = str(error)
        if getattr(error, "errno", None) in FULL or any(f"errno = {n}" in text for n in FULL):
            raise DmlError(
                f"{path} could not be written: the disk is full.",
                text.splitlines()[0],
                "Make room and run it again; export and embed continue with --resume.",
            ) from error
        fix = remedy(error) if isinstance(error, OSError) else "Choose another folder."
        raise DmlError(f"{path} could not be written.", text, fix) from error


def common_dim(source: object, splits: Mapping[str, Split]) -> int:
    """The dimension of all splits; raises if they differ."""
    dims = {split: part.vectors.shape[1] for split, part in splits.items()}
    if len(set(dims.values())) != 1:
        raise DmlError(
            f"The splits of {source} differ in dimension.",
            f"They have {dims}.",
            "Embed all splits with the same model.",
        )
    return next(iter(dims.values()))


def write(
    path: str | Path,
    splits: dict[str, Split],
    label_names: np.ndarray | None = None,
    attrs: Mapping[str, object] | None = None,
    force: bool = False,
) -> None:
    """A whole file at once, in the dtype that holds all the splits without loss."""
    dim = common_dim(path, splits)
    dtype = np.result_type(*(part.vectors.dtype for part in splits.values()))
    dtype = dtype if dtype.name in KEPT else np.dtype(np.float32)  # int8 beside uint8
    given = {split: (part.labels, part.paths) for split, part in splits.items()}
    lengths = {split: len(part.vectors) for split, part in splits.items()}
    target = Path(path)
    if force or not target.exists():  # nothing to resume here: a killed conversion starts again
        files.remove_unused(target.with_name(target.name + ".partial"))
    with Writer(path, given, dim, dtype.name, label_names, attrs, force, lengths=lengths) as out:
        for split, part in splits.items():
            for rows in file_blocks(len(part.vectors), dim * dtype.itemsize):
                out.write(split, rows.start, part.vectors[rows])
