"""Identical rows: equal values in every column, whatever the dtype (and -0 is 0)."""

from __future__ import annotations

from functools import partial

import numpy as np

from retrieval.slices import blocks
from retrieval.threads import processors, run_all


def row_hashes(vectors: np.ndarray) -> np.ndarray:
    """(N,) uint64, equal for identical rows."""
    from retrieval.kernels import hash_rows

    factors = np.random.default_rng(0).integers(1, 2**63, vectors.shape[1], dtype=np.uint64)
    factors = factors * np.uint64(2) + np.uint64(1)
    out = np.empty(len(vectors), np.uint64)

    def hash_part(part: slice) -> None:
        # float64 holds every accepted dtype exactly; adding 0.0 turns -0.0 into 0.0.
        words = (np.asarray(vectors[part], np.float64) + 0.0).view(np.uint64)
        hash_rows(words, factors, out[part])

    run_all([(partial(hash_part, part), 1) for part in blocks(vectors)], processors())
    return out


def row_groups(vectors: np.ndarray) -> np.ndarray:
    """(N,) int64: the index of the first row identical to each row."""
    _, first, inverse = np.unique(row_hashes(vectors), return_index=True, return_inverse=True)
    group = first[inverse].astype(np.int64)
    repeated = np.flatnonzero(group != np.arange(len(group)))
    for part in blocks(vectors[: len(repeated)]):
        rows = repeated[part]
        same = (np.asarray(vectors[rows]) == np.asarray(vectors[group[rows]])).all(axis=1)
        # Different rows with one hash stand alone: a group is a promise, not a guess.
        group[rows[~same]] = rows[~same]
    return group


def rows_among(queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """(Q,) int64: a gallery row identical to each query, -1 if there is none."""
    known, first = np.unique(row_hashes(gallery), return_index=True)
    hashes = row_hashes(queries)
    at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    found = np.where(known[at] == hashes, first[at], -1)
    listed = np.flatnonzero(found >= 0)
    for part in blocks(queries[: len(listed)]):
        rows = listed[part]
        same = (np.asarray(queries[rows]) == np.asarray(gallery[found[rows]])).all(axis=1)
        found[rows[~same]] = -1
    return found
