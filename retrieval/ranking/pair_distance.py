"""Measure single pairs of query and item in float64 with an error bound, or compare them exactly.

Every float is an integer times a power of two, so squared distances, dot products and squared
norms are integers too: Python compares them without rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrieval.ranking import kernels
from retrieval.ranking.vectors import ULP64, Prepared, integers_of, lattice_step
from retrieval.resources import slices

_NEAR = 1e-6  # the relative error up to which a product is good enough
_EXACT_ROWS = 1024  # rows compared exactly at a time


def measure(
    prepared: Prepared, q: np.ndarray, g: np.ndarray, distance: str
) -> tuple[np.ndarray, np.ndarray]:
    """Squared distances of the pairs (q[n], g[n]), and bounds of their errors.

    For cos it is the squared chord 2 - 2 cos. On a lattice l2 has no error.
    """
    queries, gallery = prepared.queries, prepared.gallery
    dim, squared, ones = gallery.dim, np.empty(len(q)), np.ones(len(q))
    cos = distance == "cos"
    kernels.pair_distances(
        kernels.PairRows(*queries.rows(q), queries.inverse(q) if cos else ones),
        kernels.PairRows(*gallery.rows(g), gallery.inverse(g) if cos else ones),
        squared,
    )
    if not cos:
        error = (dim + 8) * ULP64 * squared + 1e-290
        return squared, np.zeros_like(error) if prepared.lattice else error
    # Lengths are known to D/2 ulp (scales both vectors), coordinates of unit vectors to one.
    error = (4 * dim + 32) * ULP64 * squared + 6 * ULP64 * np.sqrt(squared)
    error += ((dim + 16) * ULP64) ** 2
    error[(queries.norm[q] == 0) | (gallery.norm[g] == 0)] = 0  # 2 by definition
    return squared, error


def exact_l2(prepared: Prepared, q: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Squared l2 distances of the pairs where they have no error, on a lattice; else NaN."""
    return measure(prepared, q, g, "l2")[0] if prepared.lattice else np.full(len(q), np.nan)


