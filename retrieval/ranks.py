"""The exact rank of every query's nearest right item, by counting instead of sorting.

rank = 1 + number of wrong items at least as near as the nearest right one; a tie never helps.
1. The nearest right item, within classes, in float64 (`positives`).
2. Blocks of one float32 product of unit vectors. With s = cos(q, x) it decides both distances:
   cos by s itself, l2 because |q - x|^2 <= T  <=>  2 |q| |x| s >= |x|^2 - (T - |q|^2).
   Each verdict has a margin that covers every rounding error; what lies outside is counted.
3. What lies inside is decided pair by pair in float64, and what float64 cannot tell apart in
   exact arithmetic. Tiles with too many open pairs (collapsed embeddings) first go through a
   float64 product of centred vectors.
So the ranks are those of real arithmetic, whatever the block size, thread count or row order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from retrieval import kernels
from retrieval.duplicates import blocks, row_groups
from retrieval.pairs import compare_exactly, is_lattice, measure
from retrieval.positives import nearest_right
from retrieval.sides import ULP32, ULP64, Side
from retrieval.threads import Progress, processors, run_all

_PAIRS = 1 << 14  # open pairs decided at a time
_DISTANCES = ("cos", "l2")


@dataclass(frozen=True)
class Ranks:
    """Per query: its rank (0: no right item in the gallery), ties and nearest right item."""

    rank: np.ndarray  # (Q,) int64
    ties: np.ndarray  # (Q,) int64, wrong items exactly as near as the nearest right one
    nearest: np.ndarray  # (Q,) int64, gallery index, -1 if there is none


def count_ranks(
    gallery: np.ndarray,
    gallery_labels: np.ndarray,
    queries: np.ndarray | None = None,
    query_labels: np.ndarray | None = None,
    *,
    self_ids: np.ndarray | None = None,
    distances: tuple[str, ...] = _DISTANCES,
    memory: int = 2 << 30,
    threads: int | None = None,
    block: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Ranks]:
    """Ranks of queries (Q, D) in gallery (G, D), labels as int64 codes, for each distance.

    Without queries every gallery item asks all others. `self_ids` (Q,) names the gallery row that
    is the query itself (-1: none): it is left out by identity. Vectors must be finite.
    """
    threads = threads or processors()
    symmetric = queries is None
    items = Side(gallery, gallery_labels, memory // 4, threads)
    asks = items if symmetric else Side(queries, query_labels, memory // 4, threads)
    if symmetric:
        self_ids = np.arange(len(items))
    elif self_ids is None:
        self_ids = np.full(len(asks), -1)
    if block is None:  # enough tiles to share out, each large enough for a product at full speed
        block = min(1024, max(256, len(items) // 16))
    with threadpool_limits(1, user_api="blas"):  # one tile per thread, not one product on all
        engine = _Engine(asks, items, np.asarray(self_ids, np.int64), distances, threads, block)
        engine.count(progress)
    return engine.result()


class _Engine:
    """One count: the two sides, the thresholds of the queries, and the counters."""

    def __init__(
        self,
        asks: Side,
        items: Side,
        self_ids: np.ndarray,
        distances: tuple[str, ...],
        threads: int,
        block: int,
    ) -> None:
        self.asks, self.items, self.self_ids = asks, items, self_ids
        self.distances, self.threads, self.block = distances, threads, block
        self.symmetric = asks is items
        self.group = row_groups(items.vectors)
        self.lattice = is_lattice(asks, items)
        self.right = nearest_right(
            asks, items, self_ids, self.group, distances, self.lattice, threads
        )
        self.margin = np.float32((items.dim + 16) * ULP32)
        self.ask, self.item = self._thresholds()
        self.wanted = {  # the group of identical rows that ties with the nearest right item
            d: np.where(r.index >= 0, self.group[r.index], -1) for d, r in self.right.items()
        }
        if "cos" in distances:  # to a query of length zero, every item is as near as any other
            self.wanted["cos"][(asks.norm == 0) & (self.right["cos"].index >= 0)] = kernels.ANY
        self.counts = {d: np.zeros(len(asks), np.int64) for d in distances}
        self.ties = {d: np.zeros(len(asks), np.int64) for d in distances}
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self._centres: dict[str, np.ndarray] = {}

    def result(self) -> dict[str, Ranks]:
        return {
            d: Ranks(
                np.where(self.right[d].index >= 0, self.counts[d] + 1, 0),
                self.ties[d],
                self.right[d].index,
            )
            for d in self.distances
        }

    def _thresholds(self) -> tuple[np.ndarray, np.ndarray]:
        """What kernels.count_rows compares: ask (5, Q) and item (3, G), float32, rounded outward.

        Lengths are scaled by a power of two so that float32 can hold their squares; what is lost
        below 2^-100 is slack, not error.
        """
        top = max(self.asks.norm.max(initial=0.0), self.items.norm.max(initial=0.0))
        scale = 2.0 ** -np.ceil(np.log2(top)) if top > 0 else 1.0
        ask = np.zeros((5, len(self.asks)))
        ask[:2], ask[3:] = np.inf, -np.inf  # a query without right item, or a distance not asked
        if "cos" in self.right:
            right = self.right["cos"]
            has = right.index >= 0
            cos, err = 1 - right.value[has] / 2, right.error[has] / 2 + 4 * ULP64
            ask[0, has], ask[1, has] = cos + err + self.margin, cos - err - self.margin
        if "l2" in self.right:
            right = self.right["l2"]
            has = right.index >= 0
            square = self.asks.square[has] * scale**2
            tau = right.value[has] * scale**2 - square
            err = right.error[has] * scale**2 + (self.items.dim + 8) * ULP64 * square
            err += 4 * ULP32 * np.abs(tau) + 2.0**-100
            ask[2, has] = 2 * self.asks.norm[has] * scale
            ask[3, has], ask[4, has] = tau - err, tau + err
        norm = self.items.norm * scale
        slack = 4 * ULP32 * norm**2 + 2.0**-100
        item = np.stack([norm, norm**2 + slack, norm**2 - slack]).astype(np.float32)
        ask = ask.astype(np.float32)
        ask[0] = np.nextafter(ask[0], np.float32(np.inf))
        ask[1] = np.nextafter(ask[1], np.float32(-np.inf))
        return ask, item

    def count(self, progress: Progress | None) -> None:
        q_parts = list(_parts(len(self.asks), self.block))
        g_parts = list(_parts(len(self.items), self.block))
        # Longest first, so that the threads end together.
        tasks = [
            (g, q_parts[: n + 1] if self.symmetric else q_parts) for n, g in enumerate(g_parts)
        ][::-1]
        run_all(
            [(partial(self._column, g, parts), len(parts)) for g, parts in tasks],
            self.threads,
            progress,
            self.stop.set,
        )

    def _column(self, g: slice, parts: list[slice]) -> None:
        """All queries of `parts` against the gallery block g; the task of one thread."""
        work = _Worker(self)
        units = self.items.units(g)
        for q in parts:
            if self.stop.is_set():
                return
            both = self.symmetric and q != g
            S = np.matmul(self.asks.units(q), units.T)  # (A, B)
            own = self._own(q, g)
            rows = np.flatnonzero(own >= 0)
            S[rows, own[rows]] = np.nan  # compares false: neither counted nor doubtful
            for transposed in (False, True) if both else (False,):
                self._tile(S, g if transposed else q, q if transposed else g, transposed, work)
        work.settle_all()
        with self.lock:
            for d in self.distances:
                self.counts[d] += work.counts[d]
                self.ties[d] += work.ties[d]

    def _own(self, q: slice, g: slice) -> np.ndarray:
        own = self.self_ids[q] - g.start
        return np.where((own >= 0) & (own < g.stop - g.start), own, -1)

    def _tile(self, S: np.ndarray, q: slice, g: slice, transposed: bool, work: _Worker) -> None:
        """Counts one tile for the askers q; they are its rows, or its columns if transposed."""
        ask, item = self.ask[:, q], self.item[:, g]
        counts = np.empty((4, ask.shape[1]), np.int32)
        count = kernels.count_columns if transposed else kernels.count_rows
        count(S, self.margin, ask, item, counts)
        everything = np.arange(item.shape[1])
        for d in self.distances:
            sure, possible = counts[:2] if d == "cos" else counts[2:]
            flagged = np.flatnonzero(sure != possible)
            found, tied = 0, np.zeros(len(sure), np.int64)
            if len(flagged):
                rows, cols = (everything, flagged) if transposed else (flagged, everything)
                found = kernels.doubtful(
                    *(S, self.margin, d == "l2", rows, cols, not transposed, ask, item),
                    *(self.asks.labels[q], self.items.labels[g]),
                    *(self.wanted[d][q], self.group[g], tied, work.pairs),
                )
            if found < 0:
                self._tile_float64(d, q, g, work)
                continue
            work.counts[d][q] += sure + tied
            work.ties[d][q] += tied
            work.add(d, work.pairs[:found], q.start, g.start)

    def _tile_float64(self, d: str, q: slice, g: slice, work: _Worker) -> None:
        Y, Z = self._centred(d, self.asks, q), self._centred(d, self.items, g)
        w_q, w_g = (np.einsum("ij,ij->i", A, A) for A in (Y, Z))
        if d == "cos":  # a zero row has no direction: infinite error, decided pair by pair
            w_q[self.asks.norm[q] == 0] = np.inf
            w_g[self.items.norm[g] == 0] = np.inf
        right = self.right[d]
        limit = np.stack([right.value[q] - right.error[q], right.value[q] + right.error[q]])
        limit[:, right.index[q] < 0] = -np.inf
        dim = self.items.dim
        extra = (6 * ULP64, ((dim + 16) * ULP64) ** 2) if d == "cos" else (0.0, 1e-290)
        slack = np.array([(8 * dim + 64) * ULP64, *extra])
        P, first = Y @ Z.T, 0
        while first < len(P):
            if self.stop.is_set():
                return
            first, found = kernels.count_float64(
                *(P, first, w_q, w_g, limit, slack, self._own(q, g)),
                *(self.asks.labels[q], self.items.labels[g]),
                *(self.wanted[d][q], self.group[g]),
                *(work.counts[d][q], work.ties[d][q], work.pairs),
            )
            work.add(d, work.pairs[:found], q.start, g.start)

    def _centred(self, d: str, side: Side, part: slice) -> np.ndarray:
        """float64 rows less the gallery's mean: distances stay, the digits they share go."""
        with self.lock:
            if d not in self._centres:
                total = np.zeros(self.items.dim)
                for some in blocks(self.items.vectors):
                    total += _points(d, self.items, some).sum(axis=0)
                self._centres[d] = total / len(self.items)
        return _points(d, side, part) - self._centres[d]


