"""k-means from the distances of all pairs of points, for several starts on not too many points.

How far a point x is from the centroid c of n points follows from its squared distances to these
points. With S(x) their sum, |x - c|^2 = S(x) / n - T / (2 n^2), where T is the sum of S over the
points. A point that changes its cluster changes two sums of every point by one distance each. In
most iterations few points change, and this takes far less time than products with the centroids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from retrieval.kmeans import kernels
from retrieval.kmeans.kernels import ORDERED, TIE, gain
from retrieval.kmeans.lloyd import fill_empty, run_tasks, squared_lengths
from retrieval.resources import compiled, slices

MOST = 8192  # points: the distances of all pairs take 256 MB
TILE = 512  # points of a tile of distances
WIDTH = 1024  # points whose sums are changed at a time: those of 100 clusters take 400 kB
SHARE = 3  # if more than one point in so many changes its cluster, a product is faster


@dataclass(frozen=True)
class Pairs:
    """Points and the squared distances of all pairs of them."""

    points: np.ndarray  # (N, D) float32
    norms: np.ndarray  # (N,) squared lengths
    squared: np.ndarray  # (N, N)


@dataclass
class PairClusters:
    """Clusters of points whose pairwise distances are known."""

    pairs: Pairs
    label: np.ndarray  # (N,) int32, the cluster of each point
    own: np.ndarray  # (N,) float32, squared distance to its own centroid
    sums: np.ndarray  # (k, N) of the squared distances to the points of each cluster
    summed: np.ndarray  # (N,) the labels that the sums belong to; -1: the point is in no sum

    @property
    def objective(self) -> float:
        """The sum of squared distances of all points to their centroids."""
        return float(self.own.sum(dtype=np.float64))


def all_pairs(points: np.ndarray, threads: int) -> Pairs:
    """Compute the squared distances of all pairs of points."""
    norms, out = squared_lengths(points), np.empty((len(points),) * 2, np.float32)

    def fill(a: slice, b: slice) -> None:
        product = points[a] @ points[b].T
        kernels.squared_distances(product, norms[a], norms[b], out[a], b.start)
        kernels.squared_distances(product.T.copy(), norms[b], norms[a], out[b], a.start)

    parts = list(slices(len(points), TILE))
    tasks = [partial(fill, a, b) for n, a in enumerate(parts) for b in parts[: n + 1]]
    run_tasks(tasks, threads, len(points) * points.size)
    np.fill_diagonal(out, 0.0)
    return Pairs(points, norms, out)


def initial(
    pairs: Pairs, k: int, trials: int, seed: int, tick: Callable[[int], None]
) -> PairClusters:
    """The clusters of k centroids chosen by greedy k-means++; the seed decides which they are.

    trials: how many candidates each new centroid has.
    """
    N, rng = len(pairs.points), np.random.default_rng(seed)
    label, own = np.zeros(N, np.int32), np.empty(N, np.float32)
    first = rng.integers(N, size=1)[0]
    _choose(pairs.squared, first, rng.random((k - 1, trials)), label, own)
    tick(k)
    sums, summed = np.empty((k, N), np.float32), np.full(N, -1, np.int32)
    return PairClusters(pairs, label, own, sums, summed)


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
            _transfer(pairs.squared, rows, found.summed, label, found.sums)
        found.summed[:] = label
        _assign(found.sums, pairs.norms, label, found.own)
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


@compiled
def _choose(pairs, first, draws, label, own):
    """Choose centroids by greedy k-means++ among points drawn with numbers from 0 to 1."""
    N = len(pairs)
    own[:] = pairs[first]
    for done in range(len(draws)):
        sums = np.cumsum(own.astype(np.float64))
        best, most = 0, -1.0
        for draw in draws[done]:
            row = min(np.searchsorted(sums, draw * sums[-1], side="right"), N - 1)
            gained = gain(pairs[row], own)
            if gained > most:
                best, most = row, gained
        for i in range(N):
            if pairs[best, i] < own[i]:
                own[i], label[i] = pairs[best, i], done + 1


@compiled
def _add(total, row, times):
    for i in range(len(total)):
        total[i] += times * row[i]


@compiled
def _transfer(pairs, rows, before, after, sums):
    """Move points from the sums of their former clusters to those of their new ones."""
    for begin in range(0, len(pairs), WIDTH):
        end = begin + WIDTH
        for row in rows:
            _add(sums[after[row], begin:end], pairs[row, begin:end], np.float32(1))
            _add(sums[before[row], begin:end], pairs[row, begin:end], np.float32(-1))


@compiled(fastmath=ORDERED)
def _lower(least, total, scale, shift):
    """Keep the smaller of `least` and the distances to one more centroid."""
    for i in range(len(least)):
        value = total[i] * scale - shift
        least[i] = value if value < least[i] else least[i]


@compiled
def _assign(sums, norms, label, own):
    """Assign points to their nearest centroids; a tie changes nothing."""
    k, N = sums.shape
    inside, sizes = np.zeros(k), np.zeros(k)
    for i in range(N):
        inside[label[i]] += sums[label[i], i]
        sizes[label[i]] += 1
    scale = (1 / sizes).astype(np.float32)
    shift = (inside / (2 * sizes * sizes)).astype(np.float32)
    for begin in range(0, N, WIDTH):
        least = np.full(min(WIDTH, N - begin), np.inf, np.float32)
        for c in range(k):
            _lower(least, sums[c, begin : begin + WIDTH], scale[c], shift[c])
        for i in range(begin, begin + len(least)):
            nearest = sums[label[i], i] * scale[label[i]] - shift[label[i]]
            if least[i - begin] + TIE * norms[i] < nearest:
                for c in range(k):
                    value = sums[c, i] * scale[c] - shift[c]
                    if value < nearest:
                        nearest, label[i] = value, c
            own[i] = max(np.float32(0), nearest)
