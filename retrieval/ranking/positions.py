"""Positions of all positives of a query among its neighbours, counted like the ranks.

The m-th nearest positive stands at m + the number of negatives at least as near. R-precision and
MAP@R look at the first R positions only, so a positive that has been pushed beyond R no longer
counts, and with it none that is farther: after a few tiles nearly nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from operator import call
from threading import Lock

import numpy as np

from retrieval.distributed.world import ALONE, World
from retrieval.metrics import PositivePositions
from retrieval.ranking import position_kernels
from retrieval.ranking.nearest_positive import Classes, ListedPositives, together
from retrieval.ranking.pair_distance import compare_exactly, exact_l2, measure, measure_class
from retrieval.ranking.vectors import Prepared
from retrieval.resources import run_all, slices

_PAIRS, _NUMBERS = 1 << 18, 1 << 23  # of a class measured by one product: pairs, numbers of items
_QUERIES = 256  # whose positives are prepared at a time: they stay in the cache
_COMPARED = 1 << 20  # pairs of a negative and a positive compared at a time
ROOM = 1 << 14  # the most negatives kept for a query
SPARE = 16  # negatives that are kept for a query beside one for each of its positives
BYTES, QUERY_BYTES = 160, 400  # per pair of query and positive, and per query; both distances

Bounds = Callable[[str, np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def memory_of(positive_counts: np.ndarray) -> np.ndarray:
    """(Q,) bytes that the positions of each query take while they are counted."""
    return positive_counts * BYTES + QUERY_BYTES


class Positions:
    """The positives of all queries for one distance, nearest first, and the negatives before them.

    bounds(distance, query, near, far) gives the float32 nearness that a negative needs to be
    surely, or possibly, as near as a positive between two squared distances. The arrays of `found`
    become those of the lists.
    """

    def __init__(
        self, prepared: Prepared, distance: str, found: ListedPositives, bounds: Bounds
    ) -> None:
        self.prepared, self.distance = prepared, distance
        self.index, self.l2 = found.index, found.l2
        self.lock = Lock()
        self.postponed: list[np.ndarray] = []  # pairs, as `postpone` takes them
        limit, P = prepared.positive_counts, len(found.index)
        self.tied = np.zeros(P, np.int32)  # negatives as near as this positive alone
        ends = np.cumsum(limit)
        self.lists = position_kernels.PositiveLists(
            start=ends - limit,
            limit=limit,
            active=limit.copy(),
            total=np.zeros_like(limit),
            last=np.full(len(limit), np.inf, np.float32),
            negatives=np.empty(P, np.int32),
            soonest=np.empty(P, np.int32),
            groups=np.empty(P, np.int32),
            sure=np.empty(P, np.float32),
            possible=np.empty(P, np.float32),
            nearest=found.nearest,
            farthest=found.farthest,
        )
        self.kept = _room_for_negatives(limit)

        def fill(q: slice) -> None:
            r = slice(ends[q.start] - limit[q.start], ends[q.stop - 1])
            owner = np.repeat(np.arange(q.start, q.stop), limit[q])
            limits = bounds(distance, owner, found.nearest[r], found.farthest[r])
            self.lists.sure[r], self.lists.possible[r] = limits
            counted = self.counted(q)
            position_kernels.straighten(counted.lists, ends[q], found.index, counted.groups)

        run_all(fill, slices(len(limit), _QUERIES), prepared.threads)
        some = limit > 0
        self.lists.last[some] = self.lists.possible[ends[some] - 1]
        if distance == "l2":  # the sign that thresholds of l2 have
            self.lists.last[:] *= -1

    def counted(self, q: slice) -> position_kernels.Counted:
        """What has been counted for some queries, as views."""
        lists, kept = self.lists, self.kept
        return position_kernels.Counted(
            self.distance == "l2",
            lists._replace(
                start=lists.start[q],
                limit=lists.limit[q],
                active=lists.active[q],
                total=lists.total[q],
                last=lists.last[q],
            ),
            kept._replace(start=kept.start[q], room=kept.room[q], held=kept.held[q]),
            self.prepared.groups[self.distance],
        )

    def credit_rest(self, q: slice, pairs: np.ndarray) -> Iterator[int]:
        """Add the kept negatives of some queries to their positives, as `Backend.credit` does."""
        counted = self.counted(q)
        query, end = 0, len(counted.lists.start)
        while query < end:
            query, found = position_kernels.credit_rest(query, end, counted, pairs)
            yield found

    def postpone(self, pairs: np.ndarray) -> int:
        """Keep pairs that float32 leaves open; returns how many are kept.

        Most of the positives in doubt are soon beyond R, where nothing is to be decided.
        pairs (n, 4): query, item, and the range of positives in doubt as `MeasuredPairs` has it.
        """
        with self.lock:
            self.postponed.append(pairs)
            return sum(map(len, self.postponed))

    def take_postponed(self) -> np.ndarray:
        """The kept pairs that are still in doubt, sorted by query; none are kept then."""
        with self.lock:
            pairs = self._in_doubt(np.concatenate([np.empty((0, 4), np.int64), *self.postponed]))
            self.postponed = []
        return pairs[np.argsort(pairs[:, 0], kind="stable")]

    def _in_doubt(self, pairs: np.ndarray) -> np.ndarray:
        """Leave out pairs whose positives in doubt are all beyond R."""
        return pairs[pairs[:, 2] < self.lists.active[pairs[:, 0]]]

    def settle(self, pairs: np.ndarray, locks: Sequence[Lock], block: int) -> None:
        """Decide pairs, sorted by query, in float64, and what it leaves open exactly; count them.

        Each block of queries has a lock.
        """
        prepared, pairs = self.prepared, self._in_doubt(pairs)
        q, g, first, end = pairs.T
        squared, error = measure(prepared, q, g, self.distance)
        l2 = exact_l2(prepared, q, g)
        square = prepared.gallery.square[g]
        for n in _runs(np.cumsum(end - first) // _COMPARED, q // block):
            self._add(
                position_kernels.MeasuredPairs(
                    q[n], first[n], end[n], squared[n], error[n], l2[n], square[n]
                ),
                g[n],
                locks[q[n.start] // block],
            )

    def _add(self, pairs: position_kernels.MeasuredPairs, g: np.ndarray, lock: Lock) -> None:
        """Add measured pairs of queries and items g; compare exactly what float64 leaves open."""
        unsure = np.empty((int((pairs.end - pairs.first).sum()), 2), np.int64)
        with lock:
            left = position_kernels.credit_pairs(
                pairs,
                self.distance == "l2",
                self.lists,
                position_kernels.Lattice(self.l2, self.index, self.prepared.gallery.square),
                self.tied,
                unsure,
            )
        pair, m = unsure[:left].T
        q = pairs.query[pair]
        positive = self.lists.start[q] + m
        nearer = compare_exactly(self.prepared, q, g[pair], self.index[positive], self.distance)
        with lock:
            np.add.at(self.tied, positive[nearer >= 0], 1)

    def join(self, world: World) -> None:
        """Add up what the ranks have counted; beyond R for one of them is beyond R."""
        world.add(self.lists.negatives, self.tied)
        world.least(self.lists.active)

    def result(self) -> PositivePositions:
        """The positions within R, ascending."""
        lists = self.lists
        positions, lengths = np.empty(len(self.index), np.int64), np.empty_like(lists.limit)
        position_kernels.positions_within(lists, self.tied, positions, lengths)
        offsets = np.r_[0, np.cumsum(lengths)]
        return PositivePositions(lists.limit, offsets, positions[: offsets[-1]].copy())


def _room_for_negatives(positive_counts: np.ndarray) -> position_kernels.Kept:
    """Room for the negatives of each query that may stand before a positive within R."""
    room = np.minimum(positive_counts + SPARE, ROOM)
    ends = np.cumsum(room)
    total = int(room.sum())
    return position_kernels.Kept(
        start=ends - room,
        room=room,
        held=np.zeros_like(room),
        low=np.empty(total, np.float32),
        high=np.empty(total, np.float32),
        item=np.empty(total, np.int32),
    )


def _runs(*keys: np.ndarray) -> Iterator[slice]:
    """Slices of rows in which each key stays the same."""
    change = np.logical_or.reduce([np.diff(key) != 0 for key in keys])
    ends = [0, *(np.flatnonzero(change) + 1).tolist(), len(keys[0])]
    return (slice(*pair) for pair in pairwise(ends) if pair[0] < pair[1])


def listed_positives(
    prepared: Prepared, classes: Classes, world: World = ALONE
) -> dict[str, ListedPositives]:
    """Measure all positives of every query and sort them; the ranks share out the classes."""
    counts = prepared.positive_counts
    start, P = np.cumsum(counts) - counts, int(counts.sum())
    out = {d: ListedPositives.of_size(P, prepared.lattice) for d in prepared.distances}

    def pairwise_measured(queries: np.ndarray) -> None:
        q, g = classes.pairs(queries)
        run, l2 = np.cumsum(np.r_[False, q[1:] != q[:-1]])[: len(q)], exact_l2(prepared, q, g)
        n = counts[queries]
        to = np.repeat(start[queries] - (np.cumsum(n) - n), n) + np.arange(len(q))
        for d, found in out.items():
            squared, error = measure(prepared, q, g, d)
            order = np.lexsort((squared, run))
            found.index[to] = g[order]
            found.nearest[to], found.farthest[to] = (
                (squared - error)[order],
                (squared + error)[order],
            )
            if prepared.lattice:
                found.l2[to] = l2[order]

    def whole_classes(parts: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for queries, members in parts:
            measured = measure_class(prepared, queries, members)
            for d, found in out.items():
                position_kernels.list_rows(
                    np.argsort(measured[d][0], axis=1),
                    *measured[d],
                    measured["l2"][0],
                    members,
                    start[queries],
                    counts[queries],  # all but the query itself, which is infinitely far
                    (found.index, found.nearest, found.farthest, found.l2),
                )

    small, large = classes.by_size()
    tasks = [partial(pairwise_measured, queries) for queries in classes.chunks(small)]
    products = []
    for queries, members in classes.products(large):
        if len(members) * classes.dim > _NUMBERS:
            tasks += [partial(pairwise_measured, part) for part in classes.chunks(queries)]
        else:
            parts = slices(len(queries), max(1, _PAIRS // len(members)))
            products += [(queries[part], members) for part in parts]
    tasks += [partial(whole_classes, some) for some in together(products)]
    run_all(call, world.share(tasks), prepared.threads)
    for found in out.values():
        world.complete(found.index, found.nearest, found.farthest, found.l2)
    return out
