"""Initial centroids of k-means: random points, or greedy k-means++ with many candidates at once.

k-means++ draws points with a probability proportional to the squared distance from the nearest
centroid so far; its greedy kind draws several candidates and keeps the one that lowers the sum of
these distances most. Here a round draws the candidates of several centroids at once and keeps the
best of them one by one. Distances become large matrix products, and since a candidate can only lose
by the choice of another one, few of the others are measured again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from retrieval.kmeans import kernels
from retrieval.kmeans.kernels import Vectors
from retrieval.kmeans.lloyd import DENSE, ROWS, Clusters, Short, for_each, from_centroids
from retrieval.resources import slices

SHARE = 8  # a round adds one centroid for every eight that are there
MEMORY = 1 << 27  # bytes of distances in a round
MANY = 1000  # clusters up to which a round chooses one centroid, as scikit-learn does


def initial(
    points: np.ndarray,
    k: int,
    kind: str,
    seed: int,
    threads: int,
    tick: Callable[[int], None],
    *,
    short: Short | None = None,
) -> Clusters:
    """The clusters that k initial centroids give; the seed decides which they are.

    short: what `short_forms` gives. With it the start costs less.
    """
    rng = np.random.default_rng(seed)
    if kind == "random":
        found = from_centroids(points, points[rng.permutation(len(points))[:k]], threads, short)
        tick(k)
        return found
    return _greedy(Clusters(points, k, threads, short), rng, tick)


def trials(done: int, k: int) -> float:
    """Candidates for each new centroid: 2 + log(k) as in scikit-learn, or three on average.

    With many clusters they are spared for the end. At first nearly every point is far from all
    centroids and so a good one; the last classes without a centroid are hit rarely.
    """
    return 2 + int(np.log(k)) if k <= MANY else 1 + 8 * (done / k) ** 3


def _greedy(found: Clusters, rng: np.random.Generator, tick: Callable[[int], None]) -> Clusters:
    """Greedy k-means++. The distances to the centroids are those of the first assignment."""
    points, N, k = found.points, len(found.points), len(found.centroids)
    done, wanted, drawn = 0, 1, rng.integers(N, size=1)
    while True:
        distances = _distances(found, drawn)
        gains = _gains(found, distances)
        chosen = kernels.keep_best(distances, gains, done, wanted, found.state)
        found.centroids[done : done + wanted] = points[drawn[chosen]]
        done += wanted
        tick(wanted)
        if done == k:
            return found
        each = trials(done, k)
        fit = max(1, int(MEMORY / (4 * N * each)))
        wanted = min(k - done, max(1, done // SHARE), fit) if k > MANY else 1
        sums = np.cumsum(found.own, dtype=np.float64)
        places = sums[-1] * rng.random(int(np.ceil(wanted * each)))
        drawn = np.minimum(np.searchsorted(sums, places, side="right"), N - 1)


def _distances(found: Clusters, drawn: np.ndarray) -> np.ndarray:
    """Squared distances (B, N) of the drawn points to all points."""
    points, norms = found.points[drawn], found.norms[drawn]
    shorts = found.short.points[drawn] if found.short else None
    out = np.empty((len(drawn), len(found.points)), np.float32)

    def fill(part: slice) -> None:
        if found.short and shorts is not None:
            bounds = shorts @ found.short.points[part].T
            others, own = found.norms[part], found.own[part]
            if kernels.count_below(bounds, norms, others, own) * DENSE <= bounds.size:
                some = Vectors(found.points[part], others)
                kernels.bounded_distances(
                    bounds, Vectors(points, norms), some, own, out, part.start
                )
                return
        product = points @ found.points[part].T
        kernels.squared_distances(product, norms, found.norms[part], out, part.start)

    parts = slices(len(found.points), ROWS)
    for_each(fill, parts, found.threads, points.size * len(found.points))
    out[np.arange(len(drawn)), drawn] = 0.0
    return out


def _gains(found: Clusters, distances: np.ndarray) -> np.ndarray:
    """By how much each candidate alone would lower the sum of distances."""
    out = np.empty(len(distances))

    def fill(part: slice) -> None:
        out[part] = [kernels.gain(squared, found.own) for squared in distances[part]]

    parts = slices(len(distances), -(-len(distances) // 8))
    for_each(fill, parts, found.threads, 8 * distances.size)
    return out
