"""Keep copies of files behind addresses, and fetch what is missing or has changed.

Each address has an entry: a folder with `data`, the files under their own names, `versions`, which
tells for each file what the server said of it when it was fetched, and `marks`, which tells for a
file with holes what has been fetched of it.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

from retrieval.errors import DmlError
from retrieval.files import is_at, remove_leftovers, waited_lock, whole_file, write_text
from retrieval.formats.arrays import Range, copies, files_in
from retrieval.remote import ranges
from retrieval.remote.address import without_secrets
from retrieval.remote.cache_limit import Bytes, folder, hold, room_for, writable
from retrieval.remote.ranges import Copy
from retrieval.remote.store import Found, NoRanges, Store
from retrieval.resources import StageProgress, run_all, stage

DOWNLOADS = 4  # at a time

Part = tuple[Found, Copy, Sequence[Range]]
"""A file, its copy with holes, and what is wanted of it."""

OTHER_PROGRAM = re.compile(r": (?!dmltool )[a-z][a-z0-9-]* ")
"""A command in a fix, as in `Rename it: mv x.npy x.h5`, that takes no addresses."""

_shown: dict[str, str] = {}  # folders of this cache -> the addresses that they are copies of
_guard = threading.Lock()


def shown(text: str) -> str:
    """A message with the addresses, without their secrets, in place of the copies."""
    for local, address in list(_shown.items()):
        text = text.replace(local, address)
    return without_secrets(text)


def shown_fix(text: str) -> str:
    """What to do about an error. Commands of other programs run on a file that is downloaded."""
    if OTHER_PROGRAM.search(text):
        for local in list(_shown):
            text, copies = re.subn(rf"{re.escape(local)}[/\\](?:[^\s'\"]*[/\\])?", "", text)
            text = f"Download the file first. {text}" if copies else text
    return shown(text)


class Entry:
    """The copies of the files behind one address."""

    def __init__(
        self,
        store: Store,
        root: str,
        parts: Collection[str] = (),
        progress: StageProgress | None = None,
    ) -> None:
        """root: the address of the folder that the names of files are below.

        parts: suffixes of files of which readers request only the parts that they need. Large ones
        get a copy with holes.
        """
        self.store, self.parts, self.progress = store, parts, progress
        self.address = store.address
        self.path = folder() / hashlib.sha256(self.address.url.encode()).hexdigest()[:24]
        self.data = self.path / "data"
        self.names: set[str] = set()  # behind the address: others are forgotten
        hold(self.path)
        with writable(self.path):
            self.data.mkdir(exist_ok=True)
        with _guard:
            _shown[str(self.data)] = root.rstrip("/")

    def fetch(self, files: Sequence[Found]) -> None:
        """Bring the copies of these files up to date."""
        self.names |= {file.name for file in files}
        self._refuse_clash()
        with self._alone():
            remove_leftovers(self.data)
            whole: list[Found] = []
            in_parts: list[Part] = []
            for file in files:
                state, readable = self._state(file), Path(file.name).suffix.lower() in self.parts
                if state == "missing":
                    self._clear_way(file.name)
                    if readable and ranges.suits(file.size, file.version):
                        in_parts.append((file, self._begin(file), ranges.ends(file.size)))
                    else:
                        whole.append(file)
                elif state == "holes":
                    copy = self._copy(file)
                    in_parts += [] if readable else [(file, copy, [(0, copy.size)])]
            whole += self._fill(in_parts)
            if whole:
                total = sum(file.size or 0 for file in whole)
                tasks = [partial(self._download_file, file) for file in whole]
                self._transfer("", whole, total, tasks)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with (
            writable(self.path),
            waited_lock(self.path / "fetching"),
        ):  # others may be downloading here
            yield

    def _refuse_clash(self) -> None:
        """Raise for files `a` and `a/b`: an object store can hold both, a disk cannot."""
        folders = {parent.as_posix() for name in self.names for parent in Path(name).parents}
        if clash := sorted(self.names & folders):
            raise DmlError(
                f"{self.address.shown} has a file {clash[0]} and files below {clash[0]}/.",
                "On a disk, where copies are kept, a name is a file or a folder.",
                "Choose one of them by a pattern.",
            )

    def _clear_way(self, name: str) -> None:
        """Remove a file in the place of a folder of this file, or a folder in its own place."""
        for root in (self.data, self.path / "versions", self.path / "marks"):
            path = root / name
            for parent in path.relative_to(root).parents:
                if (root / parent).is_file():
                    (root / parent).unlink()
            if path.is_dir():
                shutil.rmtree(path)

    def _transfer(
        self, what: str, files: Sequence[Found], total: int, tasks: Sequence[Callable]
    ) -> None:
        """Run downloads, which are told where to count their bytes, several at a time."""
        names = files[0].name if len(files) == 1 else f"{len(files):,} files"
        report = stage(self.progress, f"downloading {what}{names}")
        with room_for(self.path, self.address.shown, total, report) as come:
            # In order, so that Ctrl-C leaves the first ones complete.
            run_all(lambda task: task(come), tasks, DOWNLOADS, stop=come.stop)

    def _download_file(self, file: Found, come: Bytes) -> None:
        target = self.data / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._version(file.name).unlink(missing_ok=True)
        copies.pop(target, None)
        with whole_file(target) as out:
            self.store.download(file, out, come.add)
            if target.is_file() and filecmp.cmp(out.name, target, shallow=False):
                os.utime(out.name, ns=(time.time_ns(), target.stat().st_mtime_ns))  # not changed
        self._marks(file.name).unlink(missing_ok=True)
        self._note_version(file)

    # Copies with holes

    def _begin(self, file: Found) -> Copy:
        """Create a copy in which all parts are missing."""
        assert file.size is not None
        self._version(file.name).unlink(missing_ok=True)
        blocks = -(-file.size // ranges.BLOCK)
        for path, size in ((self.data / file.name, file.size), (self._marks(file.name), blocks)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as out:
                out.truncate(size)
        return self._copy(file)

    def _copy(self, file: Found) -> Copy:
        target = self.data / file.name
        known = copies.get(target)
        if known and is_at(known.file, target):
            return known

        def download(copy: Copy, wanted: Sequence[Range]) -> None:
            self.progress = copy.progress
            with self._alone():
                if self._fill([(file, copy, wanted)]):
                    copy.version.unlink(missing_ok=True)
                    raise DmlError(
                        f"The server of {copy.path} no longer sends parts of files.",
                        "Some parts are in the cache, and others are needed now.",
                        "Run the command again: it then downloads the whole file.",
                    )

        copy = Copy(target, self._marks(file.name), self._version(file.name), download)
        copy.progress = self.progress
        copies[target] = copy
        return copy

    def _fill(self, parts: Sequence[Part]) -> list[Found]:
        """Download what is missing of files; it counts once their versions are confirmed.

        Returns the files that the server sends only whole.
        """
        pieces = {file: copy.missing(wanted) for file, copy, wanted in parts}
        refused: set[Found] = set()

        def fill(file: Found, copy: Copy, start: int, stop: int, come: Bytes) -> None:
            come.add(0)
            try:
                copy.write(start, self.store.read(file, start, stop))
                come.add(stop - start)
            except NoRanges:
                refused.add(file)

        def confirm(file: Found, copy: Copy) -> None:
            if file in refused:
                copies.pop(copy.path, None)
                return
            self.store.check_unchanged(file)
            copy.mark(pieces[file])
            if self._state(file) == "missing":
                self._note_version(file, ranges.IN_PARTS)

        tasks = [
            partial(fill, file, copy, *piece) for file, copy, _ in parts for piece in pieces[file]
        ]
        if tasks:
            total = sum(stop - start for several in pieces.values() for start, stop in several)
            files = [file for file in pieces if pieces[file]]
            self._transfer("parts of ", files, total, tasks)
            run_all(lambda part: confirm(*part[:2]), parts, DOWNLOADS)
        for file, copy, _ in parts:
            if file not in refused and copy.marks.all() and self._state(file) == "holes":
                self._note_version(file)
                self._marks(file.name).unlink(missing_ok=True)
        return list(refused)

    # What there is

    def forget_others(self) -> None:
        """Remove copies of files that are no longer behind the address."""
        with self._alone():
            for file in files_in(self.data):
                if (name := file.relative_to(self.data).as_posix()) not in self.names:
                    for gone in (self._version(name), self._marks(name), file):
                        gone.unlink(missing_ok=True)

    def _version(self, name: str) -> Path:
        return self.path / "versions" / name

    def _marks(self, name: str) -> Path:
        return self.path / "marks" / name

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

    def _note_version(self, file: Found, suffix: str = "") -> None:
        version = self._version(file.name)
        version.parent.mkdir(parents=True, exist_ok=True)
        write_text(version, file.version + suffix, force=True)
