"""The table of embedding formats. A module is imported when a file of its kind is read.

A module has `read(path, key, with_labels) -> Embeddings` and `read_labels(path, key) -> array`;
one that holds labels only has just the second. One that rests on a library in C++ also has
`trial(path)`, which returns what a child process is to try before the file is opened here.
"""

from dataclasses import dataclass

from retrieval.formats import hdf5


@dataclass(frozen=True)
class Format:
    name: str
    suffixes: tuple[str, ...]
    module: str
    summary: str
    magic: tuple[bytes, ...] = ()
    """How such files begin,"""
    offsets: tuple[int, ...] = (0,)
    """or what stands at one of these places."""
    labels_only: bool = False
    needs: str = ""
    """A library that a plain install lacks,"""
    extra: str = ""
    """and the extra of pyproject.toml that installs it."""


FORMATS = (
    Format(
        "hdf5",
        hdf5.SUFFIXES,
        "retrieval.formats.hdf5.file",
        "embedding files of dmltool, ann-benchmarks files, other vectors with labels",
        (b"\x89HDF\r\n\x1a\n",),
        offsets=(0, 512, 1024, 2048),
    ),
    Format(
        "npy",
        (".npy",),
        "retrieval.formats.npy",
        "one NumPy array; labels in a separate file",
        (b"\x93NUMPY",),
    ),
    Format(
        "npz",
        (".npz",),
        "retrieval.formats.npz",
        "named NumPy arrays, compressed or not",
        (b"PK",),
    ),
    Format(
        "csv",
        (".csv", ".tsv"),
        "retrieval.formats.csv",
        "one column per dimension, or one column of [lists]; header optional",
    ),
    Format(
        "arrow",
        (".parquet", ".pq", ".arrow", ".feather"),
        "retrieval.formats.arrow",
        "Parquet and Arrow tables: one list column, or one column per dimension",
        (b"PAR1", b"ARROW1"),
        needs="pyarrow",
        extra="readers",
    ),
    Format(
        "jsonl",
        (".jsonl", ".ndjson"),
        "retrieval.formats.jsonl",
        "one JSON object per line, with a list of numbers and a label",
    ),
    Format(
        "torch",
        (".pt", ".pth"),
        "retrieval.formats.pt",
        "tensors and NumPy arrays from torch.save, alone or in dicts; no code in them is run",
        needs="torch",
        extra="cpu",
    ),
    Format(
        "safetensors",
        (".safetensors",),
        "retrieval.formats.safetensors",
        "named tensors",
    ),
    Format(
        "vecs",
        (".fvecs", ".bvecs"),
        "retrieval.formats.vecs",
        "TEXMEX vectors; labels in a separate file",
    ),
    Format(
        "faiss",
        (".faiss", ".index"),
        "retrieval.formats.faiss_flat",
        "flat FAISS index, with or without ids; labels in a separate file",
        (b"IxF", b"IxM"),
    ),
    Format(
        "gzip",
        (".gz",),
        "retrieval.formats.gzipped",
        "`.npy.gz`, `.csv.gz`, `.tsv.gz`, `.jsonl.gz`, and labels in `.txt.gz`",
    ),
    Format("ivecs", (".ivecs",), "retrieval.formats.vecs", "TEXMEX integers", labels_only=True),
    Format("text", (".txt",), "retrieval.formats.text", "one label per line", labels_only=True),
    Format("json", (".json",), "retrieval.formats.text", "a list of labels", labels_only=True),
)
