"""Keep copies of files behind addresses in a folder of bounded size.

Each address has an entry: a folder with `data`, the files under their own names, `versions`, which
tells for each file what the server said of it when it was fetched, and `marks`, which tells for a
file with holes what has been fetched of it. A process that uses an entry holds a lock on it;
entries that nobody holds are removed, the least recently used first, when room is wanted.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from retrieval.errors import DmlError
from retrieval.files import is_at, lock, remove_leftovers, whole_file, write_text
from retrieval.remote import ranges
from retrieval.remote.address import Address, without_secrets
from retrieval.remote.store import Found, NoRanges, Store
from retrieval.resources import Progress, StageProgress, run_all, stage

FOLDER, SIZE = "DMLTOOL_CACHE", "DMLTOOL_CACHE_SIZE"  # environment variables
DEFAULT_SIZE = "20GB"
DOWNLOADS = 4  # at a time
WAIT = 0.2  # seconds between looks at a lock
EXPECTED = "size"  # a file with the bytes that an entry will take, while it is fetched

if sys.platform != "win32":
    import fcntl

_held: dict[Path, int] = {}  # entries that this process uses, with the descriptors it locked
_shown: dict[str, str] = {}  # folders of this cache -> the addresses that they are copies of
_guard = threading.Lock()


def folder() -> Path:
    """Where copies are kept."""
    given = os.environ.get(FOLDER)
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dmltool" / "remote"
    return Path(given or base).expanduser().absolute()


def limit() -> int:
    """Bytes that all copies may take together."""
    import click

    from retrieval.options import Size

    given = os.environ.get(SIZE) or DEFAULT_SIZE
    try:
        return Size().convert(given, None, None)
    except click.BadParameter as error:
        raise DmlError(
            f"The environment variable {SIZE} is wrong.",
            f"{error.message}",
            f"Set it to a size: {SIZE}={DEFAULT_SIZE}",
        ) from error


def shown(text: str) -> str:
    """A message with the addresses, without their secrets, in place of the copies."""
    for local, address in list(_shown.items()):
        text = text.replace(local, address)
    return without_secrets(text)


@contextmanager
def addresses_in_errors() -> Iterator[None]:
    """Inside the block, errors name addresses instead of copies, and no secrets."""
    try:
        yield
    except DmlError as error:
        parts = [shown(part) for part in vars(error).values()]
        if parts == list(vars(error).values()):
            raise
        raise DmlError(*parts) from error


class Entry:
    """The copies of the files behind one address."""

    def __init__(self, address: Address, root: str, progress: StageProgress | None = None) -> None:
        """root: the address of the folder that the names of files are below."""
        self.address, self.progress = address, progress
        self.path = folder() / hashlib.sha256(address.url.encode()).hexdigest()[:24]
        self.data, self.expected = self.path / "data", self.path / EXPECTED
        self.names: set[str] = set()  # fetched, or found to be up to date
        self.hold()
        with _guard:
            _shown[f"{self.data}{os.sep}"] = root.rstrip("/") + "/"
            _shown[str(self.data)] = root.rstrip("/")

    def hold(self) -> None:
        """Lock the entry against removal until this process ends."""
        with _guard, _room(self.path):
            while self.path not in _held:
                self.data.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # removed by another process just now
                    file = os.open(self.path / "used", os.O_RDWR | os.O_CREAT, 0o666)
                    if sys.platform != "win32":
                        with suppress(OSError):  # some network file systems have no locks
                            fcntl.flock(file, fcntl.LOCK_SH)
                    if is_at(file, self.path / "used"):
                        _held[self.path] = file
                    else:
                        os.close(file)
            os.utime(self.path / "used")

    def fetch(
        self, store: Store, files: Sequence[Found], parts: Collection[str] = frozenset()
    ) -> None:
        """Bring the copies of these files up to date.

        parts: suffixes of files of which readers ask for what they need. Large ones get a copy
        with holes.
        """
        self.names |= {file.name for file in files}
        self._refuse_clash()
        with _room(self.path), _alone(self.path / "fetching"):
            remove_leftovers(self.data)
            for file in files:
                self._clear_way(file.name)
            missing = []
            for file in files:
                in_parts = Path(file.name).suffix.lower() in parts
                if not self._is_current(file):
                    fits = in_parts and ranges.suits(file.size, file.version)
                    missing += [] if fits and self._begin(store, file) else [file]
                elif self._has_holes(file):
                    copy = self._copy(store, file)
                    if not in_parts:
                        try:
                            self._fill(store, file, copy, [(0, copy.size)])
                        except NoRanges:
                            missing.append(file)
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
        count = f"{len(files):,} files"
        what = f"downloading {files[0].name if len(files) == 1 else count}"
        total = sum(file.size or 0 for file in files)
        with self._expecting(total, stage(self.progress, what)) as bytes_come:
            # Tasks in order, so that Ctrl-C leaves the first ones complete.
            tasks = [(partial(self._download, store, file, bytes_come), 1) for file in files]
            run_all(tasks, DOWNLOADS, stop=bytes_come.stop)

    @contextmanager
    def _expecting(self, total: int, progress: Progress | None) -> Iterator[_Bytes]:
        """Make room for what is downloaded inside the block, and add it up."""
        self._make_room(total)
        try:
            yield _Bytes(progress, total, limit())
        finally:
            self.expected.unlink(missing_ok=True)

    # Copies with holes

    def _marks(self, name: str) -> Path:
        return self.path / "marks" / name

    def _begin(self, store: Store, file: Found) -> bool:
        """Start a copy that is all holes, and fetch its ends; False if the server cannot."""
        target, marks = self.data / file.name, self._marks(file.name)
        assert file.size is not None
        self._version(file.name).unlink(missing_ok=True)
        for path, size in ((target, file.size), (marks, -(-file.size // ranges.BLOCK))):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as out:
                out.truncate(size)
        copy = self._copy(store, file)
        try:
            self._fill(store, file, copy, [(0, 1), (file.size - ranges.BLOCK, file.size)])
        except NoRanges:
            ranges.forget(target)
            return False
        self._note_version(file, ranges.IN_PARTS)
        return True

    def _copy(self, store: Store, file: Found) -> ranges.Copy:
        target = self.data / file.name
        known = ranges.find(target)
        if known and is_at(known.file, target):
            return known

        def download(copy: ranges.Copy, wanted: list[ranges.Range]) -> None:
            with _room(self.path), _alone(self.path / "fetching"):
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
        ranges.keep(copy)
        return copy

    def _fill(
        self, store: Store, file: Found, copy: ranges.Copy, wanted: Sequence[ranges.Range]
    ) -> None:
        """Download what is missing of these ranges; it counts once the version is confirmed."""
        pieces = copy.missing(wanted)
        total = sum(stop - start for start, stop in pieces)
        report = stage(copy.progress, f"downloading parts of {file.name}")

        def fetch(start: int, stop: int, bytes_come: _Bytes) -> None:
            bytes_come.add(0)
            copy.write(start, store.read(file, start, stop))
            bytes_come.add(stop - start)

        with self._expecting(total, report) as bytes_come:
            tasks = [(partial(fetch, start, stop, bytes_come), 1) for start, stop in pieces]
            run_all(tasks, DOWNLOADS, stop=bytes_come.stop)
            store.check_unchanged(file)
            copy.mark(pieces)
        if copy.marks.all():
            if self._has_holes(file):
                self._note_version(file)
            self._marks(file.name).unlink(missing_ok=True)

    def forget_others(self) -> None:
        """Remove copies of files that are no longer behind the address."""
        with _room(self.path), _alone(self.path / "fetching"):  # others may be downloading here
            for file in _files(self.data):
                if (name := file.relative_to(self.data).as_posix()) not in self.names:
                    for gone in (self._version(name), self._marks(name), file):
                        gone.unlink(missing_ok=True)

    def _version(self, name: str) -> Path:
        return self.path / "versions" / name

    def _is_current(self, file: Found) -> bool:
        copy = self.data / file.name
        if not file.version or not copy.is_file():
            return False
        with suppress(OSError):
            same = self._told(file) == file.version or self._has_holes(file)
            return same and file.size in (None, copy.stat().st_size)
        return False

    def _has_holes(self, file: Found) -> bool:
        """Whether the copy, of this version, is one with holes."""
        return (
            self._told(file) == file.version + ranges.IN_PARTS and self._marks(file.name).is_file()
        )

    def _told(self, file: Found) -> str:
        """The version that was noted when the file was fetched."""
        with suppress(OSError):
            return self._version(file.name).read_text()
        return ""

    def _download(self, store: Store, file: Found, bytes_come: _Bytes) -> None:
        target = self.data / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        self._version(file.name).unlink(missing_ok=True)
        ranges.forget(target)
        with whole_file(target) as out:
            store.download(file, out, bytes_come.add)
            if target.is_file() and filecmp.cmp(out.name, target, shallow=False):
                os.utime(out.name, ns=(time.time_ns(), target.stat().st_mtime_ns))  # not changed
        self._marks(file.name).unlink(missing_ok=True)
        self._note_version(file)

    def _note_version(self, file: Found, suffix: str = "") -> None:
        version = self._version(file.name)
        version.parent.mkdir(parents=True, exist_ok=True)
        write_text(version, file.version + suffix, force=True)

    def _make_room(self, wanted: int) -> None:
        """Remove the least recently used entries that no process holds, until `wanted` fits."""
        most = limit()
        with _alone(folder() / "room"):
            entries = [path for path in folder().iterdir() if path.is_dir() and path != self.path]
            sizes, own = {path: _size(path) for path in entries}, _on_disk(self.path)
            taken = own + wanted + sum(sizes.values())
            for path in sorted(sizes, key=_last_use):
                if taken > most and _remove(path):
                    taken -= sizes[path]
            free = shutil.disk_usage(self.path).free
            if taken > most or wanted > free:
                raise _too_large(self.address, own + wanted, most, taken, free)
            # Counted from now on, so that another process does not give the same room away.
            write_text(self.expected, str(own + wanted), force=True)


class _Bytes:
    """Adds up what several downloads write, and reports it."""

    def __init__(self, progress: Progress | None, total: int, most: int) -> None:
        self.progress, self.total, self.most = progress, total, most
        self.done, self.stopped = 0, False
        self.guard = threading.Lock()

    def stop(self) -> None:
        self.stopped = True

    def add(self, count: int) -> None:
        with self.guard:
            self.done += count
            if self.progress:
                self.progress(self.done, max(self.total, self.done))
        if self.stopped:
            raise DmlError("The download was stopped.", "Another one failed.", "See that error.")
        if self.done > max(self.total, self.most):
            raise DmlError(
                "A server sends more bytes than the cache may hold.",
                f"The cache holds {self.most:,}.",
                f"Raise the limit: {SIZE}=100GB",
            )


@contextmanager
def _room(path: Path) -> Iterator[None]:
    """Say what to do where the folder of the cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise DmlError(
            f"The cache {path.parent} cannot be written.",
            f"{error.strerror or error}.",
            f"Choose another folder: {FOLDER}=/folder/on/a/large/disk",
        ) from error


