"""Embedding files to try the commands on: two models of one test set, and a query/gallery pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from retrieval.embeddings import Split
from retrieval.formats.hdf5 import write

NOTE = "generated: class centres on a sphere with noise, sharper for the later model"


def write_demo(folder: Path, seed: int = 0) -> dict[str, Path]:
    """Writes early.h5 and late.h5 (leave-one-out), and shop.h5 (query -> gallery)."""
    rng = np.random.default_rng(seed)
    C, M, D = 120, 20, 64
    names = np.array([f"class {c:03}" for c in range(C)])
    labels = np.repeat(np.arange(C), M)  # (N,)
    paths = np.array([f"class_{c:03}/{m:02}.jpg" for c in range(C) for m in range(M)])
    centres = rng.standard_normal((C, D))
    noise = rng.standard_normal((len(labels), D))
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for model, spread in (("early", 1.9), ("late", 1.5)):
        vectors = (centres[labels] + spread * noise).astype(np.float32)
        files[model] = folder / f"{model}.h5"
        attrs = {"model": model, "dataset": "demo", "note": NOTE}
        write(files[model], {"test": Split(vectors, labels, paths)}, names, attrs, force=True)
    asks = np.arange(len(labels)) % 4 == 0
    shop = {
        name: Split(vectors[rows], labels[rows], paths[rows])
        for name, rows in (("query", asks), ("gallery", ~asks))
    }
    files["shop"] = folder / "shop.h5"
    write(files["shop"], shop, names, {"model": "late", "note": NOTE}, force=True)
    return files
