"""Positions of all positives of a query among its neighbours, counted like the ranks.

The m-th nearest positive stands at m + the number of negatives at least as near. R-precision and
MAP@R look at the first R positions only, so a positive that has been pushed beyond R no longer
counts, and with it none that is farther: after a few tiles nearly nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from retrieval.metrics import PositivePositions
from retrieval.processes import ALONE, World
from retrieval.ranking import position_kernels
from retrieval.ranking.nearest_positive import Classes
from retrieval.ranking.pair_distance import compare_exactly, measure
from retrieval.ranking.vectors import Prepared
from retrieval.resources import run_all

_ROOM = 1 << 20  # pairs of a negative and a positive compared at a time
BYTES = 200  # per pair of query and positive, both distances

Bounds = Callable[[str, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class Positions:
    """The positives of all queries for one distance, nearest first, and the negatives before them.

    bounds(distance, query, squared, error) gives the float32 nearness that a negative needs to be
    surely, or possibly, as near.
    """

    def __init__(self, prepared: Prepared, distance: str, found: _Found, bounds: Bounds) -> None:
        self.prepared, self.distance, self.index, self.l2 = (
            prepared,
            distance,
            found.index,
            found.l2,
        )
        limit, P = prepared.positive_counts, len(found.index)
        self.owner = np.repeat(np.arange(len(limit)), limit)  # (P,) queries
        self.square = prepared.gallery.square[self.index]
        self.tied = np.zeros(P, np.int64)  # negatives as near as this positive alone
        sure, possible = bounds(distance, self.owner, found.squared, found.error)
        self.lists = position_kernels.PositiveLists(
            start=np.cumsum(limit) - limit,
            limit=limit,
            active=limit.copy(),
            total=np.zeros_like(limit),
            last=np.full(len(limit), np.inf, np.float32),
            negatives=np.zeros(P, np.int64),
            soonest=np.empty(P, np.int64),
            groups=prepared.groups[distance][self.index],
            sure=sure,
            possible=possible,
            nearest=found.squared - found.error,
            farthest=found.squared + found.error,
        )
        position_kernels.straighten(self.lists, np.cumsum(limit))
        some = limit > 0
        self.lists.last[some] = possible[np.cumsum(limit)[some] - 1]
        if distance == "l2":  # the sign that thresholds of l2 have
            self.lists.last[:] *= -1

    def lists_of(self, q: slice) -> position_kernels.PositiveLists:
        """The lists of some queries, as views."""
        per_query = ("start", "limit", "active", "total", "last")
        return self.lists._replace(**{name: getattr(self.lists, name)[q] for name in per_query})

    def settle(self, q: np.ndarray, g: np.ndarray) -> None:
        """Count pairs that float32 left open: in float64, the rest exactly."""
        prepared, lists = self.prepared, self.lists
        measured = measure(prepared, q, g)
        squared, error = measured[self.distance]
        l2 = measured["l2"][0] if prepared.lattice else np.full(len(q), np.nan)
        room = np.cumsum(lists.active[q]) // _ROOM
        for n in np.split(np.arange(len(q)), np.flatnonzero(np.diff(room)) + 1):
            unsure = np.empty((int(lists.active[q[n]].sum()), 2), np.int64)
            pairs = position_kernels.MeasuredPairs(
                q[n], squared[n], error[n], l2[n], prepared.gallery.square[g[n]]
            )
            left = position_kernels.credit_pairs(
                pairs, self.distance == "l2", lists, self.l2, self.square, self.tied, unsure
            )
            pair, m = unsure[:left].T
            pair = n[pair]
            positive = lists.start[q[pair]] + m
            nearer = compare_exactly(
                prepared, q[pair], g[pair], self.index[positive], self.distance
            )
            np.add.at(self.tied, positive[nearer >= 0], 1)

    def join(self, world: World) -> None:
        """Add up what the ranks have counted; beyond R for one of them is beyond R."""
        world.add(self.lists.negatives, self.tied)
        world.least(self.lists.active)

    def result(self) -> PositivePositions:
        """The positions within R, ascending."""
        lists, owner = self.lists, self.owner
        before = np.cumsum(lists.negatives)
        before -= (before - lists.negatives)[lists.start[owner]] if len(owner) else 0
        before += self.tied
        m = np.arange(len(owner)) - lists.start[owner]
        before[m >= lists.active[owner]] = np.iinfo(np.int64).max // 2  # beyond R; not counted on
        # Positives too close to tell apart may be listed in either order: sorted, it is right.
        position = before[np.lexsort((before, owner))] + m + 1
        within = position <= lists.limit[owner]
        lengths = np.bincount(owner[within], minlength=len(lists.limit))
        return PositivePositions(lists.limit, np.r_[0, np.cumsum(lengths)], position[within])


class _Found:
    """The positives of all queries with their distances, nearest first within a query."""

    def __init__(self, count: int) -> None:
        self.index = np.zeros(count, np.int64)  # gallery rows
        self.squared, self.error, self.l2 = np.zeros(count), np.zeros(count), np.zeros(count)


def positions_of(
    prepared: Prepared, classes: Classes, bounds: Bounds, world: World = ALONE
) -> dict[str, Positions]:
    """Measure all positives of every query and sort them; the ranks share out the classes."""
    counts = prepared.positive_counts
    start = np.cumsum(counts) - counts
    out = {d: _Found(int(counts.sum())) for d in prepared.distances}

    def some(queries: np.ndarray) -> None:
        q, g = classes.pairs(queries)
        measured = measure(prepared, q, g)
        run = np.r_[0, np.cumsum(q[1:] != q[:-1])] if len(q) else q
        n = counts[queries]
        to = np.repeat(start[queries] - (np.cumsum(n) - n), n) + np.arange(len(q))
        for d, found in out.items():
            squared, error = measured[d]
            order = np.lexsort((squared, run))
            found.index[to] = g[order]
            found.squared[to], found.error[to] = squared[order], error[order]
            found.l2[to] = measured["l2"][0][order]

    chunks = classes.chunks(np.argsort(prepared.queries.codes, kind="stable"))
    run_all([(partial(some, queries), 1) for queries in world.share(chunks)], prepared.threads)
    for found in out.values():
        world.complete(found.index, found.squared, found.error, found.l2)
    return {d: Positions(prepared, d, found, bounds) for d, found in out.items()}
