"""The table of embedding formats. A module is imported when a file of its kind is read.

A module of named arrays has `catalogue(path) -> dict of Entry`. Others have `read(path, key,
with_labels) -> Embeddings` and `read_labels(path, key) -> array`; one that holds labels only has
just the second. One that rests on a library in C++ also has `trial(path)`, which returns what a
child process is to try before the file is opened here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from retrieval import registry
from retrieval.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    import numpy as np

    from retrieval.embeddings import Embeddings


@dataclass(frozen=True)
class Format(registry.Entry):
    """A format: its path is that of the module that reads it."""

    suffixes: tuple[str, ...] = ()
    magic: tuple[bytes, ...] = ()
    """How such files begin,"""
    offsets: tuple[int, ...] = (0,)
    """or what stands at one of these places."""
    labels_only: bool = False
    needs: str = ""
    """A library that a plain install lacks,"""
    extra: str = ""
    """and the extra of pyproject.toml that installs it."""

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
        (b"\x89HDF\r\n\x1a\n",),
        offsets=(0, 512, 1024, 2048),
    ),
    Format(
        "npy",
        "retrieval.formats.npy",
        "one NumPy array; labels in a separate file",
        (".npy",),
        (b"\x93NUMPY",),
    ),
    Format(
        "npz",
        "retrieval.formats.npz",
        "named NumPy arrays, compressed or not",
        (".npz",),
        (b"PK",),
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
        (b"PAR1", b"ARROW1"),
        needs="pyarrow",
        extra="readers",
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
        (b"IxF", b"IxM"),
    ),
    Format(
        "gzip",
        "retrieval.formats.gzipped",
        "`.npy.gz`, `.csv.gz`, `.tsv.gz`, `.jsonl.gz`, and labels in `.txt.gz`",
        (".gz",),
    ),
    Format("ivecs", "retrieval.formats.vecs", "TEXMEX integers", (".ivecs",), labels_only=True),
    Format("text", "retrieval.formats.text", "one label per line", (".txt",), labels_only=True),
    Format("json", "retrieval.formats.text", "a list of labels", (".json",), labels_only=True),
)
