"""Where all right items of a query stand among its neighbours, counted like the ranks.

The m-th nearest right item stands at m + the number of wrong items at least as near. R-precision
and MAP@R look at the first R places only, so a right item that has been pushed beyond R no longer
counts, and with it no item that is farther: after a few tiles nearly nothing is left to do.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from retrieval.metrics import PositivePositions
from retrieval.ranking import kernels
from retrieval.ranking.nearest_positive import Classes
from retrieval.ranking.pair_distance import compare_exactly, measure
from retrieval.ranking.vectors import Side
from retrieval.resources import run_all

_ROOM = 1 << 20  # pairs of a wrong and a right item compared at a time
BYTES = 200  # per pair of query and right item, both distances


class Places:
    """The right items of all queries for one distance, nearest first, and what is before them."""

    def __init__(self, distance: str, start: np.ndarray, lattice: bool) -> None:
        Q, P = len(start) - 1, int(start[-1])
        self.distance, self.start, self.lattice = distance, start, lattice
        self.limit = np.diff(start)  # (Q,) R
        self.index = np.empty(P, np.int64)  # gallery rows
        self.value, self.error, self.level = np.empty(P), np.empty(P), np.empty(P)
        self.wrong = np.zeros(P, np.int64)  # wrong items before m, but not before m - 1
        self.tied = np.zeros(P, np.int64)  # wrong items as near as m alone, settled one by one
        self.active = self.limit.copy()  # right items that may stand within R
        self.total = np.zeros(Q, np.int64)  # wrong items before the last active one

    def finish(self, items: Side, group: np.ndarray, bounds: tuple[np.ndarray, np.ndarray]) -> None:
        """Takes the nearness (P,) float32 that is surely, or possibly, that of each right item."""
        self.group, self.square = group[self.index], items.square[self.index]
        self.sure, self.possible = bounds
        self.nearest, self.farthest = self.value - self.error, self.value + self.error
        self.soonest = np.empty(len(self.value), np.int64)
        kernels.straighten(
            *(self.start, self.sure, self.possible, self.nearest, self.farthest),
            *(self.soonest, self.group),
        )

    def last(self) -> np.ndarray:
        """(Q,) the possible nearness of the farthest right item that counts, inf if none."""
        out = np.full(len(self.limit), np.inf, np.float32)
        some = self.active > 0
        out[some] = self.possible[self.start[:-1][some] + self.active[some] - 1]
        return out

    def settle(self, asks: Side, q: np.ndarray, items: Side, g: np.ndarray, last) -> None:
        """Credits pairs that float32 left open: in float64, the rest exactly."""
        measured = measure(asks, q, items, g, self.lattice)
        level = measured["l2"][0] if self.lattice else np.full(len(q), np.nan)
        room = np.cumsum(self.active[q]) // _ROOM
        for n in np.split(np.arange(len(q)), np.flatnonzero(np.diff(room)) + 1):
            unsure = np.empty((int(self.active[q[n]].sum()), 2), np.int64)
            left = kernels.place_pairs(
                *(q[n], *(x[n] for x in measured[self.distance]), level[n], items.square[g[n]]),
                *(self.distance == "l2", self.start, self.limit, self.active, self.total),
                *(self.wrong, self.soonest, self.tied, self.nearest, self.farthest),
                *(self.level, self.square),
                *(self.possible, last, unsure),
            )
            pair, m = unsure[:left].T
            pair = n[pair]
            right = self.start[q[pair]] + m
            nearer = compare_exactly(
                asks, q[pair], items, g[pair], self.index[right], self.distance
            )
            np.add.at(self.tied, right[nearer >= 0], 1)

    def positions(self) -> PositivePositions:
        """The places within R, ascending."""
        owner = np.repeat(np.arange(len(self.limit)), self.limit)
        before = np.cumsum(self.wrong)
        before -= (before - self.wrong)[self.start[:-1][owner]] if len(owner) else 0
        before += self.tied
        m = np.arange(len(owner)) - self.start[owner]
        before[m >= self.active[owner]] = np.iinfo(np.int64).max // 2  # beyond R; not counted on
        # Right items too close to tell apart may be listed in either order: sorted, it is right.
        place = before[np.lexsort((before, owner))] + m + 1
        within = place <= self.limit[owner]
        lengths = np.bincount(owner[within], minlength=len(self.limit))
        return PositivePositions(self.limit, np.r_[0, np.cumsum(lengths)], place[within])


def right_items(
    asks: Side,
    items: Side,
    classes: Classes,
    distances: tuple[str, ...],
    lattice: bool,
    threads: int,
) -> dict[str, Places]:
    """All right items of every query with their distances, sorted."""
    start = np.r_[0, np.cumsum(classes.others)]
    out = {d: Places(d, start, lattice) for d in distances}

    def some(queries: np.ndarray) -> None:
        q, g = classes.pairs(queries)
        measured = measure(asks, q, items, g, lattice)
        first = np.r_[0, np.cumsum(q[1:] != q[:-1])] if len(q) else q
        for d, places in out.items():
            value, error = measured[d]
            order = np.lexsort((value, first))
            n = np.diff(start)[queries]
            to = np.repeat(start[queries] - (np.cumsum(n) - n), n) + np.arange(len(q))
            places.index[to] = g[order]
            places.value[to], places.error[to] = value[order], error[order]
            places.level[to] = measured["l2"][0][order]

    chunks = classes.chunks(np.argsort(asks.labels, kind="stable"), items.dim)
    run_all([(partial(some, queries), 1) for queries in chunks], threads)
    return out
