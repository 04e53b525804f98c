"""k-means from the distances of all pairs of points, for several starts on few points.

How far a point x is from the centroid c of n points follows from its squared distances to these
points. With S(x) their sum, |x - c|^2 = S(x) / n - T / (2 n^2), where T is the sum of S over the
points. A point that changes its cluster changes two sums of every point by one distance each. In
most iterations few points change, and this takes far less time than products with the centroids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from retrieval.kmeans import kernels
from retrieval.kmeans.lloyd import fill_empty, for_each, squared_lengths
from retrieval.resources import slices

MOST = 8192  # points: the distances of all pairs take 256 MB
TILE = 512  # points of a tile of distances
SHARE = 3  # if more than one point in so many changes its cluster, a product is faster


@dataclass(frozen=True)
class Pairs:
    """Points and the squared distances of all pairs of them."""

    points: np.ndarray  # (N, D) float32
    norms: np.ndarray  # (N,) squared lengths
    squared: np.ndarray  # (N, N)


class PairClusters:
    """Clusters of points whose pairwise distances are known."""

    def __init__(self, pairs: Pairs, k: int) -> None:
        N = len(pairs.points)
        self.pairs = pairs
        self.label = np.zeros(N, np.int32)  # the cluster of each point
        self.own = np.empty(N, np.float32)  # squared distance to its own centroid
        self.sums = np.empty((k, N), np.float32)  # of squared distances to each cluster's points
        self.summed = np.full(N, -1, np.int32)  # the labels that the sums belong to; -1: in none

    @property
    def objective(self) -> float:
        """The sum of squared distances of all points to their centroids."""
        return float(self.own.sum(dtype=np.float64))


def all_pairs(points: np.ndarray, threads: int) -> Pairs:
    """Compute the squared distances of all pairs of points."""
    norms, out = squared_lengths(points), np.empty((len(points),) * 2, np.float32)

    def fill(tile: tuple[slice, slice]) -> None:
        a, b = tile
        product = points[a] @ points[b].T
        kernels.squared_distances(product, norms[a], norms[b], out[a], b.start)
        kernels.squared_distances(product.T.copy(), norms[b], norms[a], out[b], a.start)

    parts = list(slices(len(points), TILE))
    tiles = [(a, b) for n, a in enumerate(parts) for b in parts[: n + 1]]
    for_each(fill, tiles, threads, len(points) * points.size)
    np.fill_diagonal(out, 0.0)
    return Pairs(points, norms, out)


def initial(
    pairs: Pairs, k: int, trials: int, seed: int, tick: Callable[[int], None]
) -> PairClusters:
    """The clusters of k centroids chosen by greedy k-means++; the seed decides which they are.

    trials: how many candidates each new centroid has.
    """
    found, rng = PairClusters(pairs, k), np.random.default_rng(seed)
    first = rng.integers(len(pairs.points), size=1)[0]
    draws = rng.random((k - 1, trials))
    kernels.choose_by_pairs(pairs.squared, first, draws, found.label, found.own)
    tick(k)
    return found


def iterate(found: PairClusters, most: int, tick: Callable[[], object]) -> int:
    """Move centroids and assign points until nothing changes; return the number of iterations."""
    pairs, label = found.pairs, found.label
    for iteration in range(most):
        if np.array_equal(found.summed, label):
            return iteration
        fill_empty(label, found.own, len(found.sums))
        rows = np.flatnonzero(found.summed != label)
        if SHARE * len(rows) > len(label):
            found.sums[:] = _sums(pairs, label, len(found.sums))
        else:
            kernels.transfer_sums(pairs.squared, rows, found.summed, label, found.sums)
        found.summed[:] = label
        kernels.assign_by_sums(found.sums, pairs.norms, label, found.own)
        tick()
    return most


def _sums(pairs: Pairs, label: np.ndarray, k: int) -> np.ndarray:
    """Sums (k, N) of the squared distances to the points of each cluster, by one product."""
    points, norms = pairs.points, pairs.norms
    sums, sizes = np.zeros((k, points.shape[1])), np.zeros(k, np.int64)
    none = np.full(len(label), -1, np.int32)
    kernels.transfer(points, np.arange(len(label)), none, label, sums, sizes, np.zeros(k, np.bool_))
    product = sums.astype(np.float32) @ points.T
    inside = np.bincount(label, norms, k).astype(np.float32)
    return sizes[:, None].astype(np.float32) * norms + inside[:, None] - 2 * product
