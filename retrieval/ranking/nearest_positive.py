"""The nearest positive of every query: the threshold that negatives are counted against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import call

import numpy as np

from retrieval.distributed.world import ALONE, World
from retrieval.ranking import kernels, position_kernels
from retrieval.ranking.pair_distance import compare_exactly, exact_l2, measure
from retrieval.ranking.vectors import ULP32, Prepared
from retrieval.resources import run_all, slices

_LARGE = 1 << 21  # multiplications: classes with more go through a float32 product first
_QUERIES = 512  # queries of a large class looked at together
_MEMBERS = 2048  # items of such a class looked at together
_SMALL = 1 << 28  # multiplications that one thread does sooner than several
_TOGETHER = 1 << 18  # pairs of large classes looked at in one go, at most
_TASKS = 16  # of large classes, at least: the same in all processes, whatever their threads
_PAIR_BYTES = 200
_SHARP = 1e-9  # the relative error up to which a listed distance serves as a threshold
_CHUNK = 1 << 26  # bytes of rows looked at in one go


@dataclass(frozen=True)
class NearestPositives:
    """The nearest positive of each query and the squared distance to it, with its error bound."""

    index: np.ndarray  # (Q,) int64 gallery index, -1 if there is none
    squared: np.ndarray  # (Q,) squared l2 distance, or squared chord for cos
    error: np.ndarray  # (Q,)
    l2: np.ndarray  # (Q,) squared l2 distance to the same item, as `exact_l2` has it


class Classes:
    """The gallery items of each query's class."""

    def __init__(self, prepared: Prepared) -> None:
        self.self_ids, self.codes = prepared.self_ids, prepared.queries.codes
        self.dim = prepared.gallery.dim
        self.order = np.argsort(prepared.gallery.codes, kind="stable")
        codes = prepared.gallery.codes[self.order]
        self.start = np.searchsorted(codes, prepared.queries.codes, "left")
        self.size = np.searchsorted(codes, prepared.queries.codes, "right") - self.start

    def members(self, query: int) -> np.ndarray:
        """The gallery items of the query's class, the query itself included."""
        return self.order[self.start[query] : self.start[query] + self.size[query]]

    def pairs(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each query with each of its positives."""
        n = self.size[q]
        offset = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
        g = self.order[np.repeat(self.start[q], n) + offset]
        q = np.repeat(q, n)
        keep = g != self.self_ids[q]
        return q[keep], g[keep]

    def by_size(self) -> tuple[np.ndarray, np.ndarray]:
        """All queries, class by class: those of small classes, and those of large ones."""
        large = self.size * self.size * self.dim > _LARGE
        by_class = np.argsort(self.codes, kind="stable")
        return by_class[~large[by_class]], by_class[large[by_class]]

    def products(self, q: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The queries of each class with the items of that class, for queries sorted by class."""
        for queries in np.split(q, _starts(self.codes[q])[1:]) if len(q) else ():
            yield queries, self.members(queries[0])

    def chunks(self, q: np.ndarray) -> list[np.ndarray]:
        """Runs of queries whose pairs take about _CHUNK bytes."""
        chunk = np.cumsum(self.size[q]) * max(self.dim * 4, _PAIR_BYTES) // _CHUNK
        return np.split(q, np.flatnonzero(np.diff(chunk)) + 1) if len(q) else []


def nearest_positives(
    prepared: Prepared, classes: Classes, world: World = ALONE
) -> dict[str, NearestPositives]:
    """The nearest positive of every query, by each distance; the ranks share out the classes."""
    out = _unknown(prepared)

    def small_classes(q: np.ndarray) -> None:
        _pick(prepared, *classes.pairs(q), out)

    def large_classes(parts: list[tuple[np.ndarray, np.ndarray]]) -> None:
        found = [_candidates(prepared, q, members) for q, members in parts]
        for d in prepared.distances:
            q, g = (np.concatenate([part[d][side] for part in found]) for side in (0, 1))
            _pick(prepared, q, g, {d: out[d]})

    small, large = classes.by_size()
    tasks = [partial(small_classes, q) for q in classes.chunks(small)]
    products = []
    for queries, members in classes.products(large):
        members = _two_of_each(members, prepared.groups["l2"])
        products += [(queries[part], members) for part in slices(len(queries), _QUERIES)]
    tasks += [partial(large_classes, parts) for parts in together(products)]
    # Many small steps on several threads wait for each other more than they work.
    work = np.sum(classes.size, dtype=np.float64) * classes.dim
    threads = prepared.threads if work > _SMALL else 1
    run_all(call, world.share(tasks), threads)
    for found in out.values():
        found.index[:] += 1  # zero: not found by this rank
        world.complete(found.index, found.squared, found.error, found.l2)
        found.index[:] -= 1
    return out


def together(parts: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[list]:
    """Split queries with the items of their class into tasks with about as many pairs each."""
    pairs = np.cumsum([len(queries) * len(members) for queries, members in parts], dtype=np.int64)
    most = min(_TOGETHER, int(pairs[-1]) // _TASKS) if parts else 0
    task = pairs // max(1, most)
    ends = [0, *(np.flatnonzero(np.diff(task)) + 1).tolist(), len(parts)]
    return (parts[start:end] for start, end in pairwise(ends) if start < end)


@dataclass(frozen=True)
class ListedPositives:
    """All positives of every query with their distances, nearest first within a query."""

    index: np.ndarray  # (P,) int32 gallery rows
    nearest: np.ndarray  # (P,) bounds of the squared distance
    farthest: np.ndarray  # (P,)
    l2: np.ndarray  # (P,) squared l2 distance where that is exact: on a lattice; else (0,)

    @classmethod
    def of_size(cls, P: int, lattice: bool) -> ListedPositives:
        """Room for P positives, all zero."""
        numbers = (np.zeros(P), np.zeros(P), np.zeros(P if lattice else 0))
        return cls(np.zeros(P, np.int32), *numbers)


def nearest_listed(
    prepared: Prepared, listed: dict[str, ListedPositives]
) -> dict[str, NearestPositives]:
    """The nearest positive of every query, where all of them have been measured."""
    counts, out = prepared.positive_counts, _unknown(prepared)
    ends = np.cumsum(counts)
    for d, found in listed.items():
        marks = np.empty(len(found.index), np.bool_)
        position_kernels.mark_nearest(ends - counts, counts, found.nearest, found.farthest, marks)
        near = np.flatnonzero(marks)
        q = np.searchsorted(ends, near, "right")
        change = np.r_[True, q[1:] != q[:-1], True]
        sharp = found.farthest[near] * (1 - _SHARP) <= found.nearest[near]
        alone = change[1:] & change[:-1] & sharp
        _write_nearest(out[d], q[alone], found, near[alone])
        q, g = q[~alone], found.index[near[~alone]]
        # One of each group is enough: rows of a group are equally near.
        group = prepared.groups[d][g]
        order = np.lexsort((g, group, q))
        q, g, group = q[order], g[order], group[order]
        first = np.r_[True, (np.diff(q) != 0) | (np.diff(group) != 0)][: len(q)]
        q, g = q[first], g[first]
        order = np.lexsort((g, q))
        q, g = q[order], g[order]
        for part in _query_runs(q):
            _pick(prepared, q[part], g[part], {d: out[d]})
    return out


def _write_nearest(
    out: NearestPositives, q: np.ndarray, found: ListedPositives, r: np.ndarray
) -> None:
    """Write the listed positives r as the nearest ones of the queries q."""
    near, far = found.nearest[r], found.farthest[r]
    out.index[q], out.squared[q], out.error[q] = found.index[r], (near + far) / 2, (far - near) / 2
    out.l2[q] = found.l2[r] if len(found.l2) else np.nan


def _query_runs(owner: np.ndarray) -> Iterator[slice]:
    """Slices of pairs, sorted by query, of about _TOGETHER pairs; a query stays in one."""
    start = 0
    while start < len(owner):
        end = min(start + _TOGETHER, len(owner))
        end = int(np.searchsorted(owner, owner[end - 1], "right"))
        yield slice(start, end)
        start = end


def _unknown(prepared: Prepared) -> dict[str, NearestPositives]:
    Q = len(prepared.queries)
    return {
        d: NearestPositives(np.full(Q, -1), np.zeros(Q), np.zeros(Q), np.zeros(Q))
        for d in prepared.distances
    }


def _two_of_each(members: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Two of every set of identical rows: one is enough, unless it is the query itself."""
    order = members[np.argsort(group[members], kind="stable")]
    third = np.zeros(len(order), bool)
    third[2:] = group[order[2:]] == group[order[:-2]]
    return order[~third]


def _candidates(
    prepared: Prepared, q: np.ndarray, members: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs (query, member) that a float32 product cannot rule out as the nearest."""
    units = prepared.queries.units(q)
    same = prepared.symmetric and np.array_equal(q, members)
    margin = np.float32((prepared.gallery.dim + 24) * ULP32)
    twice = (2 * prepared.queries.norm[q] * prepared.scale).astype(np.float32)
    best = {d: np.full(len(q), -np.inf, np.float32) for d in prepared.distances}
    kept: dict[str, list] = {d: [] for d in prepared.distances}
    for part in slices(len(members), _MEMBERS):
        g = members[part]
        items = units[part] if same else prepared.gallery.units(g)
        cosines = np.matmul(units, items.T)  # (A, B)
        norm = (prepared.gallery.norm[g] * prepared.scale).astype(np.float32)
        for d in prepared.distances:
            sides = kernels.ClassQueries(prepared.self_ids[q], twice), kernels.ClassItems(g, norm)
            row, column, most = kernels.near_members(cosines, d == "l2", margin, *sides, best[d])
            kept[d].append((row, g[column], most))
    out = {}
    for d in prepared.distances:
        row, g, near = (np.concatenate(part) for part in zip(*kept[d], strict=True))
        keep = np.flatnonzero(near >= best[d][row])
        keep = keep[np.argsort(row[keep], kind="stable")]
        out[d] = q[row[keep]], g[keep]
    return out


def _pick(
    prepared: Prepared, q: np.ndarray, g: np.ndarray, out: dict[str, NearestPositives]
) -> None:
    """Write the nearest of each query's candidates; the pairs come sorted by query."""
    if not len(q):
        return
    starts = _starts(q)
    segment = np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, len(q)]))
    for d, positives in out.items():
        (squared, error), group = measure(prepared, q, g, d), prepared.groups[d]
        bound = np.minimum.reduceat(squared + error, starts)
        near = np.flatnonzero(squared - error <= bound[segment])
        near = near[np.lexsort((squared[near], segment[near]))]
        best = near[_starts(segment[near])]
        # Rows of one group are no rivals; nor are equals whose distances have no error.
        held = best[segment[near]]
        rivals = near[(group[g[near]] != group[g[held]]) & (error[near] + error[held] > 0)]
        while len(rivals):  # one rival of each query per round
            turn = _starts(segment[rivals])
            now = rivals[turn]
            held = best[segment[now]]
            wins = now[compare_exactly(prepared, q[now], g[now], g[held], d) > 0]
            best[segment[wins]] = wins
            rivals = np.delete(rivals, turn)
        query = q[best]
        positives.index[query] = g[best]
        positives.squared[query], positives.error[query] = squared[best], error[best]
        positives.l2[query] = exact_l2(prepared, query, g[best])


def _starts(run: np.ndarray) -> np.ndarray:
    """Where each run of equal numbers begins."""
    return np.flatnonzero(np.r_[True, run[1:] != run[:-1]]) if len(run) else np.empty(0, np.int64)
