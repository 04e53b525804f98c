"""Embeddings made in memory, as if they had been read from a file, and settings to compare them."""

from pathlib import Path

import numpy as np

from retrieval.embeddings import Embeddings, Split
from retrieval.evaluation import Settings

SETTINGS = Settings(nmi=False, map_at_r=False, distances=("l2",))


def file(vectors, labels, paths=None, name="a.h5", **more):
    split = Split(np.asarray(vectors), np.asarray(labels), paths)
    return Embeddings(Path(name), "hdf5", {"test": split}, **more)


def names(n):
    return np.array([f"{i:03}.jpg" for i in range(n)])
