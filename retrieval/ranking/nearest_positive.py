"""The nearest right item of every query: the threshold that wrong items are counted against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from retrieval.ranking.pair_distance import compare_exactly, measure
from retrieval.ranking.vectors import ULP32, Side
from retrieval.resources import run_all, slices

_LARGE = 1 << 21  # multiplications: classes with more go through a float32 product first
_SMALL = 1 << 30  # multiplications that one thread does sooner than several
_PAIR_BYTES = 200
_CHUNK = 1 << 26  # bytes of rows looked at in one go


@dataclass(frozen=True)
class Positives:
    """Per query: its nearest right item and the squared distance to it, with the error bound."""

    index: np.ndarray  # (Q,) int64 gallery index, -1 if there is none
    value: np.ndarray  # (Q,) squared l2 distance, or squared chord for cos
    error: np.ndarray  # (Q,)
    l2: np.ndarray  # (Q,) squared l2 distance to the same item


class Classes:
    """Which gallery items are right for which query."""

    def __init__(self, asks: Side, items: Side, self_ids: np.ndarray) -> None:
        self.self_ids = self_ids
        self.order = np.argsort(items.labels, kind="stable")
        labels = items.labels[self.order]
        self.start = np.searchsorted(labels, asks.labels, "left")
        self.size = np.searchsorted(labels, asks.labels, "right") - self.start  # with self
        own = (self_ids >= 0) & (items.labels[self_ids] == asks.labels)
        self.others = self.size - own  # (Q,) right items of each query

    def members(self, query: int) -> np.ndarray:
        return self.order[self.start[query] : self.start[query] + self.size[query]]

    def pairs(self, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each query with each of its right items."""
        n = self.size[q]
        place = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
        g = self.order[np.repeat(self.start[q], n) + place]
        q = np.repeat(q, n)
        keep = g != self.self_ids[q]
        return q[keep], g[keep]

    def chunks(self, q: np.ndarray, dim: int) -> list[np.ndarray]:
        """Runs of queries whose pairs take about _CHUNK bytes."""
        chunk = np.cumsum(self.size[q]) * max(dim * 4, _PAIR_BYTES) // _CHUNK
        return np.split(q, np.flatnonzero(np.diff(chunk)) + 1) if len(q) else []


def nearest_right(
    asks: Side,
    items: Side,
    classes: Classes,
    groups: dict[str, np.ndarray],
    distances: tuple[str, ...],
    lattice: bool,
    threads: int,
    scale: float,
) -> dict[str, Positives]:
    """For each distance. Gallery rows of one group are as near as each other to any query."""
    Q = len(asks)
    out = {d: Positives(np.full(Q, -1), np.zeros(Q), np.zeros(Q), np.zeros(Q)) for d in distances}
    large = classes.size * classes.size * items.dim > _LARGE

    def small_classes(q: np.ndarray) -> None:
        q, g = classes.pairs(q)
        _pick(asks, q, items, g, groups, lattice, out)

    def large_class(q: np.ndarray, members: np.ndarray) -> None:
        found = _candidates(asks, q, items, members, classes.self_ids, distances, scale)
        for d, (mine, g) in found.items():
            _pick(asks, mine, items, g, groups, lattice, {d: out[d]})

    by_label = np.argsort(asks.labels, kind="stable")
    few, many = by_label[~large[by_label]], by_label[large[by_label]]
    tasks = [partial(small_classes, q) for q in classes.chunks(few, items.dim)]
    for queries in np.split(many, _starts(asks.labels[many])[1:]) if len(many) else ():
        members = _two_of_each(classes.members(queries[0]), groups["rows"])
        tasks += [
            partial(large_class, queries[part], members) for part in slices(len(queries), 512)
        ]
    # Many small steps on several threads wait for each other more than they work.
    work = np.sum(classes.size, dtype=np.float64) * items.dim
    run_all([(task, 1) for task in tasks], threads if work > _SMALL else 1)
    return out


