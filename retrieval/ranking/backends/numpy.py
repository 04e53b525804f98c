"""Multiply and count on the CPU: BLAS and compiled loops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np

from retrieval.ranking import kernels, position_kernels
from retrieval.ranking.backends import Tile
from retrieval.ranking.principal_axes import leading_axes
from retrieval.ranking.thresholds import Thresholds
from retrieval.ranking.vectors import Prepared
from retrieval.resources import single_blas_thread, tile_rows

_ALIKE = 1e-5  # the largest relative difference of norms that are taken as equal


class NumpyBackend:
    """Products of NumPy arrays, counted by kernels; `axes` is that of `count_ranks`."""

    def __init__(
        self, prepared: Prepared, limits: Thresholds, *, block: int | None, axes: int | None
    ) -> None:
        self.prepared, self.limits = prepared, limits
        self.joint = joint_thresholds(limits) if len(prepared.distances) > 1 else None
        self._local = threading.local()
        self.block = block or tile_rows(len(prepared.gallery), prepared.threads)
        self.workers = prepared.threads
        self.axes = leading_axes(prepared, limits.margin, limits.reaches, axes)

    def ready(self) -> AbstractContextManager[None]:
        return single_blas_thread()  # one tile per thread, not one product on all

    def load(self, g: slice) -> np.ndarray:
        return self.prepared.gallery.units(g)

    def products(self, q: slice, g: slice, items: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        product = self._room("product", q.stop - q.start, len(items))  # (A, B)
        if self.axes is None:
            np.matmul(self.prepared.queries.units(q), items.T, out=product)
        else:
            self.axes.product(q, g, self.limits.margin, self.limits.reaches, product)
        column = self.prepared.self_columns(q, g)
        rows = np.flatnonzero(column >= 0)
        product[rows, column[rows]] = np.nan
        yield q, product

    def _room(self, name: str, rows: int, columns: int) -> np.ndarray:
        """Memory for products, reused by each thread: new pages would cost a tenth of the time."""
        rooms = vars(self._local)
        if name not in rooms or rooms[name].size < rows * columns:
            rooms[name] = np.empty(rows * columns, np.float32)
        return rooms[name][: rows * columns].reshape(rows, columns)

    def count(self, tile: Tile) -> np.ndarray:
        if self.joint is None:
            distances = self.prepared.distances
            wanted = "cos" in distances, "l2" in distances
            return self._count(
                tile, tile.product, self._of_queries(self.limits.thresholds, tile), wanted
            )
        # Both distances at once, and each of them where that leaves a doubt.
        counts = self._count(tile, tile.product, self._of_queries(self.joint, tile), (True, False))
        counts[2:] = counts[:2]
        some = np.flatnonzero(counts[0] != counts[1])
        if len(some):
            product = tile.product[:, some] if tile.transposed else tile.product[some]
            thresholds = np.ascontiguousarray(
                self._of_queries(self.limits.thresholds, tile)[:, some]
            )
            counts[:, some] = self._count(
                tile, np.ascontiguousarray(product), thresholds, (True, True)
            )
        return counts

    def _count(
        self, tile: Tile, product: np.ndarray, thresholds: np.ndarray, wanted: tuple[bool, bool]
    ) -> np.ndarray:
        counts = np.empty((4, thresholds.shape[1]), np.int32)
        count = kernels.count_columns if tile.transposed else kernels.count_rows
        count(product, self.limits.margin, thresholds, self._norms(tile), wanted, counts)
        return counts

    def doubtful(
        self, tile: Tile, distance: str, queries: np.ndarray, tied: np.ndarray, pairs: np.ndarray
    ) -> int:
        everything = np.arange(tile.g.stop - tile.g.start)
        rows, columns = (everything, queries) if tile.transposed else (queries, everything)
        cosines = kernels.Tile(tile.product, self.limits.margin, tile.transposed)
        sides = self.limits.of_tile(distance, tile.q, tile.g)
        return int(kernels.doubtful(cosines, distance == "l2", *sides, rows, columns, tied, pairs))

    def credit(
        self, tile: Tile, counted: position_kernels.Counted, pairs: np.ndarray
    ) -> Iterator[int]:
        cosines = kernels.Tile(tile.product, self.limits.margin, tile.transposed)
        if tile.transposed:
            cosines = cosines._replace(product=self._turned(tile))
        sides = self.limits.of_tile("l2" if counted.l2 else "cos", tile.q, tile.g)
        pair = 0
        while pair < tile.product.size:
            pair, found = position_kernels.keep_tile(
                cosines, *sides, tile.g.start, pair, counted, pairs
            )
            yield found

    def _turned(self, tile: Tile) -> np.ndarray:
        """The product with the queries as rows, the same for both distances."""
        rows, columns = tile.product.shape
        turned = self._room("turned", columns, rows)
        if getattr(self._local, "tile", None) != (tile.q, tile.g):
            self._local.tile = tile.q, tile.g
            np.copyto(turned, tile.product.T)
        return turned

    # Contiguous copies: compiled loops over strided rows would not use vector registers.

    def _of_queries(self, thresholds: np.ndarray, tile: Tile) -> np.ndarray:
        return np.ascontiguousarray(thresholds[:, tile.q])

    def _norms(self, tile: Tile) -> np.ndarray:
        return np.ascontiguousarray(self.limits.norms[:, tile.g])


def joint_thresholds(limits: Thresholds) -> np.ndarray | None:
    """(5, Q) thresholds of cosines that decide both distances if all gallery norms are equal.

    A cosine that reaches the first is surely as near by either distance, one below the second by
    none. None if the norms differ by more than rounding.
    """
    norms = limits.norms
    least, most = float(norms[0].min(initial=np.inf)), float(norms[0].max(initial=0.0))
    if not 0 < most <= least * (1 + _ALIKE):
        return None
    joint = limits.thresholds.copy()
    twice, sure, possible = joint[2:].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        high = norms[1].max() - sure
        low = norms[2].min() - possible
        high = np.maximum(high / (twice * least), high / (twice * most)) + limits.margin
        low = np.minimum(low / (twice * least), low / (twice * most)) - limits.margin
        joint[0] = np.nextafter(np.maximum(joint[0], high).astype(np.float32), np.float32(np.inf))
        joint[1] = np.nextafter(np.minimum(joint[1], low).astype(np.float32), np.float32(-np.inf))
    joint[0, twice == 0], joint[1, twice == 0] = np.inf, -np.inf  # a zero row decides nothing
    return joint
