"""Write files whole or not at all; locks, leftovers of killed processes, hashes."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from retrieval.errors import DmlError, remedy

if TYPE_CHECKING:
    from retrieval.resources import StageProgress

if sys.platform != "win32":
    import fcntl


class Kind(NamedTuple):
    """A kind of file that commands write."""

    name: str
    suffixes: tuple[str, ...]
    start: bytes
    """A pattern that the beginning of every such file matches, and of no other kind."""
    printed: str = ""
    """How to print the same, where that can be done."""


PAGE = Kind("a report", (".html", ".htm"), b"<!doctype html>.*content=.dmltool ")
JSON = Kind(
    "a JSON result",
    (".json",),
    rb'{\s*"version": \d+,\s*"(protocol": "(leave-one-out|query-gallery|listed-)|a": ")',
    "Print to it instead: --json > FILE",
)
CSV = Kind("a CSV table of classes", (".csv",), b"label,(name,)?queries,recall@1_")
HEAD = 2048  # bytes that tell the kind of a file


def check_target(
    path: str | Path, kind: Kind, force: bool = False, inputs: Sequence[Path] = ()
) -> Path:
    """Check that a path can be written, before long work, and return it without links.

    Force overwrites files of the same kind only, and never what is read.
    """
    if not str(path):
        raise DmlError(
            "The name of a file to write is empty.",
            "A variable of the shell may not be set.",
            "Give a name, or leave the option out.",
        )
    given, path = Path(path), Path(path).resolve()  # links stay: the file they lead to is replaced
    _check_replaceable(given, kind, inputs)
    _check_kind(given, kind)
    if path.exists() and not force:
        raise exists_already(given)
    _check_folder(given, path.parent)
    return path


def _check_replaceable(given: Path, kind: Kind, inputs: Sequence[Path]) -> None:
    """Raise if there is something that no command replaces."""
    if not given.exists():
        return
    if any(source.exists() and given.samefile(source) for source in inputs):
        raise DmlError(
            f"{given} is both an input and the output.",
            "The result would replace the data it was computed from.",
            "Choose another name for the output.",
        )
    if given.is_dir():
        raise DmlError(f"{given} is a folder.", "The output is a file.", "Name a file.")
    if not given.is_file():
        raise DmlError(
            f"{given} is not a regular file.",
            "It would be replaced by one.",
            kind.printed or f"Name a file that ends in {kind.suffixes[0]}.",
        )


def _check_kind(given: Path, kind: Kind) -> None:
    """Raise if the name, or the file that has it, is of another kind."""
    if given.suffix.lower() not in kind.suffixes:
        raise DmlError(
            f"{given} is not the name of {kind.name}.",
            f"Its name ends in {' or '.join(kind.suffixes)}.",
            f"Change the name: {shlex.quote(str(given.with_suffix(kind.suffixes[0])))}",
        )
    if given.exists() and not _is_a(kind, given):
        raise DmlError(
            f"{given} exists and is not {kind.name}.",
            "A file of another kind is not overwritten, not even with --force.",
            "Choose another name, or remove the file.",
        )


def _check_folder(given: Path, folder: Path) -> None:
    """Raise if no file can be made in the folder of a file."""
    if not folder.is_dir():
        raise DmlError(
            f"{given} cannot be written.",
            f"The folder {folder} does not exist.",
            f"Create it: mkdir -p {shlex.quote(str(folder))}",
        )
    if not os.access(folder, os.W_OK):
        raise DmlError(
            f"{given} cannot be written.",
            f"The folder {folder} is read-only.",
            "Choose another folder.",
        )


def exists_already(path: Path) -> DmlError:
    """The error for a file that would be overwritten."""
    return DmlError(
        f"{path} exists already.", "It would be overwritten.", "Choose another name or --force."
    )


def _is_a(kind: Kind, path: Path) -> bool:
    """Whether a file is of this kind, or empty."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    return not head or re.match(kind.start, head, re.DOTALL) is not None


def write_text(path: Path, text: str, force: bool = False) -> None:
    """Write text as UTF-8; bytes of names that are not UTF-8 are written as escapes."""
    with whole_file(path, force) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


