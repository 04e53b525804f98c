"""Keep copies of files behind addresses in a folder of bounded size.

Each address has an entry: a folder with `data`, the files under their own names, and `versions`,
which tells for each file what the server said of it when it was fetched. A process that uses an
entry holds a lock on it; entries that nobody holds are removed, the least recently used first, when
room is wanted.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from retrieval.errors import DmlError
from retrieval.files import is_at, lock, remove_leftovers, whole_file, write_text
from retrieval.remote.address import Address, without_secrets
from retrieval.remote.store import Found, Store
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

    def fetch(self, store: Store, files: Sequence[Found]) -> None:
        """Bring the copies of these files up to date."""
        self.names |= {file.name for file in files}
        with _room(self.path), _alone(self.path / "fetching"):
            remove_leftovers(self.data)
            missing = [file for file in files if not self._is_current(file)]
            if not missing:
                return
            self._make_room(sum(file.size or 0 for file in missing))
            count = f"{len(missing):,} files"
            what = f"downloading {missing[0].name if len(missing) == 1 else count}"
            total = sum(file.size or 0 for file in missing)
            bytes_come = _Bytes(stage(self.progress, what), total, limit())
            try:
                # Tasks in order, so that Ctrl-C leaves the first ones complete.
                run_all(
                    [(partial(self._download, store, file, bytes_come), 1) for file in missing],
                    DOWNLOADS,
                    stop=bytes_come.stop,
                )
            finally:
                self.expected.unlink(missing_ok=True)

    def forget_others(self) -> None:
        """Remove copies of files that are no longer behind the address."""
        with _room(self.path), _alone(self.path / "fetching"):  # others may be downloading here
            for file in _files(self.data):
                if file.relative_to(self.data).as_posix() not in self.names:
                    self._version(file.relative_to(self.data).as_posix()).unlink(missing_ok=True)
                    file.unlink(missing_ok=True)

    def _version(self, name: str) -> Path:
        return self.path / "versions" / name

    def _is_current(self, file: Found) -> bool:
        copy = self.data / file.name
        if not file.version or not copy.is_file():
            return False
        with suppress(OSError):
            same = self._version(file.name).read_text() == file.version
            return same and file.size in (None, copy.stat().st_size)
        return False

    def _download(self, store: Store, file: Found, bytes_come: _Bytes) -> None:
        target, version = self.data / file.name, self._version(file.name)
        for path in (target, version):
            path.parent.mkdir(parents=True, exist_ok=True)
        version.unlink(missing_ok=True)
        with whole_file(target) as out:
            store.download(file, out, bytes_come.add)
            if target.is_file() and filecmp.cmp(out.name, target, shallow=False):
                os.utime(out.name, ns=(time.time_ns(), target.stat().st_mtime_ns))  # not changed
        write_text(version, file.version, force=True)

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


def _remove(path: Path) -> bool:
    """Remove an entry unless a process holds it, or that cannot be told."""
    with suppress(OSError), (path / "used").open("ab") as file:
        if lock(file):
            (path / "used").unlink()  # first: whoever waits for the lock makes a new entry
            shutil.rmtree(path)
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
            sizes += file.stat().st_size
    return sizes


def _last_use(path: Path) -> float:
    with suppress(OSError):
        return (path / "used").stat().st_mtime
    return 0.0
