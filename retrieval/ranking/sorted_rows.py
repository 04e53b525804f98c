"""Positions of the positives of queries with thousands of positives, by sorting in float64.

Counting negatives before each positive takes time for every positive. Where a class is a good part
of the gallery, it is faster to sort all items by their distance from the query. Each float64
distance carries in its last bit whether the item is a positive, so that one sort of plain numbers
is enough. Float64 decides the order of a positive and a negative unless they are nearly equally
near; then they are neighbours in the sorted row, or have such neighbours between them. A query
that has such neighbours is left to the exact count (`positions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from retrieval.distributed.world import ALONE, World
from retrieval.problem import Problem
from retrieval.ranking import position_kernels
from retrieval.ranking.vectors import ULP64, Prepared
from retrieval.resources import run_all, slices

_NUMBERS = 1 << 18  # numbers of a block: it stays in the cache
_ROWS = 8  # rows of a block at least: the gallery is converted for each block
# Nanoseconds on a core with AVX2; they decide about speed alone. An item that is sorted, an axis of
# its product in float64, and a positive whose negatives are counted, for both distances.
_ITEM, _AXIS, _POSITIVE = 12.0, 0.08, 1000.0


def sorting_pays(problem: Problem) -> np.ndarray:
    """(Q,) bool: whether sorting all items of a query takes less time than counting."""
    G, D = problem.gallery.shape
    return problem.positive_counts * _POSITIVE > G * (_ITEM + D * _AXIS)


def sorted_positions(
    prepared: Prepared, world: World = ALONE
) -> tuple[dict[str, list[np.ndarray]], np.ndarray]:
    """The positions of each query's positives within R, ascending, by each distance.

    Returns also (Q,) bool: True for queries that float64 cannot decide. The ranks share out the
    queries.
    """
    Q, G = len(prepared.queries), len(prepared.gallery)
    out = {d: [np.empty(0, np.int32)] * Q for d in prepared.distances}
    undecided = np.zeros(Q, np.int8)
    by_count = np.argsort(prepared.positive_counts, kind="stable")

    def some(part: slice) -> None:
        queries = by_count[part]
        for d, distances in _distances(prepared, queries):
            error = np.zeros(len(queries))
            if d == "cos" or not prepared.lattice:
                error = _errors(prepared, queries, d)
            found, unsure = _positions(distances, prepared.positive_counts[queries], error)
            undecided[queries] |= unsure
            for query, positions in zip(queries.tolist(), found, strict=True):
                out[d][query] = positions

    parts = world.share(list(slices(Q, max(_ROWS, _NUMBERS // G))))
    run_all(some, parts, prepared.threads)
    if world.size > 1:
        world.complete(undecided)
        out = {d: _completed(lists, world) for d, lists in out.items()}
    return out, undecided > 0


def _completed(lists: list[np.ndarray], world: World) -> list[np.ndarray]:
    """The lists of all queries; each was found by one rank and is empty on the others."""
    lengths = np.array([len(found) for found in lists], np.int64)
    own = np.flatnonzero(lengths)
    world.complete(lengths)
    ends = np.cumsum(lengths)
    joined = np.zeros(int(lengths.sum()), np.int32)
    for n in own.tolist():
        joined[ends[n] - lengths[n] : ends[n]] = lists[n]
    world.complete(joined)
    return np.split(joined, ends[:-1])


def _distances(prepared: Prepared, queries: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(A, G) float64 distances that rank the items, odd in their last bit for positives."""
    q, g = prepared.queries, prepared.gallery
    rows = q.vectors[queries].astype(np.float64)
    dots = np.empty((len(rows), len(g)))
    for part in slices(len(g), max(1, _NUMBERS // g.dim)):
        np.matmul(rows, g.vectors[part].astype(np.float64).T, out=dots[:, part])
    own = prepared.self_ids[queries]
    row = np.flatnonzero(own >= 0)
    for d in prepared.distances:
        if d == "cos":
            scales, sums = (
                (-q.inverse(queries), g.inverse(slice(None))),
                (np.zeros(len(rows)), np.zeros(len(g))),
            )
        else:
            scales, sums = (
                (np.full(len(rows), -2.0), np.ones(len(g))),
                (q.square[queries], g.square),
            )
        distances = np.empty_like(dots)
        position_kernels.mark_positives(
            dots, scales, sums, (q.codes[queries], g.codes), distances, distances.view(np.int64)
        )
        distances[row, own[row]] = np.inf
        yield d, distances


def _errors(prepared: Prepared, queries: np.ndarray, d: str) -> np.ndarray:
    """(A,) bounds of the errors of all distances of a query."""
    dim = prepared.gallery.dim
    if d == "cos":
        return np.full(len(queries), (2 * dim + 32) * ULP64)
    largest = prepared.queries.square[queries] + prepared.gallery.square.max(initial=0.0)
    return (2 * dim + 32) * ULP64 * largest + 1e-290


def _positions(
    distances: np.ndarray, counts: np.ndarray, error: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """The positions of the positives of each row, and (A,) bool: True where float64 is in doubt.

    `distances` (A, G) are put into another order.
    """
    G = distances.shape[1]
    last = min(int(counts.max()), G - 1)
    distances.partition(last, axis=1)
    nearest = distances[:, : last + 1]
    nearest.sort(axis=1)
    positive = nearest.view(np.int64) & 1 == 1
    within = np.arange(last + 1) < counts[:, None]
    doubtful = within[:, :-1] & (positive[:, 1:] != positive[:, :-1])
    # Beyond R nothing is looked at: who stands at R must be certain whatever the classes.
    doubtful |= np.arange(1, last + 1) == counts[:, None]
    # Without any error a tie is a tie, and its last bit has put the negative first.
    doubtful &= nearest[:, 1:] - nearest[:, :-1] <= 2 * error[:, None]
    undecided = doubtful.any(axis=1) & (error > 0)
    row, position = np.nonzero(positive & within)
    position = position.astype(np.int32) + np.int32(1)
    ends = np.searchsorted(row, np.arange(len(counts) + 1)).tolist()
    return [position[start:end] for start, end in pairwise(ends)], undecided