@contextmanager
def whole_file(path: Path, force: bool = True, also: Path | None = None) -> Iterator[BinaryIO]:
    """Write a file under a temporary name, then rename it: a reader never meets half a file.

    At the end the file and its name are on the disk.

    also: a second name for the same file, which it gets first.
    """
    try:
        remove_leftovers(path)
        file, temporary = create_temporary(path)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if also is not None:
                _give_second_name(temporary, also)
            rename_durably(temporary, path, force)  # new: fails if another run has been faster
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DmlError(
            f"{path} cannot be written.", f"{error.strerror or error}.", remedy(error)
        ) from error


def _give_second_name(path: Path, other: Path) -> None:
    """Let `other` be the same file as `path`, or a copy where the file system has no links."""
    link = temporary_name(other)
    try:
        os.link(path, link)
    except OSError:  # no links here
        with path.open("rb") as source, whole_file(other) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        return
    try:
        os.replace(link, other)
    except BaseException:
        os.unlink(link)
        raise


def rename_durably(old: Path, new: Path, force: bool = True) -> None:
    """Rename a file whose content is on the disk, and wait until its new name is there too.

    force: replace a file that has the name; else that is a FileExistsError.
    """
    (os.replace if force else rename_new)(old, new)
    try:
        sync(new.parent)
    except OSError as error:
        raise DmlError(
            f"{new} is written, but a power cut may undo that.",
            f"Its folder cannot be brought to the disk: {error.strerror}.",
            "Check the disk.",
        ) from error


def rename_new(old: Path, new: Path) -> None:
    """Rename without replacing: FileExistsError if the new name is taken."""
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise
        if new.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from None
        os.replace(old, new)
    else:
        os.unlink(old)


# What exFAT and some network file systems answer, which have no links or sync no folders.
_UNABLE = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)


# Locks, which end with their process, tell files in use from those that a killed process left.
# Windows has no such locks, and refuses to rename or remove a file that is open, or a folder in
# which one is. So files are closed there before that, and those of others cannot be removed.


def lock(file: BinaryIO | int, shared: bool = False) -> bool:
    """Lock a file until it is closed; BlockingIOError if another has it, False without locks.

    shared: other processes may have such a lock too; one of the other kind is waited for.
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems have none
        return False
    return True


@contextmanager
def locked_folder(folder: Path, taken: DmlError) -> Iterator[bool]:
    """Hold the lock of a folder, which ends with the process; raise `taken` if another has it.

    Gives False where there are no locks: on Windows, and on some network file systems.
    """
    if sys.platform == "win32":
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            held = lock(descriptor)
        except BlockingIOError:
            raise taken from None
        yield held
    finally:
        os.close(descriptor)


@contextmanager
def waited_lock(path: Path, every: float = 0.2) -> Iterator[None]:
    """Hold the lock of a folder or file, which may be new; wait while another process has it.

    every: seconds between looks at the lock.
    """
    if sys.platform == "win32":
        yield
        return
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    try:
        while True:
            with suppress(BlockingIOError):
                lock(descriptor)
                break
            time.sleep(every)
        yield
    finally:
        os.close(descriptor)


def claim(path: Path) -> BinaryIO:
    """Open and lock the file of this name; BlockingIOError if another process has locked it.

    Between opening and locking it may have been replaced or removed: then the lock would be of a
    file that nobody sees, and it is tried again.
    """
    while True:
        file = path.open("r+b", buffering=0)
        try:
            lock(file)
            if is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def is_at(file: BinaryIO | int, path: Path) -> bool:
    """Whether an open file, or its descriptor, is the one that has this name."""
    descriptor = file if isinstance(file, int) else file.fileno()
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def temporary_name(path: Path) -> Path:
    """A new name beside the path, which `remove_leftovers` knows."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def create_temporary(path: Path, buffering: int = -1) -> tuple[BinaryIO, Path]:
    """A new, locked file beside the path, to be renamed to it, and its name."""
    while True:
        name = temporary_name(path)
        file = name.open("x+b", buffering=buffering)
        if _hold(file, name):
            return file, name


