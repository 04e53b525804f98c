"""Keep copies of files behind addresses, and fetch what is missing or has changed.

Each address has an entry: a folder with `data`, the files under their own names, `versions`, which
tells for each file what the server said of it when it was fetched, and `marks`, which tells for a
file with holes what has been fetched of it.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from retrieval.errors import DmlError
from retrieval.files import is_at, remove_leftovers, whole_file, write_text
from retrieval.formats.arrays import copies
from retrieval.remote import ranges
from retrieval.remote.address import Address, without_secrets
from retrieval.remote.room import Bytes, Room, alone, files_below, folder, writable
from retrieval.remote.store import Found, NoRanges, Store
from retrieval.resources import StageProgress, run_all, stage

DOWNLOADS = 4  # at a time

_shown: dict[str, str] = {}  # folders of this cache -> the addresses that they are copies of
_guard = threading.Lock()


def shown(text: str) -> str:
    """A message with the addresses, without their secrets, in place of the copies."""
    for local, address in list(_shown.items()):
        text = text.replace(local, address)
    return without_secrets(text)


class Entry:
    """The copies of the files behind one address."""

    def __init__(self, address: Address, root: str, progress: StageProgress | None = None) -> None:
        """root: the address of the folder that the names of files are below."""
        self.address, self.progress = address, progress
        self.path = folder() / hashlib.sha256(address.url.encode()).hexdigest()[:24]
        self.data = self.path / "data"
        self.names: set[str] = set()  # behind the address: others are forgotten
        self.room = Room(self.path, address.shown)
        with writable(self.path):
            self.data.mkdir(exist_ok=True)
        with _guard:
            _shown[str(self.data)] = root.rstrip("/")

    def fetch(
        self, store: Store, files: Sequence[Found], parts: Collection[str] = frozenset()
    ) -> None:
        """Bring the copies of these files up to date.

        parts: suffixes of files of which readers ask for what they need. Large ones get a copy
        with holes.
        """
        self.names |= {file.name for file in files}
        self._refuse_clash()
        with writable(self.path), alone(self.path / "fetching"):
            remove_leftovers(self.data)
            missing: list[Found] = []
            new: list[Found] = []  # to be read in parts
            for file in files:
                state, in_parts = self._state(file), Path(file.name).suffix.lower() in parts
                if state == "missing":
                    self._clear_way(file.name)
                    fits = in_parts and ranges.suits(file.size, file.version)
                    (new if fits else missing).append(file)
                elif state == "holes":
                    copy = self._copy(store, file)
                    if not in_parts:
                        try:
                            self._fill(store, file, copy, [(0, copy.size)])
                        except NoRanges:
                            missing.append(file)
            missing += self._begin_all(store, new)
            if missing:
                self._download_all(store, missing)

    def _refuse_clash(self) -> None:
        """An object store can hold a file `a` and a file `a/b`, a disk cannot."""
        folders = {parent.as_posix() for name in self.names for parent in Path(name).parents}
        if clash := sorted(self.names & folders):
            raise DmlError(
                f"{self.address.shown} has a file {clash[0]} and files below {clash[0]}/.",
                "On a disk, where copies are kept, a name is a file or a folder.",
                "Choose one of them by a pattern.",
            )

    def _clear_way(self, name: str) -> None:
        """Remove what had the name of a folder of this file, or its name as a folder."""
        for root in (self.data, self.path / "versions", self.path / "marks"):
            path = root / name
            for parent in path.relative_to(root).parents:
                if (root / parent).is_file():
                    (root / parent).unlink()
            if path.is_dir():
                shutil.rmtree(path)

    def _download_all(self, store: Store, files: Sequence[Found]) -> None:
        total = sum(file.size or 0 for file in files)
        report = stage(self.progress, f"downloading {_listed(files)}")
        with self.room.expecting(total, report) as come:
            # Tasks in order, so that Ctrl-C leaves the first ones complete.
            tasks = [(partial(self._download, store, file, come), 1) for file in files]
            run_all(tasks, DOWNLOADS, stop=come.stop)

    # Copies with holes

    def _marks(self, name: str) -> Path:
        return self.path / "marks" / name

    def _begin_all(self, store: Store, files: Sequence[Found]) -> list[Found]:
        """Start copies that are all holes, and fetch their ends.

        Returns the files that the server sends only whole.
        """
        refused: list[Found] = []
        total = sum(2 * ranges.BLOCK + (file.size or 0) % ranges.BLOCK for file in files)
        report = stage(self.progress, f"downloading parts of {_listed(files)}")
        if files:
            with self.room.expecting(total, report) as come:
                tasks = [(partial(self._begin, store, file, come, refused), 1) for file in files]
                run_all(tasks, DOWNLOADS, stop=come.stop)
        return refused

    def _begin(self, store: Store, file: Found, come: Bytes, refused: list[Found]) -> None:
        target, marks = self.data / file.name, self._marks(file.name)
        assert file.size is not None
        self._version(file.name).unlink(missing_ok=True)
        for path, size in ((target, file.size), (marks, -(-file.size // ranges.BLOCK))):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as out:
                out.truncate(size)
        copy = self._copy(store, file)
        pieces = copy.missing([(0, 1), (file.size - ranges.BLOCK, file.size)])
        try:
            for piece in pieces:
                self._fill_piece(store, file, copy, come, piece)
        except NoRanges:
            copies.pop(target, None)
            refused.append(file)
            return
        store.check_unchanged(file)
        copy.mark(pieces)
        self._note_version(file, ranges.IN_PARTS)

    def _copy(self, store: Store, file: Found) -> ranges.Copy:
        target = self.data / file.name
        known = copies.get(target)
        if known and is_at(known.file, target):
            return known

        def download(copy: ranges.Copy, wanted: list[ranges.Range]) -> None:
            with writable(self.path), alone(self.path / "fetching"):
                try:
                    self._fill(store, file, copy, wanted)
                except NoRanges as error:
                    copy.version.unlink(missing_ok=True)
                    raise DmlError(
                        f"The server of {copy.path} no longer sends parts of files.",
                        "Some parts are in the cache, and others are needed now.",
                        "Run the command again: it then downloads the whole file.",
                    ) from error

        copy = ranges.Copy(target, self._marks(file.name), self._version(file.name), download)
        copy.progress = self.progress
        copies[target] = copy
        return copy

    def _fill(
        self, store: Store, file: Found, copy: ranges.Copy, wanted: Sequence[ranges.Range]
    ) -> None:
        """Download what is missing of these ranges; it counts once the version is confirmed."""
        if pieces := copy.missing(wanted):
            total = sum(stop - start for start, stop in pieces)
            report = stage(copy.progress, f"downloading parts of {file.name}")
            with self.room.expecting(total, report) as come:
                fill = partial(self._fill_piece, store, file, copy, come)
                run_all([(partial(fill, piece), 1) for piece in pieces], DOWNLOADS, stop=come.stop)
                store.check_unchanged(file)
                copy.mark(pieces)
        if copy.marks.all():
            if self._state(file) == "holes":
                self._note_version(file)
            self._marks(file.name).unlink(missing_ok=True)

    @staticmethod
    def _fill_piece(
        store: Store, file: Found, copy: ranges.Copy, come: Bytes, piece: ranges.Range
    ) -> None:
        start, stop = piece
        come.add(0)
        copy.write(start, store.read(file, start, stop))
        come.add(stop - start)

    def forget_others(self) -> None:
        """Remove copies of files that are no longer behind the address."""
        with writable(self.path), alone(self.path / "fetching"):  # others may be downloading here
            for file in files_below(self.data):
                if (name := file.relative_to(self.data).as_posix()) not in self.names:
                    for gone in (self._version(name), self._marks(name), file):
                        gone.unlink(missing_ok=True)

    def _version(self, name: str) -> Path:
        return self.path / "versions" / name

    def _state(self, file: Found) -> Literal["missing", "holes", "whole"]:
        """What there is of this version of the file."""
        copy = self.data / file.name
        with suppress(OSError):
            told = self._version(file.name).read_text()
            same = told.removesuffix(ranges.IN_PARTS) == file.version != ""
            if same and copy.is_file() and file.size in (None, copy.stat().st_size):
                if told == file.version:
                    return "whole"
                if self._marks(file.name).is_file():
                    return "holes"
        return "missing"

    def _download(self, store: Store, file: Found, come: Bytes) -> None:
        target = self.data / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._version(file.name).unlink(missing_ok=True)
        copies.pop(target, None)
        with whole_file(target) as out:
            store.download(file, out, come.add)
            if target.is_file() and filecmp.cmp(out.name, target, shallow=False):
                os.utime(out.name, ns=(time.time_ns(), target.stat().st_mtime_ns))  # not changed
        self._marks(file.name).unlink(missing_ok=True)
        self._note_version(file)

    def _note_version(self, file: Found, suffix: str = "") -> None:
        version = self._version(file.name)
        version.parent.mkdir(parents=True, exist_ok=True)
        write_text(version, file.version + suffix, force=True)


def _listed(files: Sequence[Found]) -> str:
    return files[0].name if len(files) == 1 else f"{len(files):,} files"
