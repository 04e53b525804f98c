"""Read `.npy.gz`, `.csv.zst` and the like: inflate to a temporary file, then read that.

The temporary file is removed as soon as it has been read or mapped.
"""

from __future__ import annotations

import gzip
import os
import shlex
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval.embeddings import Embeddings, Wanted, renamed
from retrieval.errors import DmlError, damaged
from retrieval.files import temporary_folder
from retrieval.formats.arrays import refuse_bomb
from retrieval.formats.refused import labels_only

if TYPE_CHECKING:
    from retrieval.formats import Format

INSIDE = (".npy", ".csv", ".tsv", ".jsonl", ".ndjson", ".txt")
BLOCK = 1 << 20
ROOM_BYTES = 1 << 25  # less than elsewhere: text grows once more when it becomes numbers
UNNAMED = Path("/proc/self/fd")  # of Linux


def read(path: Path, key: str | None, wanted: Wanted, inner: Format | None) -> Any:
    """Inflate a file and read it; inner: the format of the file inside, by its suffix."""
    if inner is None or Path(path.stem).suffix.lower() not in INSIDE:
        raise DmlError(
            f"{path} is compressed by {'zstd' if _is_zstd(path) else 'gzip'}.",
            f"Compressed files that are read: {', '.join(s + path.suffix for s in INSIDE)}.",
            _unpacking(path),
        )
    if inner.labels_only and wanted != "labels":
        raise labels_only(path)
    with inflated(path) as file:
        found = inner.read(file, key, wanted)
    return replace(found, source=path) if isinstance(found, Embeddings) else found


def _is_zstd(path: Path) -> bool:
    return path.suffix.lower() == ".zst"


def _opened(path: Path) -> Any:
    """A stream of the inflated bytes."""
    if not _is_zstd(path):
        return gzip.open(path)
    import pyarrow

    return pyarrow.input_stream(str(path), compression="zstd")


@contextmanager
def inflated(path: Path) -> Iterator[Path]:
    """The content as a file that exists inside the block; messages name the original."""
    with _temporary(path.stem) as target:
        _inflate(path, target)
        with renamed(lambda text: text.replace(str(target), str(path))):
            yield target


@contextmanager
def _temporary(name: str) -> Iterator[Path]:
    """A path to write to and read from; where the system allows, a kill leaves no file behind."""
    parent = temporary_folder()
    if UNNAMED.is_dir() and Path(name).suffix.lower() != ".tsv":  # a suffix that its reader needs
        # It has no name, but an address while it is open.
        with tempfile.TemporaryFile(dir=parent) as file:
            yield UNNAMED / str(file.fileno())
    else:
        with tempfile.TemporaryDirectory(
            prefix="dmltool-", dir=parent, ignore_cleanup_errors=True
        ) as folder:
            yield Path(folder) / name


def _unpacking(path: Path) -> str:
    return f"Unpack it: {'unzstd' if _is_zstd(path) else 'gunzip -k'} {shlex.quote(str(path))}"


def _inflate(path: Path, target: Path) -> None:
    stored, written = os.path.getsize(path), 0
    try:
        with _opened(path) as source, target.open("wb") as out:
            while block := source.read(BLOCK):
                written += len(block)
                refuse_bomb(str(path), stored, written, ROOM_BYTES, _unpacking(path))
                out.write(block)
    except (EOFError, OSError, zlib.error) as error:
        if not isinstance(error, OSError) or error.errno is None:  # the stream is damaged
            raise damaged(f"{path} cannot be inflated.", f"{error}.") from error
        raise DmlError(
            f"{path} cannot be inflated in {tempfile.gettempdir()}.",
            f"{error.strerror or error}.",
            "Set TMPDIR to a folder on a disk with room.",
        ) from error
    if not written:
        raise DmlError(f"{path} is empty.", "It holds no bytes once inflated.", "Write it again.")
