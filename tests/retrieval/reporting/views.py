"""Views of reports for small data, and pictures of noise."""

import json
from pathlib import Path

import numpy as np

from retrieval.embeddings import Embeddings, Split
from retrieval.reporting import gather
from retrieval.reporting.gather import Beside, Options

SOURCE = {"file": "a.h5", "format": "hdf5", "attrs": {"model": "m"}, "taken": {}, "notes": []}
QUICK = Options(nmi=False, map="pca")


def shop(vectors, labels, queries, paths=None):
    parts = {"query": slice(None, queries), "gallery": slice(queries, None)}
    splits = {
        name: Split(vectors[part], labels[part], None if paths is None else paths[part])
        for name, part in parts.items()
    }
    return Embeddings(Path("shop.h5"), "hdf5", splits)


def view_of(data, *others, options=QUICK, progress=None, **more):
    view = gather.gather(data, SOURCE, others, options, Beside(**more), progress)
    json.dumps(view, allow_nan=False)
    return view


def noise(path):
    seed = int(path.split(".")[0])
    return np.random.default_rng(seed).integers(0, 255, (90, 120, 3)).astype(np.uint8)