def _too_large(address: Address, own: int, most: int, taken: int, free: int) -> DmlError:
    needs = f"{address.shown} needs {own / 1e9:.1f} GB in the cache {folder()}."
    if taken <= most:
        return DmlError(
            needs,
            f"Its disk has {free / 1e9:.1f} GB left.",
            f"Make room, or choose another folder: {FOLDER}=/folder/on/a/large/disk",
        )
    others = f", and {(taken - own) / 1e9:.1f} GB are in use" if taken - own > most / 100 else ""
    return DmlError(
        needs,
        f"The limit is {most / 1e9:.1f} GB{others}.",
        f"Raise the limit: {SIZE}={-(-taken // 10**9) + 1}GB",
    )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock of this name, after whoever has it."""
    with path.open("ab") as file:
        while True:
            with suppress(BlockingIOError):
                lock(file)
                break
            time.sleep(WAIT)
        yield


def _remove(path: Path, locks: bool = sys.platform != "win32") -> bool:
    """Remove an entry unless a process holds it, or that cannot be told.

    Without locks, Windows refuses to rename a folder in which a process has a file open.
    """
    with suppress(OSError), (path / "used").open("ab") if locks else nullcontext() as file:
        if file is None or lock(file):
            gone = path.with_name(f"{path.name}-gone")
            path.rename(gone)  # first: whoever waits for the lock makes a new entry
            shutil.rmtree(gone)
            return True
    return False


def _files(path: Path) -> Iterable[Path]:
    return (file for file in path.rglob("*") if file.is_file())


def _size(path: Path) -> int:
    """Bytes that an entry takes, or will take once it is fetched."""
    with suppress(OSError, ValueError):
        return max(int((path / EXPECTED).read_text()), _on_disk(path))
    return _on_disk(path)


def _on_disk(path: Path) -> int:
    sizes = 0
    for file in _files(path):
        with suppress(FileNotFoundError):
            found = file.stat()
            # A file with holes takes less than its size; Windows does not tell.
            blocks = getattr(found, "st_blocks", None)
            sizes += found.st_size if blocks is None else min(found.st_size, 512 * blocks)
    return sizes


def _last_use(path: Path) -> float:
    with suppress(OSError):
        return (path / "used").stat().st_mtime
    return 0.0
