"""One count of wrong items against right ones: tiles of the product, shared out over threads."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

from retrieval.ranking import kernels
from retrieval.ranking.identical_rows import direction_groups, row_groups
from retrieval.ranking.nearest_positive import Classes, nearest_right
from retrieval.ranking.pair_distance import compare_exactly, is_lattice, measure
from retrieval.ranking.positions import right_items
from retrieval.ranking.vectors import ULP32, ULP64, Side
from retrieval.resources import Progress, blocks, run_all, slices

_PAIRS = 1 << 14  # open pairs decided at a time
_LAST = {"cos": 1, "l2": 4}  # the rows of `ask` that say what is possible


class Engine:
    """The two sides, the thresholds of the queries, and the counters."""

    def __init__(
        self,
        asks: Side,
        items: Side,
        self_ids: np.ndarray,
        distances: tuple[str, ...],
        places: bool,
        threads: int,
        block: int,
    ) -> None:
        self.asks, self.items, self.self_ids = asks, items, self_ids
        self.distances, self.threads, self.block = distances, threads, block
        self.symmetric = asks is items
        rows = row_groups(items.vectors)
        # Rows as near as each other to any query: identical ones, for cos parallel ones.
        self.groups = {"rows": rows, "l2": rows}
        if "cos" in distances:
            self.groups["cos"] = direction_groups(items.vectors, items.units, rows)
        self.lattice = is_lattice(asks, items)
        self.margin = np.float32((items.dim + 16) * ULP32)
        top = max(asks.norm.max(initial=0.0), items.norm.max(initial=0.0))
        self.scale = 2.0 ** -np.ceil(np.log2(top)) if top > 0 else 1.0
        classes = Classes(asks, items, self_ids)
        shared = (distances, self.lattice, threads)
        self.right = nearest_right(asks, items, classes, self.groups, *shared, self.scale)
        self.ask, self.item = self._thresholds()
        self.wanted = {  # the group of rows that tie with the nearest right item
            d: np.where(r.index >= 0, self.groups[d][r.index], -1) for d, r in self.right.items()
        }
        if "cos" in distances:  # to a query of length zero, every item is as near as any other
            self.wanted["cos"][(asks.norm == 0) & (self.right["cos"].index >= 0)] = kernels.ANY
        self.counts = {d: np.zeros(len(asks), np.int64) for d in distances}
        self.ties = {d: np.zeros(len(asks), np.int64) for d in distances}
        self.places = right_items(asks, items, classes, *shared) if places else {}
        for d, listed in self.places.items():
            owner = np.repeat(np.arange(len(asks)), listed.limit)
            bounds = self._nearness(d, owner, listed.value, listed.error)
            listed.finish(items, self.groups[d], bounds)
        self.last = self._last()
        self.locks = {part.start: threading.Lock() for part in slices(len(asks), block)}
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self._centres: dict[str, np.ndarray] = {}

    def _nearness(
        self, d: str, q: np.ndarray, value: np.ndarray, error: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The nearness of items at squared distance value +- error from queries q, float32.

        Nearness is what the kernels compute: the cosine, or 2 |q| |x| cos - |x|^2 for l2, which
        grows as the distance shrinks. Surely at least as near is what reaches the first bound,
        possibly what reaches the second: rounded outward, with every error of the product.
        Lengths are scaled by a power of two so that float32 can hold their squares; what is lost
        below 2^-100 is slack, not error.
        """
        if d == "cos":
            middle, slack = 1 - value / 2, error / 2 + 4 * ULP64 + self.margin
        else:
            square = self.asks.square[q] * self.scale**2
            middle = square - value * self.scale**2
            slack = error * self.scale**2 + (self.items.dim + 8) * ULP64 * square
            slack += 4 * ULP32 * np.abs(middle) + 2.0**-100
        sure, possible = (middle + slack).astype(np.float32), (middle - slack).astype(np.float32)
        return np.nextafter(sure, np.float32(np.inf)), np.nextafter(possible, np.float32(-np.inf))

    def _thresholds(self) -> tuple[np.ndarray, np.ndarray]:
        """What kernels.count_rows compares: ask (5, Q) and item (3, G), float32."""
        ask = self._unasked()
        for d, right in self.right.items():
            has = np.flatnonzero(right.index >= 0)
            sure, possible = self._nearness(d, has, right.value[has], right.error[has])
            if d == "cos":
                ask[0, has], ask[1, has] = sure, possible
            else:
                ask[3, has], ask[4, has] = -sure, -possible
        norm = self.items.norm * self.scale
        slack = 4 * ULP32 * norm**2 + 2.0**-100
        return ask, np.stack([norm, norm**2 + slack, norm**2 - slack]).astype(np.float32)

    def _unasked(self) -> np.ndarray:
        """ask (5, Q) that no item reaches: of queries without right item, distances not wanted."""
        ask = np.empty((5, len(self.asks)), np.float32)
        ask[:2], ask[3:] = np.inf, -np.inf
        ask[2] = 2 * self.asks.norm * self.scale
        return ask

    def _last(self) -> np.ndarray:
        """ask (5, Q) for the farthest right item of each query that may stand within R."""
        last = self._unasked()
        for d, places in self.places.items():
            last[_LAST[d]] = places.last() if d == "cos" else -places.last()
        return last

    def count(self, progress: Progress | None) -> None:
        q_parts = list(slices(len(self.asks), self.block))
        g_parts = list(slices(len(self.items), self.block))
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
                    *(self.wanted[d][q], self.groups[d][g], tied, work.pairs),
                )
            if found < 0:
                self._tile_float64(d, q, g, work)
                continue
            work.counts[d][q] += sure + tied
            work.ties[d][q] += tied
            work.add(d, work.pairs[:found], q.start, g.start)
        if self.places:
            count(S, self.margin, self.last[:, q], item, counts)
            for d in self.distances:
                flagged = np.flatnonzero(counts[1 if d == "cos" else 3])
                self._place(d, S, flagged, q, g, transposed, work)

    def _place(
        self,
        d: str,
        S: np.ndarray,
        flagged: np.ndarray,
        q: slice,
        g: slice,
        transposed: bool,
        work: _Worker,
    ) -> None:
        """Credits the tile's wrong items to the right items of the flagged askers."""
        places, last, first = self.places[d], self.last[_LAST[d]], 0
        while first < len(flagged) and not self.stop.is_set():
            with self.locks[q.start]:
                first, found = kernels.place(
                    *(S, self.margin, d == "l2", flagged, first, not transposed),
                    *(self.last[2, q], self.item[:, g], self.asks.labels[q]),
                    *(self.items.labels[g], self.groups[d][g], places.start[q], places.limit[q]),
                    *(
                        places.active[q],
                        places.total[q],
                        places.wrong,
                        places.soonest,
                        places.group,
                    ),
                    *(places.sure, places.possible, last[q], work.pairs),
                )
                if found:
                    asking, items = work.pairs[:found].T
                    places.settle(self.asks, asking + q.start, self.items, items + g.start, last)

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
                *(self.wanted[d][q], self.groups[d][g]),
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

    def __init__(self, engine: Engine) -> None:
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


def _points(d: str, side: Side, part: slice) -> np.ndarray:
    """The points whose Euclidean distances rank like `d`, in float64."""
    return side.units64(part) if d == "cos" else side.vectors[part].astype(np.float64)
