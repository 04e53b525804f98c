"""Embeddings made in memory, as if they had been read from a file."""

from pathlib import Path

import numpy as np

from retrieval.embeddings import Embeddings, Split


def file(vectors, labels, paths=None, name="a.h5", **more):
    split = Split(np.asarray(vectors), np.asarray(labels), paths)
    return Embeddings(Path(name), "hdf5", {"test": split}, **more)


def names(n):
    return np.array([f"{i:03}.jpg" for i in range(n)])