def measure_class(
    prepared: Prepared, q: np.ndarray, g: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Measure each of the queries q with each of the items g, as (A, B) arrays for each distance.

    It takes one product in float64; pairs that are too near for it are measured one by one. The
    query itself is infinitely far.
    """
    queries, gallery = prepared.queries, prepared.gallery
    # Unlike an index, `take` lets other threads work meanwhile.
    items = gallery.vectors.take(g, axis=0).astype(np.float64)
    same = prepared.symmetric and np.array_equal(q, g)  # half of the product serves both sides
    rows = items if same else queries.vectors.take(q, axis=0).astype(np.float64)
    dots = rows @ items.T  # (A, B)
    unit = (2 * gallery.dim + 32) * ULP64  # the error of a product, as in `sorted_rows`
    found = {d: (np.empty_like(dots), np.empty_like(dots)) for d in ("cos", "l2")}
    near = np.empty(dots.shape, np.bool_)
    kernels.class_distances(
        dots,
        kernels.ClassRows(prepared.self_ids[q], queries.square[q], queries.inverse(q)),
        kernels.ClassRows(g, gallery.square[g], gallery.inverse(g)),
        unit,
        0.0 if prepared.lattice else unit,
        _NEAR,
        (*found["cos"], *found["l2"], near),
    )
    if near.any():
        row, column = np.nonzero(near)
        for d, (squared, error) in found.items():
            squared[row, column], error[row, column] = measure(prepared, q[row], g[column], d)
    return found


def compare_exactly(
    prepared: Prepared, q: np.ndarray, g: np.ndarray, best: np.ndarray, distance: str
) -> np.ndarray:
    """1 where item g[n] is nearer to query q[n] than item best[n], 0 equal, -1 farther."""
    out = np.empty(len(q), np.int8)
    queries, gallery = prepared.queries.vectors, prepared.gallery.vectors
    for n in slices(len(q), _EXACT_ROWS):
        out[n] = _compare(queries[q[n]], gallery[g[n]], gallery[best[n]], distance)
    return out


def _compare(query: np.ndarray, item: np.ndarray, best: np.ndarray, distance: str) -> np.ndarray:
    rows = np.stack([query, item, best]).astype(np.float64)  # (3, M, D)
    small = _small_integers(rows)
    if small is not None:
        if distance == "l2":
            nearer = ((small[0] - small[2]) ** 2).sum(-1) - ((small[0] - small[1]) ** 2).sum(-1)
            return np.sign(nearer).astype(np.int8)
        dots = [(a * b).sum(-1) for a, b in _cos_pairs(*small)]
        return np.array([_cos_sign(*map(int, row)) for row in zip(*dots, strict=True)], np.int8)
    out = np.zeros(rows.shape[1], np.int8)
    undecided = _undecided(rows)
    if distance == "l2":
        out, undecided = _by_differences(rows)
    for m in np.flatnonzero(undecided):
        out[m] = _compare_one(rows[:, m], distance)
    return out


def _by_differences(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compare l2 distances in float64 as |q - b|^2 - |q - i|^2 = (b - i) (b + i - 2 q).

    Decides what squared distances cannot: a query far from both. Returns the signs, and where they
    are not certain.
    """
    query, item, best = rows
    difference, size = best - item, np.abs(best) + np.abs(item) + 2 * np.abs(query)
    nearer = (difference * (best + item - 2 * query)).sum(axis=-1)
    error = (rows.shape[-1] + 8) * ULP64 * (np.abs(difference) * size).sum(axis=-1) + 1e-290
    return np.sign(nearer).astype(np.int8), ~(np.abs(nearer) > error)


def _small_integers(rows: np.ndarray) -> np.ndarray | None:
    unit = lattice_step(float(np.abs(rows).max(initial=0.0)), rows.shape[-1])
    return integers_of(rows, unit) if 1e-290 < unit < 1e290 else None


def _undecided(rows: np.ndarray) -> np.ndarray:
    """(M,) False where zeros alone show a tie of cosines: query at a right angle to both."""
    query, item, best = rows != 0
    return (query & (item | best)).any(axis=-1)


def _cos_pairs(query: Sequence, item: Sequence, best: Sequence) -> tuple[tuple, ...]:
    return (query, item), (query, best), (item, item), (best, best)


def _cos_sign(qi: int, qb: int, ii: int, bb: int) -> int:
    """The sign of qi/sqrt(ii) - qb/sqrt(bb); the cosine of a zero row is 0."""
    left = qi * abs(qi) * bb if ii and bb else qi * abs(qi) if ii else 0
    right = qb * abs(qb) * ii if ii and bb else qb * abs(qb) if bb else 0
    return (left > right) - (left < right)


def _compare_one(rows: np.ndarray, distance: str) -> int:
    # Coordinates that add nothing, or the same to both distances, are left out.
    item, best = rows[1:]
    query, item, best = _integers(
        rows[:, item != best if distance == "l2" else (item != 0) | (best != 0)]
    )
    if distance == "l2":
        to_best = sum((q - b) ** 2 for q, b in zip(query, best, strict=True))
        to_item = sum((q - i) ** 2 for q, i in zip(query, item, strict=True))
        return (to_best > to_item) - (to_best < to_item)
    pairs = _cos_pairs(query, item, best)
    return _cos_sign(*(sum(a * b for a, b in zip(x, y, strict=True)) for x, y in pairs))


def _integers(rows: np.ndarray) -> list[list[int]]:
    """The rows times one power of two that makes all of them integers."""
    mantissa, exponent = np.frexp(rows)
    digits = (mantissa * 2.0**53).astype(np.int64)
    used = exponent[digits != 0]
    lowest = int(used.min()) if used.size else 0
    shift = np.where(digits != 0, exponent - lowest, 0)
    return [
        [int(d) << int(s) for d, s in zip(*row, strict=True)]
        for row in zip(digits, shift, strict=True)
    ]