class _Worker:
    """The counters and open pairs of one thread."""

    def __init__(self, engine: _Engine) -> None:
        self.engine = engine
        Q = len(engine.asks)
        self.counts = {d: np.zeros(Q, np.int64) for d in engine.distances}
        self.ties = {d: np.zeros(Q, np.int64) for d in engine.distances}
        self.pairs = np.empty((max(_PAIRS, engine.block), 2), np.int64)  # a row must fit
        self.open: dict[str, list[np.ndarray]] = {d: [] for d in engine.distances}

    def add(self, d: str, pairs: np.ndarray, q_start: int, g_start: int) -> None:
        """Takes open pairs (asker, item) of a tile."""
        self.open[d].append(pairs + np.array([q_start, g_start]))
        if sum(map(len, self.open[d])) >= _PAIRS:
            self.settle(d)

    def settle_all(self) -> None:
        for d in self.open:
            self.settle(d)

    def settle(self, d: str) -> None:
        """Decides the open pairs in float64, the rest exactly."""
        if not self.open[d]:
            return
        engine, (q, g) = self.engine, np.concatenate(self.open[d]).T
        self.open[d].clear()
        right = engine.right[d]
        measured = measure(engine.asks, q, engine.items, g, engine.lattice)
        value, error = measured[d]
        verdict = np.zeros(len(q), np.int8)
        verdict[value + error < right.value[q] - right.error[q]] = 1
        verdict[value - error > right.value[q] + right.error[q]] = -1
        unsure = (verdict == 0) & ((error > 0) | (right.error[q] > 0))
        if d == "cos" and engine.lattice:
            # Items of one length rank alike under both distances, and there l2 is exact.
            square = engine.items.square
            level = unsure & (square[g] == square[right.index[q]])
            verdict[level] = np.sign(right.l2[q] - measured["l2"][0])[level]
            unsure &= ~level
        verdict[unsure] = compare_exactly(
            engine.asks, q[unsure], engine.items, g[unsure], right.index[q][unsure], d
        )
        np.add.at(self.counts[d], q[verdict >= 0], 1)
        np.add.at(self.ties[d], q[verdict == 0], 1)


def _parts(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _points(d: str, side: Side, part: slice) -> np.ndarray:
    """The points whose Euclidean distances rank like `d`, in float64."""
    return side.units64(part) if d == "cos" else side.vectors[part].astype(np.float64)
