"""Count negatives tile by tile: blocks of the product of queries and gallery, shared by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import call

import numpy as np

from retrieval.distributed.world import ALONE, World
from retrieval.ranking import kernels
from retrieval.ranking.backends import Backend, Tile
from retrieval.ranking.backends.numpy import NumpyBackend
from retrieval.ranking.nearest_positive import Classes, nearest_listed, nearest_positives
from retrieval.ranking.pair_distance import compare_exactly, exact_l2, measure
from retrieval.ranking.positions import Positions, listed_positives
from retrieval.ranking.thresholds import Thresholds
from retrieval.ranking.vectors import ULP64, Prepared, Vectors
from retrieval.resources import Progress, blocks, run_all, slices, slices_of

_PAIRS = 1 << 14  # open pairs decided at a time
_POSTPONED = 1 << 18  # pairs of a query and a negative, for MAP@R, kept to be decided together
_FLOAT64 = 1024  # rows and columns of a product in float64


class TileCounter:
    """The counters of all queries, and what they are counted with."""

    def __init__(
        self,
        prepared: Prepared,
        positions: bool,
        *,
        block: int | None = None,
        axes: int | None = None,
        devices: tuple[str, ...] = (),
        world: World = ALONE,
    ) -> None:
        self.prepared, self.world = prepared, world
        classes = Classes(prepared)
        listed = listed_positives(prepared, classes, world) if positions else {}
        self.nearest = (
            nearest_listed(prepared, listed)
            if positions
            else nearest_positives(prepared, classes, world)
        )
        self.limits = limits = Thresholds(prepared, self.nearest)
        Q = len(prepared.queries)
        self.counts = {d: np.zeros(Q, np.int64) for d in prepared.distances}
        self.ties = {d: np.zeros(Q, np.int64) for d in prepared.distances}
        self.positions = {
            d: Positions(prepared, d, found, limits.nearness) for d, found in listed.items()
        }
        limits.last = {d: found.lists.last for d, found in self.positions.items()}
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self._centres: dict[str, np.ndarray] = {}
        self.backend: Backend
        if devices:
            from retrieval.ranking.backends.torch import TorchBackend

            self.backend = TorchBackend(prepared, limits, devices, block)
        else:
            self.backend = NumpyBackend(prepared, limits, block=block, axes=axes)
        rows = np.array([self.backend.block])
        world.least(rows)  # tiles are shared out: those of all ranks have to be the same
        self.block = int(rows[0])
        self.query_locks = [threading.Lock() for _ in slices(Q, self.block)]

    def count(self, progress: Progress | None) -> None:
        """Count all tiles; of a symmetric product, those on and above the diagonal.

        The ranks share out the tiles of each column, and add up what they have counted.
        """
        q_parts = list(slices(len(self.prepared.queries), self.block))
        g_parts = list(slices(len(self.prepared.gallery), self.block))
        symmetric = self.prepared.symmetric
        # Longest first, so that the threads end together.
        columns = [(g, q_parts[: n + 1] if symmetric else q_parts) for n, g in enumerate(g_parts)]
        before = np.cumsum([0, *(len(parts) for _, parts in columns)]).tolist()
        shared = [
            (g, self.world.share(parts, n)) for (g, parts), n in zip(columns, before, strict=False)
        ]
        own = [(g, parts) for g, parts in shared[::-1] if parts]
        with self.backend.ready():
            tiles = [len(parts) for _, parts in own]
            run_all(self._column, own, self.backend.workers, progress, self.stop.set, tiles)
        if self.positions:
            run_all(self._credit_rest, q_parts, self.prepared.threads, stop=self.stop.set)
        postponed = [task for d in self.positions for task in self._postponed_tasks(d)]
        run_all(call, postponed, self.prepared.threads, stop=self.stop.set)
        del self.backend  # its vectors take memory, on GPUs too, that sorting may need
        self.world.add(*self.counts.values(), *self.ties.values())
        for positions in self.positions.values():
            positions.join(self.world)

    def _postponed_tasks(self, d: str) -> list[Callable[[], None]]:
        """Tasks that decide before which positives the negatives of the postponed pairs stand."""
        positions, pairs = self.positions[d], self.positions[d].take_postponed()

        def settle(some: slice) -> None:
            if not self.stop.is_set():
                positions.settle(pairs[some], self.query_locks, self.block)

        return [partial(settle, some) for some in slices(len(pairs), _PAIRS)]

    def _column(self, column: tuple[slice, Sequence[slice]]) -> None:
        """Count all queries of a column against its gallery block: the task of one thread."""
        g, parts = column
        work, items = _Worker(self), self.backend.load(g)
        for q in parts:
            if self.stop.is_set():
                return
            for part, product in self.backend.products(q, g, items):
                self._tile(Tile(product, part, g), work)
                if self.prepared.symmetric and q != g:
                    self._tile(Tile(product, g, part, transposed=True), work)
        work.settle_all()
        with self.lock:
            for d in self.prepared.distances:
                self.counts[d] += work.counts[d]
                self.ties[d] += work.ties[d]

    def _tile(self, tile: Tile, work: _Worker) -> None:
        counts = self.backend.count(tile)
        for d in self.prepared.distances:
            self._add(tile, d, counts[:2] if d == "cos" else counts[2:], work)
        for d in self.positions:
            self._credit(tile, d, work.open_positives)

    def _add(self, tile: Tile, d: str, counts: np.ndarray, work: _Worker) -> None:
        """Add the counts (2, A) of sure and possible negatives; look at what is in doubt."""
        q, g = tile.q, tile.g
        sure, possible = counts
        nearest = self.nearest[d].index[q]
        # The nearest positive itself is possibly, and never surely, as near as its own threshold.
        is_here = (nearest >= g.start) & (nearest < g.stop)
        flagged = np.flatnonzero(possible - sure > is_here)
        found, tied = 0, np.zeros(len(sure), np.int64)
        if len(flagged):
            found = self.backend.doubtful(tile, d, flagged, tied, work.pairs)
        if found < 0:
            for rows in slices_of(q, _FLOAT64):
                for columns in slices_of(g, _FLOAT64):
                    self._tile_float64(d, rows, columns, work)
            return
        work.counts[d][q] += sure + tied
        work.ties[d][q] += tied
        work.add(d, work.pairs[:found], q.start, g.start)

    def _credit(self, tile: Tile, d: str, pairs: np.ndarray) -> None:
        """Add the tile's negatives to the positions of the queries' positives."""
        counted = self.positions[d].counted(tile.q)
        self._postpone(d, tile.q, self.backend.credit(tile, counted, pairs), pairs)

    def _credit_rest(self, q: slice) -> None:
        """Add the negatives that were kept for these queries."""
        pairs = self._room_for_positives()
        for d, positions in self.positions.items():
            self._postpone(d, q, positions.credit_rest(q, pairs), pairs)

    def _room_for_positives(self) -> np.ndarray:
        """Room for pairs in doubt, as `Backend.credit` lists them: at least all of one query."""
        most = max((int(each.kept.room.max()) for each in self.positions.values()), default=0)
        return np.empty((max(_PAIRS, most), 4), np.int64)

    def _postpone(self, d: str, q: slice, found: Iterator[int], pairs: np.ndarray) -> None:
        """Postpone the pairs in doubt that are found, run by run."""
        while True:
            with self.query_locks[q.start // self.block]:
                count = next(found, None)
            if count is None or self.stop.is_set():
                return
            if not count:
                continue
            listed = pairs[:count] + np.array([q.start, 0, 0, 0])
            if self.positions[d].postpone(listed) >= _POSTPONED:
                for task in self._postponed_tasks(d):
                    task()

    def _tile_float64(self, d: str, q: slice, g: slice, work: _Worker) -> None:
        """Count a tile with too many open pairs by a product of centred vectors in float64."""
        queries, gallery = self.prepared.queries, self.prepared.gallery
        Y, Z = self._centred(d, queries, q), self._centred(d, gallery, g)
        w_q, w_g = (np.einsum("ij,ij->i", A, A) for A in (Y, Z))
        if d == "cos":  # a zero row has no direction: infinite error, decided pair by pair
            w_q[queries.norm[q] == 0] = np.inf
            w_g[gallery.norm[g] == 0] = np.inf
        nearest = self.nearest[d]
        limits = np.stack(
            [nearest.squared[q] - nearest.error[q], nearest.squared[q] + nearest.error[q]]
        )
        limits[:, nearest.index[q] < 0] = -np.inf
        dim = gallery.dim
        extra = (6 * ULP64, ((dim + 16) * ULP64) ** 2) if d == "cos" else (0.0, 1e-290)
        slack = np.array([(8 * dim + 64) * ULP64, *extra])
        rows = kernels.Float64Queries(
            w_q, limits, self.prepared.self_columns(q, g), queries.codes[q], self.limits.tying[d][q]
        )
        columns = kernels.Float64Gallery(w_g, gallery.codes[g], self.prepared.groups[d][g])
        product, first = Y @ Z.T, 0
        while first < len(product) and not self.stop.is_set():
            first, found = kernels.count_float64(
                product, first, rows, columns, slack, work.counts[d][q], work.ties[d][q], work.pairs
            )
            work.add(d, work.pairs[:found], q.start, g.start)

    def _centred(self, d: str, vectors: Vectors, part: slice) -> np.ndarray:
        """float64 rows less the gallery's mean: distances stay, the digits they share go."""
        gallery = self.prepared.gallery
        with self.lock:
            if d not in self._centres:
                total = np.zeros(gallery.dim)
                for some in blocks(gallery.vectors):
                    total += _points(d, gallery, some).sum(axis=0)
                self._centres[d] = total / len(gallery)
        return _points(d, vectors, part) - self._centres[d]