def _hold(file: BinaryIO, name: Path) -> bool:
    """Lock a new file; close it if it was taken for a leftover before that."""
    with suppress(BlockingIOError):
        lock(file)
        if is_at(file, name):
            return True
    file.close()
    return False


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of killed writers of this path, or of all paths in a folder."""
    folder, name = (path, "*") if path.is_dir() else (path.parent, glob.escape(path.name))
    for left in folder.glob(f".{name}.{'[0-9a-f]' * 8}.tmp"):
        remove_unused(left)


def remove_unused(path: Path) -> bool:
    """Remove a file that no living process has locked; keep it if that cannot be found out."""
    with suppress(OSError), claim(path) as file:
        if lock(file) or release(file):
            path.unlink()
            return True
    return False


def release(file: BinaryIO) -> bool:
    """Close a file that is about to be renamed or removed, on Windows; True if it was closed.

    Elsewhere it stays open, and so locked.
    """
    if sys.platform == "win32":
        file.close()
        return True
    return False


def rename_open(file: BinaryIO, old: Path, new: Path, force: bool = False) -> BinaryIO:
    """Rename a file that stays open and locked; FileExistsError unless it may replace another."""
    closed = release(file)
    (os.replace if force else rename_new)(old, new)
    return claim(new) if closed else file


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # folders cannot be opened on Windows
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNABLE or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def nearest_folder(path: Path) -> Path:
    """The nearest folder above a path that exists."""
    return next((folder for folder in path.parents if folder.is_dir()), Path())


def names_in(folder: Path) -> list[str]:
    """What is in a folder, in alphabetical order; nothing if it may be entered but not listed."""
    try:
        return sorted(os.listdir(folder))
    except PermissionError:
        return []


def cache_folder() -> Path:
    """The folder of what dmltool keeps between runs: in XDG_CACHE_HOME, else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dmltool"


def temporary_folder() -> str:
    """The folder for temporary files; raise if there is none, as on a read-only system."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise DmlError(
            "There is no folder for temporary files.",
            f"The system says: {error.strerror}.",
            "Set TMPDIR to a folder on a disk with room.",
        ) from error


def relative(path: Path, folder: Path) -> str | None:
    """The path as seen from a folder; None if it is on another drive of Windows."""
    with suppress(ValueError):
        return os.path.relpath(path, folder)
    return None


def sha256(*paths: Path, progress: StageProgress | None = None) -> str:
    """The SHA-256 of files, one after the other, in hexadecimal digits."""
    digest = hashlib.sha256()
    for path in paths:
        done = 0
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
                done += len(block)
                if progress:
                    progress(f"reading {path.name}", done, path.stat().st_size)
    return digest.hexdigest()


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder; if the block fails and has left nothing in it, remove it again."""
    made = make_folder(folder)
    try:
        yield
    except BaseException:
        remove_empty(made)
        raise


def make_folder(folder: Path) -> list[Path]:
    """Make a folder if it is not there; return it and those above it that were made, it first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        remove_empty(made)
        raise DmlError(
            f"{folder} cannot be made.", f"{error.strerror}.", "Choose another --out."
        ) from error
    return made


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, each of which is in the next one, unless there is something else in one."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder on the disk of `parent`, removed at the end, for files that are renamed later.

    Folders of this prefix that killed processes left are removed first.
    """
    remove_scratch_folders(parent, prefix)
    folder, file = _locked_folder(parent, prefix)
    with file:
        try:
            yield folder
        finally:
            release(file)
            shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, BinaryIO]:
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
        with suppress(FileNotFoundError):  # another process took it for a leftover
            file = (folder / "lock").open("wb")
            if _hold(file, folder / "lock"):
                return folder, file


def remove_scratch_folders(parent: Path, prefix: str) -> None:
    """Remove the scratch folders of this prefix that no living process has locked."""
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):
            left.rmdir()  # killed before it was locked
        if remove_unused(left / "lock"):
            shutil.rmtree(left, ignore_errors=True)
