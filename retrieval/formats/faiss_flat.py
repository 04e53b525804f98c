"""Read `.faiss` and `.index`: the vectors of a flat FAISS index, memory-mapped.

The layout is that of faiss.write_index, read here with its bounds checked: FAISS itself trusts what
it reads. Other kinds of index hold codes or graphs, which only FAISS can turn into vectors.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from retrieval.embeddings import Wanted, note
from retrieval.errors import DmlError
from retrieval.formats import labels, named_arrays
from retrieval.formats.arrays import mapped, refuse_overrun
from retrieval.formats.refused import python_line, quoted

FLAT = (b"IxF2", b"IxFI", b"IxFl")
WITH_IDS = (b"IxMp", b"IxM2")
OTHERS = {
    b"IBxF": "IndexBinaryFlat",
    b"IHNf": "IndexHNSWFlat",
    b"IHNp": "IndexHNSWPQ",
    b"IHNs": "IndexHNSWSQ",
    b"INSf": "IndexNSGFlat",
    b"IwFl": "IndexIVFFlat",
    b"IwPQ": "IndexIVFPQ",
    b"IwPf": "IndexIVFPQFastScan",
    b"IwSq": "IndexIVFScalarQuantizer",
    b"IPfs": "IndexPQFastScan",
    b"IxHe": "IndexLSH",
    b"IxPT": "IndexPreTransform",
    b"IxPq": "IndexPQ",
    b"IxRF": "IndexRefineFlat",
    b"IxSQ": "IndexScalarQuantizer",
}
HEADER = struct.Struct("<iqqq?i")  # dimension, count, two unused, trained, metric
LENGTH = struct.Struct("<Q")


def read(path: Path, key: str | None, wanted: Wanted) -> Any:
    vectors, ids = _parse(path)
    if wanted == "labels":
        if ids is None:
            raise DmlError(
                f"{path} holds vectors and no ids.",
                "Labels cannot be taken from it.",
                "Give a file of labels: --labels labels.npy",
            )
        return labels.labels(ids, f"{path}::ids")
    entries = {"vectors": named_arrays.entry(vectors)}
    if ids is not None:
        # Ids name items; whether they are labels as well only the user knows.
        if key and "," in key:
            entries["ids"] = named_arrays.entry(ids)
        elif wanted == "all":
            note(f"{path}: its ids are not taken as labels; {path}::vectors,ids does that")
    return named_arrays.Catalogue(entries, path).read(key, wanted, "faiss")


def _parse(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Vectors (N, D) float32, and ids (N,) int64."""
    with path.open("rb") as file:
        kind = file.read(4)
        if kind not in WITH_IDS:
            return _flat(file, path, kind, kind), None
        _, count = _header(file, path)
        vectors = _flat(file, path, file.read(4), kind)
        if len(vectors) != count:
            raise _damaged(path, f"It holds {len(vectors):,} vectors for {count:,} ids.")
        return vectors, _values(file, path, np.dtype("<i8"), count)


def _flat(file: BinaryIO, path: Path, kind: bytes, outer: bytes) -> np.ndarray:
    if kind not in FLAT:
        raise _other(path, kind, outer)
    dim, count = _header(file, path)
    return _values(file, path, np.dtype("<f4"), dim * count).reshape(count, dim)


def _header(file: BinaryIO, path: Path) -> tuple[int, int]:
    """Dimension and count."""
    data = file.read(HEADER.size)
    if len(data) < HEADER.size:
        raise _damaged(path, "Its header is cut short.")
    dim, count, _, _, _, metric = HEADER.unpack(data)
    if metric > 1:
        file.read(4)  # the argument of the metric
    if dim < 1 or count < 1:
        raise _damaged(path, f"Its header claims {count:,} vectors of {dim:,} dimensions.")
    return dim, count


def _values(file: BinaryIO, path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Map (count,) values, and move the file's position behind them."""
    data = file.read(LENGTH.size)
    stored = LENGTH.unpack(data)[0] if len(data) == LENGTH.size else 0
    if stored != count:
        raise _damaged(path, f"It holds {stored:,} values where its header claims {count:,}.")
    start = file.tell()
    refuse_overrun(str(path), count * dtype.itemsize, os.path.getsize(path) - start)
    file.seek(start + count * dtype.itemsize)
    return mapped(path, dtype, (count,), start)


def _damaged(path: Path, why: str) -> DmlError:
    return DmlError(f"{path} is a damaged FAISS index.", why, "Write it again: faiss.write_index.")


def _other(path: Path, kind: bytes, outer: bytes) -> DmlError:
    name = OTHERS.get(kind)
    if name is None and not (kind.startswith(b"I") and kind.isalnum()):
        return DmlError(
            f"{path} is not a FAISS index.",
            f"It begins with {kind!r}.",
            "Give it the suffix of its format, or write it again: faiss.write_index(index, PATH)",
        )
    name = name or f"kind {kind.decode()}"
    out = path.with_suffix(".npy")
    if kind == b"IBxF":
        code = (
            f"i = faiss.read_index_binary({quoted(path)}); x = faiss.vector_to_array(i.xb); "
            f"numpy.save({quoted(out)}, numpy.unpackbits(x.reshape(i.ntotal, -1), axis=1))"
        )
    else:
        inner = "faiss.downcast_index(i.index)" if outer in WITH_IDS else "i"
        code = (
            f"i = faiss.read_index({quoted(path)}); "
            f"numpy.save({quoted(out)}, {inner}.reconstruct_n(0, i.ntotal))"
        )
    return DmlError(
        f"{path} is a FAISS index of another kind: {name}.",
        "Only flat indexes hold the vectors as they are, and only those are read.",
        "If you trust the file: " + python_line("faiss, numpy", code),
    )
