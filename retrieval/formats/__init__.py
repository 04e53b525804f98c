"""The table of embedding formats, and how the format of a file is recognised.

A module is imported when a file of its kind is read. It has one of these functions:

    catalogue(path)          named arrays: a dict of `named_arrays.Entry`
    table(path, wanted)      columns: a `columns.Table`
    read(path, key, wanted)  anything else: Embeddings, or an array if wanted is "labels"; that of a
                             compressed file is also given the format of the file inside

One that rests on a library in C++ also has `trial(path, key, wanted)`, which a child process calls
before the file is opened here. One whose files are read in parts calls `ensure` of `formats.arrays`
first.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from retrieval.embeddings import Wanted
from retrieval.errors import DmlError, remedy
from retrieval.registry import Entry, Registry


@dataclass(frozen=True)
class Format(Entry):
    """A format of files, and the dotted path of the module that reads them."""

    suffixes: tuple[str, ...]
    magic: Mapping[bytes, str] = field(default_factory=dict)
    """How such files begin -> the suffix that this proves; "" if other files begin so too."""
    offsets: tuple[int, ...] = (0,)
    """Where the magic bytes may stand in a file whose suffix says nothing."""
    member: str = ""
    """How the name of a file ends that tells such zip archives from others."""
    any_start: bool = False
    """Files begin with a number, which may be the magic bytes of another format."""
    compressed: bool = False
    """Files hold a file of another format, whose name is theirs without the suffix."""
    labels_only: bool = False
    needs: str = ""
    """A library that a plain install lacks,"""
    extra: str = ""
    """and the extra of pyproject.toml that installs it."""
    marks: tuple[str, ...] = ()
    """Of a format whose files are folders: names of which one is in such a folder."""
    in_parts: tuple[str, ...] = ()
    """Suffixes of files of which, behind an address, only what is read is downloaded."""

    def trial(self, path: Path, key: str | None, wanted: Wanted) -> Callable[[], object] | None:
        """What to try in a child process before the file is read, for some formats."""
        module = self.load()
        if not hasattr(module, "trial"):
            return None
        if self.needs:
            import_module(self.needs)  # that it is missing is said by this process
        return partial(module.trial, path, key, wanted)

    def read(self, path: Path, key: str | None, wanted: Wanted) -> Any:
        """Read `Embeddings`, or labels alone; `key` is what follows the name after `::`."""
        module = self.load()
        if hasattr(module, "catalogue"):
            from retrieval.formats.named_arrays import Catalogue

            return Catalogue(module.catalogue(path), path).read(key, wanted, self.name)
        if hasattr(module, "table"):
            from retrieval.formats import columns

            table = module.table(path, wanted)
            return columns.read(table, key, path, wanted, self.name)
        if self.compressed:
            return module.read(path, key, wanted, of_suffix(Path(path.stem).suffix))
        return module.read(path, key, wanted)


FORMATS = Registry(
    "format",
    Format(
        "hdf5",
        "retrieval.formats.hdf5.reading",
        "embedding files of dmltool, ann-benchmarks files, other vectors with labels",
        (".h5", ".hdf5", ".he5"),
        {b"\x89HDF\r\n\x1a\n": ".h5"},
        offsets=(0, 512, 1024, 2048),
        in_parts=(".h5", ".hdf5", ".he5"),
    ),
    Format(
        "npy",
        "retrieval.formats.npy",
        "one NumPy array; labels in a separate file",
        (".npy",),
        {b"\x93NUMPY": ".npy"},
    ),
    Format(
        "npz",
        "retrieval.formats.npz",
        "named NumPy arrays, compressed or not",
        (".npz",),
        {b"PK": ""},
    ),
    Format(
        "csv",
        "retrieval.formats.csv",
        "one column per dimension, or one column of [lists]; header optional",
        (".csv", ".tsv"),
    ),
    Format(
        "arrow",
        "retrieval.formats.arrow",
        "Parquet and Arrow tables: one list column, or one column per dimension",
        (".parquet", ".pq", ".arrow", ".feather"),
        {b"PAR1": ".parquet", b"ARROW1": ".arrow"},
        needs="pyarrow",
        extra="readers",
        in_parts=(".parquet", ".pq"),
    ),
    Format(
        "jsonl",
        "retrieval.formats.jsonl",
        "one JSON object per line, with a list of numbers and a label",
        (".jsonl", ".ndjson"),
    ),
    Format(
        "torch",
        "retrieval.formats.torch_files",
        "tensors and NumPy arrays from torch.save, alone or in dicts; no code in them is run",
        (".pt", ".pth"),
        {b"PK": ""},
        member="/data.pkl",
        needs="torch",
        extra="cpu",
    ),
    Format(
        "safetensors",
        "retrieval.formats.safetensors",
        "named tensors",
        (".safetensors",),
        in_parts=(".safetensors",),
        any_start=True,
    ),
    Format(
        "vecs",
        "retrieval.formats.vecs",
        "TEXMEX vectors; labels in a separate file",
        (".fvecs", ".bvecs"),
        any_start=True,
    ),
    Format(
        "faiss",
        "retrieval.formats.faiss_flat",
        "flat FAISS index, with or without ids; labels in a separate file",
        (".faiss", ".index"),
        {b"IxF": "", b"IxM": ""},
    ),
    Format(
        "gzip",
        "retrieval.formats.compressed",
        "`.npy.gz`, `.csv.gz`, `.tsv.gz`, `.jsonl.gz`, and labels in `.txt.gz`",
        (".gz",),
        {b"\x1f\x8b\x08": ".gz"},
        compressed=True,
        offsets=(),  # the name says what is inside: without one, it is not read
    ),
    Format(
        "zstd",
        "retrieval.formats.compressed",
        "`.npy.zst`, `.csv.zst`, `.tsv.zst`, `.jsonl.zst`, and labels in `.txt.zst`",
        (".zst",),
        {b"\x28\xb5\x2f\xfd": ".zst"},
        compressed=True,
        offsets=(),
        needs="pyarrow",
        extra="readers",
    ),
    Format(
        "zarr",
        "retrieval.formats.zarr_store",
        "Zarr stores (folders), version 2 and 3: one array, or a group of named arrays",
        (".zarr",),
        needs="zarr",
        extra="stores",
        marks=(".zarray", ".zgroup", "zarr.json"),
    ),
    Format(
        "lance",
        "retrieval.formats.lance_table",
        "Lance tables (folders): one list column, or one column per dimension",
        (".lance",),
        needs="lance",
        extra="stores",
        marks=("_versions",),
    ),
    Format(
        "ivecs",
        "retrieval.formats.vecs",
        "TEXMEX integers",
        (".ivecs",),
        labels_only=True,
        any_start=True,
    ),
    Format("text", "retrieval.formats.text", "one label per line", (".txt",), labels_only=True),
    Format("json", "retrieval.formats.text", "a list of labels", (".json",), labels_only=True),
)
STAND_INS = (b"version https://git-lfs", b"<!doctype html", b"<html")
"""How files begin that have the name of another one, but were never downloaded."""


def find_format(path: Path) -> Format:
    """Find the format by the suffix, else by the first bytes; raise if the file is not readable."""
    if store := store_format(path):
        return store
    start = _first_bytes(path)
    format = of_suffix(path.suffix)
    if format and not start.lstrip().lower().startswith(STAND_INS):
        _refuse_other_format(path, format, start)
        return format
    from retrieval.formats import refused

    if error := refused.explain(path):
        raise error
    if found := sniff(path):
        return found
    raise refused.unknown(path, [suffix for format in FORMATS for suffix in format.suffixes])


def of_suffix(suffix: str) -> Format | None:
    """The format of files with this suffix; None for an unknown suffix."""
    return next((format for format in FORMATS if suffix.lower() in format.suffixes), None)


def is_compressed(name: str) -> bool:
    """Whether a name is that of a compressed file, such as x.npy.gz."""
    format = of_suffix(Path(name).suffix)
    return format is not None and format.compressed


def main_suffixes() -> str:
    """.h5, .npy, ... or .lance: the first suffix of each format that holds embeddings."""
    *first, last = (
        format.suffixes[0] for format in FORMATS if not (format.labels_only or format.compressed)
    )
    return f"{', '.join(first)} or {last}"


def store_format(path: Path) -> Format | None:
    """The format of a folder that is read as one file."""
    if path.is_dir():
        for format in FORMATS:
            if any((path / mark).exists() for mark in format.marks):
                return format
    return None


def _first_bytes(path: Path) -> bytes:
    """The first bytes of a file; raise unless it is a regular file that is not empty."""
    try:
        if path.is_file() and path.suffix != ".partial":
            with path.open("rb") as file:
                if start := file.read(2056):
                    return start
        from retrieval.formats import refused

        raise refused.unreadable(path)
    except OSError as why:
        raise DmlError(f"{path} cannot be opened.", f"{why}.", remedy(why)) from why
    except ValueError as why:  # a zero character
        raise DmlError(f"{path} cannot be opened.", f"{why}.", "Give another path.") from why


def _refuse_other_format(path: Path, format: Format, start: bytes) -> None:
    """Raise for a file whose first bytes are those of another format than its suffix says."""
    if format.any_start:
        return
    for other in FORMATS:
        for mark, suffix in other.magic.items():
            if not suffix or suffix in format.suffixes or not start.startswith(mark):
                continue
            name = path.name if other.compressed else path.stem
            new = path.with_name(name.removesuffix(suffix) + suffix)  # x.npy of x.npy.gz
            raise DmlError(
                f"{path} is a {suffix} file, not a {path.suffix} file.",
                "Its first bytes are not those that its suffix promises.",
                f"Rename it: mv {shlex.quote(str(path))} {shlex.quote(str(new))}",
            )


def sniff(path: Path) -> Format | None:
    """Return the format whose first bytes the file has."""
    start = _first_bytes(path)
    found = [
        format
        for format in FORMATS
        if any(start[at:].startswith(tuple(format.magic)) for at in format.offsets)
        and (not format.member or _has_member(path, format.member))
    ]
    return max(found, key=lambda format: bool(format.member), default=None)


def _has_member(path: Path, ending: str) -> bool:
    """Whether a file is a zip archive with a member whose name has this ending."""
    import zipfile  # the help of commands reads the table, and should come at once

    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith(ending) for name in archive.namelist())
