"""Keep the cache within its size limit: remove the least recently used entries.

A process that uses an entry holds a lock on it. Entries that nobody holds are removed when room is
wanted, for which the sizes of all files are added up.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from retrieval.errors import DmlError
from retrieval.files import cache_folder, is_at, lock, release, waited_lock, write_text
from retrieval.number_format import parse_size, size
from retrieval.resources import Progress

FOLDER, SIZE = "DMLTOOL_CACHE", "DMLTOOL_CACHE_SIZE"  # environment variables
DEFAULT_SIZE = "20GB"
EXPECTED = "size"  # a file with the bytes that an entry will take, while it is fetched
LOCK = "room"  # the file that a process locks while it makes room

_held: dict[Path, int] = {}  # entries that this process uses, with the descriptors it locked
_guard = threading.Lock()


def folder() -> Path:
    """Where copies are kept."""
    given = os.environ.get(FOLDER)
    return Path(given or cache_folder() / "remote").expanduser().absolute()


def limit() -> int:
    """Bytes that all copies may take together."""
    given = os.environ.get(SIZE) or DEFAULT_SIZE
    try:
        return parse_size(given)
    except ValueError as error:
        raise DmlError(
            f"The environment variable {SIZE} is wrong.",
            f"{error}",
            f"Set it to a size: {SIZE}={DEFAULT_SIZE}",
        ) from error


@contextmanager
def room_for(path: Path, name: str, total: int, progress: Progress | None) -> Iterator[Bytes]:
    """Make room in an entry for what is downloaded inside the block, and add it up.

    path: the folder of the entry; name: what it holds, for messages. Only one process at a time
    may download to an entry.
    """
    _make_room(path, name, total)
    try:
        yield Bytes(progress, total, limit())
    finally:
        (path / EXPECTED).unlink(missing_ok=True)


def _make_room(entry: Path, name: str, wanted: int) -> None:
    """Remove the least recently used entries that no process holds, until `wanted` fits."""
    most = limit()
    with waited_lock(folder() / LOCK):
        own = on_disk(entry)
        others = (path for path in folder().iterdir() if path.is_dir() and path != entry)
        sizes = {path: _size(path) for path in others}
        taken = own + wanted + sum(sizes.values())
        for path in sorted(sizes, key=_last_use):
            if taken > most and _remove(path):
                taken -= sizes[path]
        free = shutil.disk_usage(entry).free
        if taken > most or wanted > free:
            raise _too_large(name, own + wanted, most, taken, free)
        # Counted from now on, so that another process does not give the same room away.
        write_text(entry / EXPECTED, f"{own + wanted}", force=True)


class Bytes:
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
            raise DmlError(
                "The download was stopped.",
                "Another download failed.",
                "Correct the cause of that error.",
            )
        if self.done > max(self.total, self.most):
            raise DmlError(
                "A server sends more bytes than the cache may hold.",
                f"The cache holds {self.most:,}.",
                f"Raise the limit: {SIZE}={self.most // 10**9 * 2 + 1}GB",
            )


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Say what to do where the folder of the cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise DmlError(
            f"The cache {path.parent} cannot be written.",
            f"{error.strerror or error}.",
            f"Choose another folder: {FOLDER}=/folder/on/a/large/disk",
        ) from error


def _too_large(name: str, own: int, most: int, taken: int, free: int) -> DmlError:
    needs = f"{name} needs {size(own)} in the cache {folder()}."
    if taken <= most:
        return DmlError(
            needs,
            f"Its disk has {size(free)} left.",
            f"Make room, or choose another folder: {FOLDER}=/folder/on/a/large/disk",
        )
    others = f", and {size(taken - own)} are in use" if taken - own > most / 100 else ""
    return DmlError(
        needs,
        f"The limit is {size(most)}{others}.",
        f"Raise the limit: {SIZE}={-(-taken // 10**9) + 1}GB",
    )


def hold(path: Path) -> None:
    """Lock an entry against removal until this process ends."""
    with _guard, writable(path):
        while path not in _held:
            path.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # removed by another process just now
                file = os.open(path / "used", os.O_RDWR | os.O_CREAT, 0o666)
                lock(file, shared=True)
                if is_at(file, path / "used"):
                    _held[path] = file
                else:
                    os.close(file)
        os.utime(path / "used")


def _remove(path: Path) -> bool:
    """Remove an entry that no process holds; keep it if that cannot be found out."""
    with suppress(OSError), (path / "used").open("ab") as file:
        if lock(file) or release(file):  # Windows renames no folder that somebody uses
            gone = path.with_name(f"{path.name}-gone")
            path.rename(gone)  # first: whoever waits for the lock makes a new entry
            shutil.rmtree(gone)
            return True
    return False


def _size(path: Path) -> int:
    """Bytes that an entry takes, or will take once it is fetched."""
    with suppress(OSError, ValueError):
        return max(int((path / EXPECTED).read_text()), on_disk(path))
    return on_disk(path)


def on_disk(path: Path) -> int:
    """Bytes that the files below a folder take; a file with holes takes less than its size."""
    sizes = 0
    for folder, _, names in os.walk(path):  # without a Path for each file: a third of the time
        for name in names:
            with suppress(FileNotFoundError):
                found = os.stat(os.path.join(folder, name))
                blocks = getattr(found, "st_blocks", None)  # Windows does not tell
                sizes += found.st_size if blocks is None else min(found.st_size, 512 * blocks)
    return sizes


def _last_use(path: Path) -> float:
    with suppress(OSError):
        return (path / "used").stat().st_mtime
    return 0.0
