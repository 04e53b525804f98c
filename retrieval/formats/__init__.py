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
        "dmltool's own files, ann-benchmarks files, any vectors with labels",
        (b"\x89HDF\r\n\x1a\n",),
        offsets=(0, 512, 1024, 2048),
    ),
    Format(
        "npy",
        (".npy",),
        "retrieval.formats.npy",
        "one NumPy array; labels in another file",
        (b"\x93NUMPY",),
    ),
    Format(
        "npz",
        (".npz",),
        "retrieval.formats.npz",
        "NumPy arrays by name, zipped or not",
        (b"PK",),
    ),
    Format(
        "csv",
        (".csv", ".tsv"),
        "retrieval.formats.csv",
        "a column for each dimension, or one column of [lists]; header optional",
    ),
    Format(
        "arrow",
        (".parquet", ".pq", ".arrow", ".feather"),
        "retrieval.formats.arrow",
        "Parquet and Arrow tables: one list column, or a column for each dimension",
        (b"PAR1", b"ARROW1"),
        needs="pyarrow",
        extra="readers",
    ),
    Format(
        "jsonl",
        (".jsonl", ".ndjson"),
        "retrieval.formats.jsonl",
        "one JSON object a line, with a list of numbers and a label",
    ),
    Format(
        "torch",
        (".pt", ".pth"),
        "retrieval.formats.pt",
        "tensors and NumPy arrays saved by torch.save, alone or in dicts; no code in them is run",
        needs="torch",
        extra="cpu",
    ),
    Format(
        "safetensors",
        (".safetensors",),
        "retrieval.formats.safetensors",
        "tensors by name",
    ),
    Format(
        "vecs",
        (".fvecs", ".bvecs"),
        "retrieval.formats.vecs",
        "TEXMEX vectors; labels in another file",
    ),
    Format(
        "faiss",
        (".faiss", ".index"),
        "retrieval.formats.faiss_flat",
        "a flat FAISS index, with or without ids; labels in another file",
        (b"IxF", b"IxM"),
    ),
    Format(
        "gzip",
        (".gz",),
        "retrieval.formats.gzipped",
        "`.npy.gz`, `.csv.gz`, `.tsv.gz`, `.jsonl.gz`, and labels as `.txt.gz`",
    ),
    Format("ivecs", (".ivecs",), "retrieval.formats.vecs", "TEXMEX integers", labels_only=True),
    Format("text", (".txt",), "retrieval.formats.text", "one label a line", labels_only=True),
    Format("json", (".json",), "retrieval.formats.text", "a list of labels", labels_only=True),
)
