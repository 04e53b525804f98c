"""The nearest right item of every query: the threshold that wrong items are counted against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from retrieval.pairs import compare_exactly, measure
from retrieval.sides import ULP32, Side
from retrieval.threads import run_all

_LARGE = 1 << 21  # multiplications: classes with more go through a float32 product first
_SMALL = 1 << 30  # multiplications that one thread does sooner than several
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
        """Runs of queries whose pairs are about _CHUNK bytes of vectors."""
        chunk = np.cumsum(self.size[q]) * dim * 4 // _CHUNK
        return np.split(q, np.flatnonzero(np.diff(chunk)) + 1) if len(q) else []


def nearest_right(
    asks: Side,
    items: Side,
    classes: Classes,
    group: np.ndarray,
    distances: tuple[str, ...],
    lattice: bool,
    threads: int,
) -> dict[str, Positives]:
    """For each distance. `group` names identical gallery rows by one number."""
    Q = len(asks)
    out = {d: Positives(np.full(Q, -1), np.zeros(Q), np.zeros(Q), np.zeros(Q)) for d in distances}
    large = classes.size * classes.size * items.dim > _LARGE

    def small_classes(q: np.ndarray) -> None:
        q, g = classes.pairs(q)
        _pick(asks, q, items, g, group, lattice, out)

    def large_class(queries: np.ndarray) -> None:
        members = classes.members(queries[0])
        for q in np.array_split(*_blocked(queries, 512)):
            found = _candidates(asks, q, items, members, classes.self_ids, distances)
            for d, (mine, g) in found.items():
                _pick(asks, mine, items, g, group, lattice, {d: out[d]})

    by_label = np.argsort(asks.labels, kind="stable")
    few, many = by_label[~large[by_label]], by_label[large[by_label]]
    tasks = [partial(small_classes, q) for q in classes.chunks(few, items.dim)]
    tasks += [
        partial(large_class, q) for q in np.split(many, _starts(asks.labels[many])[1:]) if len(q)
    ]
    # Many small steps on several threads wait for each other more than they work.
    work = np.sum(classes.size, dtype=np.float64) * items.dim
    run_all([(task, 1) for task in tasks], threads if work > _SMALL else 1)
    return out


def _blocked(index: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    return index, max(1, -(-len(index) // size))


def _candidates(
    asks: Side,
    q: np.ndarray,
    items: Side,
    members: np.ndarray,
    self_ids: np.ndarray,
    distances: tuple[str, ...],
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs (query, member) that a float32 product cannot rule out as the nearest."""
    units = asks.units(q)
    bound = {d: np.full(len(q), np.inf) for d in distances}  # the nearest is at most this far
    kept: dict[str, list] = {d: [] for d in distances}
    for g in np.array_split(*_blocked(members, 2048)):
        s = np.matmul(units, items.units(g).T).astype(np.float64)  # (A, B)
        for d in distances:
            far, error = _estimate(s, asks, q, items, g, d)
            far[self_ids[q, None] == g] = np.inf
            bound[d] = np.minimum(bound[d], (far + error).min(axis=1))
            near = far - error
            row, column = np.nonzero(near <= np.minimum(bound[d], np.finfo(float).max)[:, None])
            kept[d].append((row, g[column], near[row, column]))
    out = {}
    for d in distances:
        row, g, near = (np.concatenate(part) for part in zip(*kept[d], strict=True))
        keep = np.flatnonzero(near <= bound[d][row])
        keep = keep[np.argsort(row[keep], kind="stable")]
        out[d] = q[row[keep]], g[keep]
    return out


def _estimate(
    s: np.ndarray, asks: Side, q: np.ndarray, items: Side, g: np.ndarray, d: str
) -> tuple[np.ndarray, np.ndarray | float]:
    """Squared distances (A, B) from float32 cosines, and how far off they may be."""
    margin = 2 * (items.dim + 16) * ULP32
    if d == "cos":
        return 2 - 2 * s, margin
    lengths = asks.norm[q, None] * items.norm[g]
    squares = asks.square[q, None] + items.square[g]
    return squares - 2 * lengths * s, margin * lengths + 1e-12 * squares


def _pick(
    asks: Side,
    q: np.ndarray,
    items: Side,
    g: np.ndarray,
    group: np.ndarray,
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
        value, error = measured[d]
        bound = np.minimum.reduceat(value + error, starts)
        near = np.flatnonzero(value - error <= bound[segment])
        near = near[np.lexsort((value[near], segment[near]))]
        best = near[_starts(segment[near])]
        # Identical rows are no rivals; nor are equals whose distances have no error.
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
