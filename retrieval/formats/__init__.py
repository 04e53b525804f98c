"""The table of embedding formats, and which of them a file has.

A module is imported when a file of its kind is read. One of named arrays has `catalogue(path) ->
dict of Entry`. Others have `read(path, key, with_labels) -> Embeddings` and `read_labels(path, key)
-> array`; one that holds labels only has just the second. One that rests on a library in C++ also
has `trial(path, key, wanted)`, which returns what a child process is to try before the file is
opened here. One whose files are read in parts calls `ensure` of `retrieval.remote.ranges` first.
"""

from __future__ import annotations

import shlex
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from retrieval import registry
from retrieval.errors import DmlError
from retrieval.registry import Registry, nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    import numpy as np

    from retrieval.embeddings import Embeddings


Wanted = Literal["all", "vectors", "labels"]
"""What is read of a file: vectors and labels, or only one of them; paths come with vectors."""


@dataclass(frozen=True)
class Format(registry.Entry):
    """A format: its path is that of the module that reads it."""

    suffixes: tuple[str, ...] = ()
    magic: Mapping[bytes, str] = field(default_factory=dict)
    """How such files begin -> the suffix that this proves; "" if other files begin so too."""
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

    def read(self, path: Path, key: str | None, with_labels: bool) -> Embeddings:
        """Read a file; `key` is what follows its name after `::`."""
        module = self.load()
        if not hasattr(module, "catalogue"):
            return module.read(path, key, with_labels)
        from retrieval.formats import named_arrays

        return named_arrays.read(module.catalogue(path), key, path, with_labels, self.name)

    def read_labels(self, path: Path, key: str | None) -> np.ndarray:
        """Read a file of labels."""
        module = self.load()
        if not hasattr(module, "catalogue"):
            return module.read_labels(path, key)
        from retrieval.formats import named_arrays

        return named_arrays.read_labels(module.catalogue(path), key, path)


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
        needs="torch",
        extra="cpu",
    ),
    Format(
        "safetensors",
        "retrieval.formats.safetensors",
        "named tensors",
        (".safetensors",),
        in_parts=(".safetensors",),
    ),
    Format(
        "vecs",
        "retrieval.formats.vecs",
        "TEXMEX vectors; labels in a separate file",
        (".fvecs", ".bvecs"),
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
        offsets=(),  # the name says what is inside: without one, it is not read
    ),
    Format(
        "zstd",
        "retrieval.formats.compressed",
        "`.npy.zst`, `.csv.zst`, `.tsv.zst`, `.jsonl.zst`, and labels in `.txt.zst`",
        (".zst",),
        {b"\x28\xb5\x2f\xfd": ".zst"},
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
    Format("ivecs", "retrieval.formats.vecs", "TEXMEX integers", (".ivecs",), labels_only=True),
    Format("text", "retrieval.formats.text", "one label per line", (".txt",), labels_only=True),
    Format("json", "retrieval.formats.text", "a list of labels", (".json",), labels_only=True),
)
COMPRESSED = (".gz", ".zst")
BINARY = ("vecs", "ivecs", "safetensors")  # these begin with a number, which may be any


def find_format(path: Path) -> Format:
    """By suffix, else by the first bytes; raises for what is not a readable file."""
    if store := store_format(path):
        return store
    check_file(path)
    from retrieval.formats.refused import explain, explain_stand_in

    if error := explain_stand_in(path):
        raise error
    by_suffix = {suffix: format for format in FORMATS for suffix in format.suffixes}
    suffix = path.suffix.lower()
    if suffix in by_suffix:
        _check_signature(path, by_suffix[suffix])
        return by_suffix[suffix]
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


def store_format(path: Path) -> Format | None:
    """The format of a folder that is read as one file."""
    if path.is_dir():
        for format in FORMATS:
            if any((path / mark).exists() for mark in format.marks):
                return format
    return None


def _check_signature(path: Path, format: Format) -> None:
    """Raise for a file whose first bytes are those of another format than its suffix says."""
    with path.open("rb") as file:
        start = file.read(16)
    for other in FORMATS:
        for mark, suffix in other.magic.items():
            if suffix and start.startswith(mark) and format.name not in (other.name, *BINARY):
                new = path.with_name(
                    path.name + suffix if suffix in COMPRESSED else path.stem + suffix
                )
                raise DmlError(
                    f"{path} is a {suffix} file, not a {path.suffix} file.",
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
        if any(start[at:].startswith(tuple(format.magic)) for at in format.offsets)
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

            if error := explain(path):
                raise error
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
    except (OSError, ValueError) as why:
        raise DmlError(f"{path} cannot be opened.", f"{why}.", "Check its permissions.") from why
