"""The table of embedding formats, and how the format of a file is recognised.

A module is imported when a file of its kind is read. It has one of these functions:

    catalogue(path)          named arrays: a dict of `named_arrays.Entry`
    table(path, wanted)      columns: a `columns.Table`
    read(path, key, wanted)  anything else: Embeddings, or an array if wanted is "labels"

One that rests on a library in C++ also has `trial(path, key, wanted)`, which a child process calls
before the file is opened here. One whose files are read in parts calls `ensure` of `formats.arrays`
first.
"""

from __future__ import annotations

import shlex
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from retrieval.errors import DmlError, remedy

Wanted = Literal["all", "vectors", "labels"]
"""What is read of a file: vectors and labels, or only one of them; paths come with vectors."""


@dataclass(frozen=True)
class Format:
    name: str
    summary: str
    suffixes: tuple[str, ...]
    magic: Mapping[bytes, str] = field(default_factory=dict)
    """How such files begin -> the suffix that this proves; "" if other files begin so too."""
    module: str = ""
    """The module of this package that reads it, if that has another name."""
    offsets: tuple[int, ...] = (0,)
    """Where the magic bytes may stand in a file whose suffix says nothing."""
    labels_only: bool = False
    needs: str = ""
    """A library that a plain install lacks,"""
    extra: str = ""
    """and the extra of pyproject.toml that installs it."""
    marks: tuple[str, ...] = ()
    """Of a format whose files are folders: names of which one is in such a folder."""
    in_parts: tuple[str, ...] = ()
    """Suffixes of files of which, behind an address, only what is read is downloaded."""

    def load(self) -> Any:
        """Import the module."""
        return import_module(f"retrieval.formats.{self.module or self.name}")

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
        return module.read(path, key, wanted)


FORMATS = [
    Format(
        "hdf5",
        "embedding files of dmltool, ann-benchmarks files, other vectors with labels",
        (".h5", ".hdf5", ".he5"),
        {b"\x89HDF\r\n\x1a\n": ".h5"},
        module="hdf5.reading",
        offsets=(0, 512, 1024, 2048),
        in_parts=(".h5", ".hdf5", ".he5"),
    ),
    Format("npy", "one NumPy array; labels in a separate file", (".npy",), {b"\x93NUMPY": ".npy"}),
    Format("npz", "named NumPy arrays, compressed or not", (".npz",), {b"PK": ""}),
    Format(
        "csv",
        "one column per dimension, or one column of [lists]; header optional",
        (".csv", ".tsv"),
    ),
    Format(
        "arrow",
        "Parquet and Arrow tables: one list column, or one column per dimension",
        (".parquet", ".pq", ".arrow", ".feather"),
        {b"PAR1": ".parquet", b"ARROW1": ".arrow"},
        needs="pyarrow",
        extra="readers",
        in_parts=(".parquet", ".pq"),
    ),
    Format(
        "jsonl",
        "one JSON object per line, with a list of numbers and a label",
        (".jsonl", ".ndjson"),
    ),
    Format(
        "torch",
        "tensors and NumPy arrays from torch.save, alone or in dicts; no code in them is run",
        (".pt", ".pth"),
        module="torch_files",
        needs="torch",
        extra="cpu",
    ),
    Format("safetensors", "named tensors", (".safetensors",), in_parts=(".safetensors",)),
    Format("vecs", "TEXMEX vectors; labels in a separate file", (".fvecs", ".bvecs")),
    Format(
        "faiss",
        "flat FAISS index, with or without ids; labels in a separate file",
        (".faiss", ".index"),
        {b"IxF": "", b"IxM": ""},
        module="faiss_flat",
    ),
    Format(
        "gzip",
        "`.npy.gz`, `.csv.gz`, `.tsv.gz`, `.jsonl.gz`, and labels in `.txt.gz`",
        (".gz",),
        {b"\x1f\x8b\x08": ".gz"},
        module="compressed",
        offsets=(),  # the name says what is inside: without one, it is not read
    ),
    Format(
        "zstd",
        "`.npy.zst`, `.csv.zst`, `.tsv.zst`, `.jsonl.zst`, and labels in `.txt.zst`",
        (".zst",),
        {b"\x28\xb5\x2f\xfd": ".zst"},
        module="compressed",
        offsets=(),
        needs="pyarrow",
        extra="readers",
    ),
    Format(
        "zarr",
        "Zarr stores (folders), version 2 and 3: one array, or a group of named arrays",
        (".zarr",),
        module="zarr_store",
        needs="zarr",
        extra="stores",
        marks=(".zarray", ".zgroup", "zarr.json"),
    ),
    Format(
        "lance",
        "Lance tables (folders): one list column, or one column per dimension",
        (".lance",),
        module="lance_table",
        needs="lance",
        extra="stores",
        marks=("_versions",),
    ),
    Format("ivecs", "TEXMEX integers", (".ivecs",), module="vecs", labels_only=True),
    Format("text", "one label per line", (".txt",), labels_only=True),
    Format("json", "a list of labels", (".json",), module="text", labels_only=True),
]
COMPRESSED = (".gz", ".zst")
BINARY = ("vecs", "ivecs", "safetensors")  # these begin with a number, which may be any
STAND_INS = (b"version https://git-lfs", b"<!doctype html", b"<html")
"""How files begin that have the name of another one, but were never downloaded."""


def find_format(path: Path) -> Format:
    """By suffix, else by the first bytes; raises for what is not a readable file."""
    if store := store_format(path):
        return store
    start = _first_bytes(path)
    suffix = path.suffix.lower()
    format = next((format for format in FORMATS if suffix in format.suffixes), None)
    if format and not start.lstrip().lower().startswith(STAND_INS):
        _refuse_other_format(path, format, start)
        return format
    from retrieval.formats import refused

    if error := refused.explain(path):
        raise error
    if found := sniff(path):
        return found
    raise refused.unknown(path, [suffix for format in FORMATS for suffix in format.suffixes])


def store_format(path: Path) -> Format | None:
    """The format of a folder that is read as one file."""
    if path.is_dir():
        for format in FORMATS:
            if any((path / mark).exists() for mark in format.marks):
                return format
    return None


def _first_bytes(path: Path) -> bytes:
    """How a file begins; raises for whatever is not a regular file with something in it."""
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
    for mark, suffix in {m: s for other in FORMATS for m, s in other.magic.items()}.items():
        other = suffix and suffix not in format.suffixes
        if other and start.startswith(mark) and format.name not in BINARY:
            new = path.with_name(path.name + suffix if suffix in COMPRESSED else path.stem + suffix)
            raise DmlError(
                f"{path} is a {suffix} file, not a {path.suffix} file.",
                "Its first bytes are not those that its suffix promises.",
                f"Rename it: mv {shlex.quote(str(path))} {shlex.quote(str(new))}",
            )


def sniff(path: Path) -> Format | None:
    """Return the format whose first bytes the file has."""
    start = _first_bytes(path)
    found = {
        format.name: format
        for format in FORMATS
        if any(start[at:].startswith(tuple(format.magic)) for at in format.offsets)
    }
    if list(found) == ["npz"] and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/data.pkl") for name in archive.namelist()):
                return next(format for format in FORMATS if format.name == "torch")
    return next(iter(found.values()), None)
