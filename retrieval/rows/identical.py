"""Find identical rows: equal values in every column, whatever the dtype (and -0 is 0)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from retrieval.resources import processors, run_all, slices
from retrieval.rows.scan import Scan

Rows = Callable[[slice], np.ndarray]  # a slice of positions -> their rows (n, D)
_BLOCK = 1 << 21  # numbers converted at a time


def row_groups(*arrays: np.ndarray, scans: Sequence[Scan | None] = ()) -> np.ndarray:
    """(N,) int64: the index of the first row identical to each row, counted over all arrays.

    scans: of each array, if they were scanned.
    """
    D = arrays[0].shape[1]
    known = [found.hashes for found in scans if found is not None]
    if len(known) < len(arrays):
        known = [_hashes(len(array), D, partial(_block, array)) for array in arrays]
    hashes = known.pop() if len(known) == 1 else np.concatenate(known)
    group = _first_of_each(hashes)
    del known, hashes  # of ten million rows they are large
    left, seed = _differ(arrays, np.arange(len(group)), group), 0
    while len(left):  # rows with the hash of another row are hashed anew, among themselves
        seed += 1
        hashes = _hashes(len(left), D, partial(_chosen, arrays, left), seed)
        first = _first_of_each(hashes)
        group[left] = left[first]
        left = left[_differ(arrays, left, first)]
    return group


def rows_among(
    queries: np.ndarray, gallery: np.ndarray, scans: Sequence[Scan | None] = ()
) -> np.ndarray:
    """(Q,) int64: a gallery row identical to each query, -1 if there is none.

    scans: of the queries and of the gallery, if they were scanned.
    """
    first = row_groups(gallery, queries, scans=scans[::-1])[len(gallery) :]
    return np.where(first < len(gallery), first, -1)


def direction_groups(
    vectors: np.ndarray,
    units: Callable[[slice], np.ndarray],
    rows: np.ndarray,
    scanned: Scan | None = None,
) -> np.ndarray:
    """(N,) int64: the index of the first row that points the same way.

    `units` gives rows scaled to length 1, in float32, which are alike for parallel rows, nearly
    always. Verified where products of two entries are exact in float64; of float64 vectors only
    the identical ones are known, `rows`, which are row_groups.
    """
    if vectors.dtype.itemsize > 4:
        return rows
    N, D = vectors.shape
    if scanned is not None:
        group = _first_of_each(scanned.directions)
    else:
        group = _first_of_each(_hashes(N, D, lambda part: units(part) + np.float32(0)))
    # Different directions with one hash stand alone: a group is a promise, not a guess.
    alone = _differ((vectors,), np.arange(N), group, _parallel)
    group[alone] = alone
    return rows if np.array_equal(group, rows) else group  # one array where there are many rows


def _block(array: np.ndarray, part: slice) -> np.ndarray:
    """Rows in float64, which holds every accepted dtype exactly, with 0.0 for -0.0."""
    return np.asarray(array[part], np.float64) + 0.0


def _chosen(arrays: tuple[np.ndarray, ...], rows: np.ndarray, part: slice) -> np.ndarray:
    return _rows(arrays, rows[part]) + 0.0


def _hashes(count: int, dim: int, rows: Rows, seed: int = 0) -> np.ndarray:
    """(N,) uint64, equal for identical rows."""
    from retrieval.rows.kernels import hash_rows

    keys = np.random.default_rng(seed).integers(0, 2**64, dim, dtype=np.uint64)
    out = np.empty(count, np.uint64)

    def hash_part(part: slice) -> None:
        block = np.ascontiguousarray(rows(part))
        hash_rows(block.view(f"u{block.itemsize}"), keys, out[part])

    parts = slices(count, max(1, _BLOCK // dim))
    run_all(hash_part, parts, processors())
    return out


def _first_of_each(hashes: np.ndarray) -> np.ndarray:
    """(N,) int64: where each hash occurs first."""
    ordered = np.sort(hashes)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    first = np.arange(len(hashes))
    parts = slices(len(hashes), _BLOCK)
    if len(repeated):  # usually few or none
        rows = np.concatenate(
            [part.start + np.flatnonzero(_among(hashes[part], repeated)) for part in parts]
        )
        _, index, inverse = np.unique(hashes[rows], return_index=True, return_inverse=True)
        first[rows] = rows[index][inverse]
    return first


def _among(hashes: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """(n,) whether each hash is one of those in order."""
    at = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    return ordered[at] == hashes


def _differ(
    arrays: tuple[np.ndarray, ...],
    index: np.ndarray,
    first: np.ndarray,
    same: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.equal,
) -> np.ndarray:
    """Positions in `index` whose row is not the same as the row at their position `first`."""
    repeated = np.flatnonzero(first != np.arange(len(first)))
    out = [repeated[:0]]
    for part in slices(len(repeated), max(1, _BLOCK // arrays[0].shape[1])):
        some = repeated[part]
        a, b = (_rows(arrays, index[at]) for at in (some, first[some]))
        out.append(some[~same(a, b).all(axis=1)])
    return np.concatenate(out)


def _rows(arrays: tuple[np.ndarray, ...], index: np.ndarray) -> np.ndarray:
    """Rows (n, D) in float64, counted over all arrays."""
    out, start = np.empty((len(index), arrays[0].shape[1])), 0
    for array in arrays:
        here = np.flatnonzero((index >= start) & (index < start + len(array)))
        out[here] = array[index[here] - start]
        start += len(array)
    return out


def _parallel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a * _top(b) == b * _top(a)


def _top(block: np.ndarray) -> np.ndarray:
    return np.abs(block).max(axis=1, keepdims=True)
