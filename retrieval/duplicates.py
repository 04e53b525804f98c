"""Identical rows: equal values in every column, whatever the dtype (and -0 is 0)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from retrieval.slices import blocks
from retrieval.threads import processors, run_all

Same = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (n, D), (n, D) -> (n, D) bool


def row_hashes(vectors: np.ndarray) -> np.ndarray:
    """(N,) uint64, equal for identical rows."""
    # float64 holds every accepted dtype exactly; adding 0.0 turns -0.0 into 0.0.
    return _hashes(vectors, lambda part: np.asarray(vectors[part], np.float64) + 0.0)


def _hashes(vectors: np.ndarray, rows: Callable[[slice], np.ndarray]) -> np.ndarray:
    from retrieval.kernels import hash_rows

    factors = np.random.default_rng(0).integers(1, 2**63, vectors.shape[1], dtype=np.uint64)
    factors = factors * np.uint64(2) + np.uint64(1)
    out = np.empty(len(vectors), np.uint64)

    def hash_part(part: slice) -> None:
        block = np.ascontiguousarray(rows(part))
        hash_rows(block.view(f"u{block.itemsize}"), factors, out[part])

    run_all([(partial(hash_part, part), 1) for part in blocks(vectors)], processors())
    return out


def row_groups(vectors: np.ndarray) -> np.ndarray:
    """(N,) int64: the index of the first row identical to each row."""
    return _verified(vectors, row_hashes(vectors), np.equal)


def direction_groups(
    vectors: np.ndarray, units: Callable[[slice], np.ndarray], rows: np.ndarray
) -> np.ndarray:
    """(N,) int64: the index of the first row that points the same way.

    `units` gives rows scaled to length 1, in float32, which are alike for parallel rows, nearly
    always. Verified where products of two entries are exact in float64; of float64 vectors only
    the identical ones are known, `rows`, which are row_groups.
    """
    if vectors.dtype.itemsize > 4:
        return rows
    return _verified(vectors, _hashes(vectors, lambda part: units(part) + np.float32(0)), _parallel)


def _parallel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return a * _top(b) == b * _top(a)


def _top(block: np.ndarray) -> np.ndarray:
    return np.abs(block).max(axis=1, keepdims=True)


def _verified(vectors: np.ndarray, hashes: np.ndarray, same: Same) -> np.ndarray:
    """The first row with each row's hash, if it is the same indeed."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    group = first[inverse].astype(np.int64)
    repeated = np.flatnonzero(group != np.arange(len(group)))
    for part in blocks(vectors[: len(repeated)]):
        rows = repeated[part]
        alike = same(np.asarray(vectors[rows]), np.asarray(vectors[group[rows]])).all(axis=1)
        # Different rows with one hash stand alone: a group is a promise, not a guess.
        group[rows[~alike]] = rows[~alike]
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
