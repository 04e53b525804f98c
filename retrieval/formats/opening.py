"""Find the reader of a file by its suffix or its first bytes, and call it."""

from __future__ import annotations

import difflib
import os
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from retrieval.embeddings import Embeddings
from retrieval.errors import DmlError, install
from retrieval.formats import FORMATS, Format, truncation
from retrieval.formats.arrays import budget
from retrieval.registry import nearest

T = TypeVar("T")
# What a file begins with: its format, what to call it, and its usual suffix.
SIGNATURES = {
    b"\x89HDF\r\n\x1a\n": ("hdf5", "an HDF5 file", ".h5"),
    b"\x93NUMPY": ("npy", "a NumPy array", ".npy"),
    b"PAR1": ("arrow", "a Parquet file", ".parquet"),
    b"ARROW1": ("arrow", "an Arrow file", ".arrow"),
    b"\x1f\x8b\x08": ("gzip", "compressed by gzip", ".gz"),
}
BINARY = ("vecs", "ivecs", "safetensors")  # these begin with a number, which may be any


def split_key(source: str | Path) -> tuple[Path, str | None]:
    """`file.h5::key` -> (file.h5, key); for a run folder, the embeddings in it."""
    text = str(source)
    if not text.partition("::")[0]:
        raise DmlError(
            "The name of a file is empty.",
            "A variable of the shell may not be set.",
            "Give the name of a file: dmltool eval embeddings.h5",
        )
    if "::" not in text or os.path.exists(text):
        return _in_run(text), None
    name, _, key = text.rpartition("::")
    return _in_run(name), key or None


def _in_run(name: str) -> Path:
    inside = os.path.join(name, "embeddings.h5")
    return Path(inside if os.path.isfile(inside) else name)


class Sources:
    """The input files of a command, as they were when it began; a missing one is an error."""

    def __init__(self, *names: str | None) -> None:
        self.files = [split_key(name)[0] for name in names if name]
        for path in self.files:
            if not path.exists():
                find_format(path)  # raises, before anything else is found wrong
        self.seen = [self._look(path) for path in self.files]

    def check_unchanged(self) -> None:
        for path, before in zip(self.files, self.seen, strict=True):
            if self._look(path) != before:
                raise DmlError(
                    f"{path} was changed while it was read.",
                    "Scores of half-old, half-new data would be wrong.",
                    "Run the command again once the file is complete.",
                )

    @staticmethod
    def _look(path: Path) -> tuple[int, int] | None:
        return (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None


def read(source: str | Path, with_labels: bool = True) -> Embeddings:
    """The `Embeddings` in one file."""
    path, key = split_key(source)
    format = find_format(path)
    if format.labels_only:
        from retrieval.formats.refused import json_records

        raise json_records(path) or DmlError(
            f"{path} is a {format.suffixes[0]} file.",
            f"Such a file holds labels only: {format.summary}.",
            f"Give both: dmltool eval embeddings.npy --labels {shlex.quote(str(path))}",
        )
    return _call(format, path, lambda: format.read(path, key, with_labels))


def read_labels(source: str | Path) -> np.ndarray:
    """The labels in one file."""
    path, key = split_key(source)
    format = find_format(path)
    return _call(format, path, lambda: format.read_labels(path, key))


def _call(format: Format, path: Path, function: Callable[[], T]) -> T:
    # A damaged file may fail anywhere inside a library: whatever it raises, the user is told
    # which file it was. The cause stays attached for --debug.
    try:
        module = format.load()
        truncation.watch(path, path.stat().st_size)
        if hasattr(module, "trial"):
            from retrieval.formats import trial

            trial.attempt(module.trial(path), path, format.name)
        with budget(path):
            return function()
    except (DmlError, MemoryError):
        raise
    except ModuleNotFoundError as error:
        raise DmlError(
            f"{path} needs {error.name}, which is not installed.",
            f"Reading {path.suffix} files is optional.",
            install(format.extra or "cpu"),
        ) from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise DmlError(
            f"{path} cannot be read as {format.name}.",
            f"The reader says: {type(error).__name__}: {lines[0][:300].rstrip('.')}.",
            "Copy or write the file again, or give it the suffix of its format.",
        ) from error


def find_format(path: Path) -> Format:
    """By suffix, else by the first bytes; raises for what is not a readable file."""
    check_file(path)
    by_suffix = {suffix: format for format in FORMATS for suffix in format.suffixes}
    suffix = path.suffix.lower()
    if suffix in by_suffix:
        _check_signature(path, by_suffix[suffix].name)
        return by_suffix[suffix]
    from retrieval.formats.refused import explain

    if error := explain(path):
        raise error
    if name := sniff(path):
        return FORMATS.find(name)
    near = nearest(suffix, by_suffix)
    raise DmlError(
        f"{path} has the suffix {suffix or '(none)'}, and its first bytes are not familiar either.",
        f"These suffixes are read: {' '.join(by_suffix)}.",
        f"Did you mean {near}?" if near else "Convert the file to one of these formats.",
    )


def _check_signature(path: Path, format: str) -> None:
    """Raise for a file whose first bytes are those of another format than its suffix says."""
    with path.open("rb") as file:
        start = file.read(16)
    for mark, (found, kind, suffix) in SIGNATURES.items():
        if start.startswith(mark) and found != format and format not in BINARY:
            new = path.with_name(path.name + ".gz") if found == "gzip" else path.with_suffix(suffix)
            raise DmlError(
                f"{path} is {kind}, not a {path.suffix} file.",
                "Its first bytes are not those that its suffix promises.",
                f"Rename it: mv {shlex.quote(str(path))} {shlex.quote(str(new))}",
            )


def sniff(path: Path) -> str | None:
    """Return the name of the format whose first bytes the file has."""
    with path.open("rb") as file:
        start = file.read(2056)
    found = [
        format.name
        for format in FORMATS
        if any(start[at:].startswith(format.magic) for at in format.offsets)
    ]
    if found == ["npz"] and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        return "torch" if any(name.endswith("/data.pkl") for name in names) else "npz"
    return found[0] if found else None


def check_file(path: Path) -> None:
    """Raise for whatever is not a regular file with something in it that may be read."""
    if path.suffix == ".partial":
        raise DmlError(
            f"{path} is half-written.",
            "Whoever wrote it has not finished; rows may be missing.",
            "Run the command that writes it again; export and embed go on with --resume.",
        )
    try:
        if not path.exists() or path.is_dir():
            from retrieval.formats.refused import explain

            raise explain(path) or _missing(path)
        if not path.is_file():
            raise DmlError(
                f"{path} is not a regular file.",
                "Pipes and devices are not read.",
                "Save the data as a file first.",
            )
        if path.stat().st_size == 0:
            raise DmlError(f"{path} is empty.", "It has no bytes at all.", "Write it again.")
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        raise DmlError(
            f"{path} cannot be opened.", f"{error}.", "Check its permissions."
        ) from error


def _missing(path: Path) -> DmlError:
    if path.with_name(path.name + ".partial").exists():
        return DmlError(
            f"{path} does not exist.",
            f"Only {path.name}.partial is there: its writer has not finished.",
            "Run the command that writes it again; export and embed go on with --resume.",
        )
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, 3)
    return DmlError(
        f"{path} does not exist.",
        "There is no such file."
        if path.parent.is_dir()
        else f"The folder {path.parent} does not exist either.",
        f"Did you mean {' or '.join(near)}?" if near else f"Look there: ls {path.parent}",
    )