def _two_of_each(members: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Two of every set of identical rows: one is enough, unless it is the query itself."""
    order = members[np.argsort(group[members], kind="stable")]
    third = np.zeros(len(order), bool)
    third[2:] = group[order[2:]] == group[order[:-2]]
    return order[~third]


def _candidates(
    asks: Side,
    q: np.ndarray,
    items: Side,
    members: np.ndarray,
    self_ids: np.ndarray,
    distances: tuple[str, ...],
    scale: float,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs (query, member) that a float32 product cannot rule out as the nearest."""
    units = asks.units(q)
    best = {d: np.full(len(q), -np.inf, np.float32) for d in distances}
    kept: dict[str, list] = {d: [] for d in distances}
    for part in slices(len(members), 2048):
        g = members[part]
        s = np.matmul(units, items.units(g).T)  # (A, B)
        own = self_ids[q, None] == g
        for d in distances:
            near, slack = _nearness(s, asks, q, items, g, d, scale)
            near[own] = -np.inf
            best[d] = np.maximum(best[d], near.max(axis=1) - slack)
            row, column = np.nonzero(near >= (best[d] - slack)[:, None])
            kept[d].append((row, g[column], near[row, column] + slack[row]))
    out = {}
    for d in distances:
        row, g, near = (np.concatenate(part) for part in zip(*kept[d], strict=True))
        keep = np.flatnonzero((near >= best[d][row]) & np.isfinite(near))
        keep = keep[np.argsort(row[keep], kind="stable")]
        out[d] = q[row[keep]], g[keep]
    return out


def _nearness(
    s: np.ndarray, asks: Side, q: np.ndarray, items: Side, g: np.ndarray, d: str, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Nearness (A, B) in float32, cos or 2 |q| |x| cos - |x|^2, and how far off each row may be."""
    margin = np.full(len(q), (items.dim + 24) * ULP32, np.float32)
    if d == "cos":
        return s.copy(), margin
    twice = (2 * asks.norm[q] * scale).astype(np.float32)
    norm = (items.norm[g] * scale).astype(np.float32)
    near = s * twice[:, None] * norm - norm * norm
    top = norm.max()
    return near, margin * twice * top + np.float32(8 * ULP32) * top * top + np.float32(2.0**-100)


def _pick(
    asks: Side,
    q: np.ndarray,
    items: Side,
    g: np.ndarray,
    groups: dict[str, np.ndarray],
    lattice: bool,
    out: dict[str, Positives],
) -> None:
    """Writes the nearest of each query's candidates; pairs come sorted by query."""
    if not len(q):
        return
    measured = measure(asks, q, items, g, lattice)
    starts = _starts(q)
    segment = np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, len(q)]))
    for d, positives in out.items():
        (value, error), group = measured[d], groups[d]
        bound = np.minimum.reduceat(value + error, starts)
        near = np.flatnonzero(value - error <= bound[segment])
        near = near[np.lexsort((value[near], segment[near]))]
        best = near[_starts(segment[near])]
        # Rows of one group are no rivals; nor are equals whose distances have no error.
        held = best[segment[near]]
        rivals = near[(group[g[near]] != group[g[held]]) & (error[near] + error[held] > 0)]
        while len(rivals):  # one rival of each query per round
            turn = _starts(segment[rivals])
            now = rivals[turn]
            held = best[segment[now]]
            wins = now[compare_exactly(asks, q[now], items, g[now], g[held], d) > 0]
            best[segment[wins]] = wins
            rivals = np.delete(rivals, turn)
        who = q[best]
        positives.index[who] = g[best]
        positives.value[who], positives.error[who] = value[best], error[best]
        positives.l2[who] = measured["l2"][0][best]


def _starts(run: np.ndarray) -> np.ndarray:
    """Where each run of equal numbers begins."""
    return np.flatnonzero(np.r_[True, run[1:] != run[:-1]]) if len(run) else np.empty(0, np.int64)
