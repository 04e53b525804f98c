"""The thresholds that the pairs of a tile are compared with, and their error margins."""

from __future__ import annotations

import numpy as np

from retrieval.ranking import kernels
from retrieval.ranking.nearest_positive import NearestPositives
from retrieval.ranking.vectors import ULP32, ULP64, Prepared
from retrieval.resources import slices


class Thresholds:
    """What the cosines of all queries and gallery items are compared with."""

    def __init__(self, prepared: Prepared, nearest: dict[str, NearestPositives]) -> None:
        self.prepared = prepared
        self.margin = np.float32((prepared.gallery.dim + 16) * ULP32)
        """How far a cosine may be off."""
        self.forms = {d: self._form(d) for d in prepared.distances}
        """distance -> how squared distances become nearness."""
        self.thresholds = self._thresholds(nearest)
        """(5, Q) float32, as `kernels.TileQueries` has them."""
        self.norms = self._norms()
        """(3, G) float32, as `kernels.TileGallery` has them."""
        self.tying = {d: self._tying_groups(d, nearest[d].index) for d in prepared.distances}
        """distance -> (Q,) groups, as `kernels.TileQueries` has them."""
        self.last: dict[str, np.ndarray] = {}
        """distance -> (Q,) threshold of the last positive within R, if positions are counted."""

    def of_tile(
        self, distance: str, q: slice, g: slice
    ) -> tuple[kernels.TileQueries, kernels.TileGallery]:
        """What the kernels take of queries and gallery items.

        The copies are contiguous: loops over strided rows would not use vector registers.
        """
        prepared = self.prepared
        queries = kernels.TileQueries(
            np.ascontiguousarray(self.thresholds[:, q]),
            prepared.queries.codes[q],
            self.tying[distance][q],
        )
        gallery = kernels.TileGallery(
            np.ascontiguousarray(self.norms[:, g]),
            prepared.gallery.codes[g],
            prepared.groups[distance][g],
        )
        return queries, gallery

    def nearness(
        self, d: str, q: np.ndarray, near: np.ndarray, far: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Float32 bounds of the nearness of items between two squared distances from queries q.

        Nearness is what the kernels compute: the cosine, or 2 |q| |x| cos - |x|^2 for l2, which
        grows as the distance shrinks. Surely at least as near is what reaches the first bound,
        possibly what reaches the second: rounded outward, with every error of the product.
        """
        sure, possible = np.empty(len(q), np.float32), np.empty(len(q), np.float32)
        kernels.nearness_bounds(self.forms[d], q, near, far, sure, possible)
        return sure, possible

    def _form(self, d: str) -> kernels.Nearness:
        """Lengths are scaled by a power of two so that float32 can hold their squares.

        What is lost below 2^-100 is slack, not error.
        """
        queries = self.prepared.queries
        if d == "cos":
            ones = np.ones(len(queries))
            return kernels.Nearness(ones, ones * (8 * ULP64 + self.margin), (1.0, 0.5), 0.0)
        scale = self.prepared.scale
        length = queries.square * scale * scale
        slack = (self.prepared.gallery.dim + 8) * ULP64 * length + 2.0**-100
        return kernels.Nearness(length, slack, (scale, scale), 4 * ULP32)

    def reaches(self, q: slice, g: slice) -> tuple[kernels.Reach, kernels.Reach]:
        """The least nearness that can change a count of these queries and these gallery items.

        Gallery items are queries too if the problem is leave-one-out; otherwise nothing reaches
        their bounds.
        """
        if self.prepared.symmetric:
            return self._reach(q, self.norms[:, q]), self._reach(g, self.norms[:, g])
        A, B = q.stop - q.start, g.stop - g.start
        nothing = np.full(B, np.inf, np.float32), np.full(B, -np.inf, np.float32)
        norm, _, square = np.ascontiguousarray(self.norms[:, g])
        items = kernels.Reach(*nothing, np.zeros(B, np.float32), norm, square)
        return self._reach(q, np.ones((3, A), np.float32)), items

    def _reach(self, q: slice, norms: np.ndarray) -> kernels.Reach:
        """Bounds from the nearest positive of each query, or for MAP@R from its last within R."""
        _, cos, twice, _, l2 = np.ascontiguousarray(self.thresholds[:, q])
        if "cos" in self.last:
            cos = np.minimum(cos, self.last["cos"][q])
        if "l2" in self.last:
            l2 = np.maximum(l2, self.last["l2"][q])
        norm, _, square = np.ascontiguousarray(norms)
        return kernels.Reach(cos, l2, twice, norm, square)

    def _thresholds(self, nearest_positives: dict[str, NearestPositives]) -> np.ndarray:
        """(5, Q) float32, as `kernels.TileQueries` has them."""
        thresholds = self._unreachable()
        for d, nearest in nearest_positives.items():
            some = np.flatnonzero(nearest.index >= 0)
            squared, error = nearest.squared[some], nearest.error[some]
            bounds = self.nearness(d, some, squared - error, squared + error)
            if d == "cos":
                thresholds[0, some], thresholds[1, some] = bounds
            else:
                thresholds[3, some], thresholds[4, some] = -bounds[0], -bounds[1]
        return thresholds

    def _unreachable(self) -> np.ndarray:
        """(5, Q) thresholds that no item reaches: those of queries without a positive."""
        queries = self.prepared.queries
        thresholds = np.empty((5, len(queries)), np.float32)
        thresholds[:2], thresholds[3:] = np.inf, -np.inf
        thresholds[2] = 2 * queries.norm * self.prepared.scale
        return thresholds

    def _norms(self) -> np.ndarray:
        """(3, G) float32, as `kernels.TileGallery` has them."""
        norms = np.empty((3, len(self.prepared.gallery)), np.float32)
        for part in slices(len(self.prepared.gallery), 1 << 20):
            norm = self.prepared.gallery.norm[part] * self.prepared.scale
            slack = 4 * ULP32 * norm**2 + 2.0**-100
            norms[:, part] = norm, norm**2 + slack, norm**2 - slack
        return norms

    def _tying_groups(self, d: str, index: np.ndarray) -> np.ndarray:
        """(Q,) the group of rows that tie with the nearest positive, -1 if there is none."""
        groups = np.where(index >= 0, self.prepared.groups[d][index], -1)
        if d == "cos":  # to a query of length zero, every item is as near as any other
            groups[(self.prepared.queries.norm == 0) & (index >= 0)] = kernels.ANY
        return groups