class _Worker:
    """The counters and open pairs of one thread."""

    def __init__(self, counter: TileCounter) -> None:
        self.counter = counter
        distances, Q = counter.prepared.distances, len(counter.prepared.queries)
        self.counts = {d: np.zeros(Q, np.int64) for d in distances}
        self.ties = {d: np.zeros(Q, np.int64) for d in distances}
        block = counter.block  # a row must fit, and a share of a tile that is soon decided
        self.pairs = np.empty((max(_PAIRS, block, block * block >> 6), 2), np.int64)
        self.open: dict[str, list[np.ndarray]] = {d: [] for d in distances}
        self.open_positives = counter._room_for_positives()  # of a tile

    def add(self, d: str, pairs: np.ndarray, q_start: int, g_start: int) -> None:
        """Keep open pairs (query, item) of a tile; decide them when there are many."""
        self.open[d].append(pairs + np.array([q_start, g_start]))
        if sum(map(len, self.open[d])) >= _PAIRS:
            self.settle(d)

    def settle_all(self) -> None:
        for d in self.open:
            self.settle(d)

    def settle(self, d: str) -> None:
        """Decide the open pairs in float64, the rest exactly."""
        if not self.open[d]:
            return
        prepared, nearest = self.counter.prepared, self.counter.nearest[d]
        q, g = np.concatenate(self.open[d]).T
        self.open[d].clear()
        squared, error = measure(prepared, q, g, d)
        verdict = np.zeros(len(q), np.int8)
        verdict[squared + error < nearest.squared[q] - nearest.error[q]] = 1
        verdict[squared - error > nearest.squared[q] + nearest.error[q]] = -1
        unsure = (verdict == 0) & ((error > 0) | (nearest.error[q] > 0))
        if d == "cos" and prepared.lattice:
            # Items of one length rank alike under both distances, and there l2 is exact.
            square = prepared.gallery.square
            level = unsure & (square[g] == square[nearest.index[q]])
            verdict[level] = np.sign(nearest.l2[q] - exact_l2(prepared, q, g))[level]
            unsure &= ~level
        verdict[unsure] = compare_exactly(
            prepared, q[unsure], g[unsure], nearest.index[q][unsure], d
        )
        np.add.at(self.counts[d], q[verdict >= 0], 1)
        np.add.at(self.ties[d], q[verdict == 0], 1)


def _points(d: str, vectors: Vectors, part: slice) -> np.ndarray:
    """The points whose Euclidean distances rank like `d`, in float64."""
    return vectors.units64(part) if d == "cos" else vectors.vectors[part].astype(np.float64)
