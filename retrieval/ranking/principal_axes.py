"""Skip pairs that the leading principal axes already decide.

A unit vector is split into its part on the leading axes, its head, and the rest, its tail. Of two
vectors, the tails add at most the product of their lengths to the product of the heads
(Cauchy-Schwarz). A pair that cannot reach its thresholds even so is left out; the others are
multiplied in full. Whether this pays is estimated on a sample of the pairs. The verdicts are the
same either way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from retrieval.ranking import kernels
from retrieval.ranking.vectors import Prepared, Vectors
from retrieval.resources import blocks, run_all

Reaches = Callable[[slice, slice], tuple[kernels.Reach, kernels.Reach]]

_SAMPLE = 512  # queries and gallery items whose pairs are looked at, and that the axes come from
_WORK = 2 * 10**11  # multiplications: less of them take no longer than the look at a sample
# Nanoseconds on a core with AVX2; they decide about speed alone. An axis of the product of a tile,
# the comparison of a pair with its thresholds, an axis of a single pair, and the pair itself.
_PRODUCT, _COMPARED, _AXIS, _PAIR = 0.023, 0.8, 0.06, 20.0
_WORTH = 0.8  # the share of the plain time below which pairs are skipped


class LeadingAxes:
    """Products of tiles in which pairs are left out that no query needs."""

    def __init__(self, prepared: Prepared, axes: np.ndarray) -> None:
        self.queries = self.gallery = _Heads(prepared.queries, axes, prepared.threads)
        if not prepared.symmetric:
            self.gallery = _Heads(prepared.gallery, axes, prepared.threads)

    def product(
        self, q: slice, g: slice, margin: np.float32, reaches: Reaches, out: np.ndarray
    ) -> None:
        """Write (A, B) cosines; -2 for pairs that reach nothing in these rows and columns.

        The thresholds are read after the product: other threads may have tightened them meanwhile.
        """
        np.matmul(self.queries.heads[q], self.gallery.heads[g].T, out=out)
        kernels.complete_product(
            out, margin, self.queries.tails(q), self.gallery.tails(g), *reaches(q, g)
        )


class _Heads:
    """Unit vectors on the leading axes, and the lengths of what is left of them."""

    def __init__(self, vectors: Vectors, axes: np.ndarray, threads: int) -> None:
        self.vectors = vectors
        self.heads = np.empty((len(vectors), axes.shape[1]), np.float32)
        self.lengths = np.empty(len(vectors), np.float32)

        def fill(part: slice) -> None:
            self.heads[part], self.lengths[part] = _split(vectors.units64(part), axes)

        run_all(fill, blocks(vectors.vectors), threads)

    def tails(self, part: slice) -> kernels.Tails:
        return kernels.Tails(self.lengths[part], self.vectors.units(part))


def leading_axes(
    prepared: Prepared,
    margin: np.float32,
    reaches: Reaches,
    count: int | None = None,
) -> LeadingAxes | None:
    """Multiply `count` axes first; None if that would not pay, as a sample of the pairs shows.

    `reaches` gives the thresholds of queries and the norms of items. Without `count`, the sample
    chooses it.
    """
    work = len(prepared.queries) * len(prepared.gallery) * prepared.gallery.dim
    kept = prepared.queries.keeps_units and prepared.gallery.keeps_units
    if not kept or count == 0 or (count is None and work < _WORK):
        return None
    rng = np.random.default_rng(0)
    q, g = (
        np.sort(rng.permutation(len(side))[: 2 * _SAMPLE])
        for side in (prepared.queries, prepared.gallery)
    )
    # The axes come from other rows than the pairs: they fit their own rows too well.
    axes = _principal_axes(prepared.gallery.units64(g[1::2] if len(g) > 1 else g))
    if count is None:
        rows, columns = prepared.queries.units64(q[::2]), prepared.gallery.units64(g[::2])
        queries, gallery = reaches(slice(0, len(prepared.queries)), slice(0, len(prepared.gallery)))
        sampled = queries.take(q[::2]), gallery.take(g[::2])
        count = _best_count(rows, columns, axes, margin, sampled)
    return LeadingAxes(prepared, np.ascontiguousarray(axes[:, :count])) if count else None


def _best_count(
    rows: np.ndarray,
    columns: np.ndarray,
    axes: np.ndarray,
    margin: np.float32,
    reaches: tuple[kernels.Reach, kernels.Reach],
) -> int:
    """The number of axes that takes the least time on a sample of pairs, 0: all of them."""
    D = rows.shape[1]
    best = _WORTH * _PRODUCT * D, 0
    for count in (D // 16, D // 8, D // 4, D // 2):
        heads, tails = [], []
        for side in (rows, columns):
            head, length = _split(side, axes[:, :count])
            heads.append(head)
            tails.append(kernels.Tails(length, side.astype(np.float32)))
        product = heads[0] @ heads[1].T
        kernels.complete_product(product, margin, *tails, *reaches)
        share = float((product > -2).mean())
        time = _PRODUCT * count + _COMPARED + share * (_AXIS * D + _PAIR)
        best = min(best, (time, count))
    return best[1]


def _principal_axes(units: np.ndarray) -> np.ndarray:
    """(D, M) orthonormal axes as columns, those along which the rows are longest first."""
    return np.linalg.svd(units, full_matrices=False)[2].T


def _split(units: np.ndarray, axes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 heads (n, d) of unit vectors, and bounds above the lengths (n,) of their tails."""
    heads = units @ axes
    squares = np.einsum("ij,ij->i", units, units) - np.einsum("ij,ij->i", heads, heads)
    # 1e-12 covers the rounding of float64, in the axes too.
    lengths = np.sqrt(np.maximum(squares, 0) + 1e-12) * (1 + 2.0**-20)
    return heads.astype(np.float32), lengths.astype(np.float32)
