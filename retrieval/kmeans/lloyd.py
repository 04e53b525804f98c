"""Exact k-means iterations (Lloyd's algorithm) that compute only distances that can matter.

Each point keeps the squared distance to its own centroid and a lower bound of the distance to all
others. A centroid that did not move cannot newly attract a point unless the point's own centroid
went beyond that bound; a centroid that moved by m cannot attract a point whose bound exceeds its
own distance by more than m. What remains is computed as matrix products over tiles of fixed sizes,
each by one thread, so that the result does not depend on how many threads there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from retrieval.kmeans import kernels
from retrieval.kmeans.kernels import Nearest, State, Vectors
from retrieval.resources import run_all, slices

ROWS, COLUMNS = 1024, 512  # points and centroids of a tile
SLACK = np.float32(1e-5)  # room for rounding in bounds, as a fraction of squared lengths
WORTH_THREADS = 1 << 27  # multiplications; fewer take less time than starting threads
CHOICES = 16  # how many limits of movement are tried in each iteration

REST = 0.1  # of the squared lengths that short forms may leave to the other directions
SAMPLE = 4096  # points that show in which directions all of them vary
STEP = 32  # the number of directions of a short form is a multiple of it
LONGEST = 0.5  # of the dimensions: with more directions a short form saves too little
ROUNDING = np.float32(1e-6)  # of the squared length
DENSE = 32  # if more than one in so many products has to be computed, all are, by BLAS

T = TypeVar("T")


@dataclass(frozen=True)
class Short:
    """Short forms of all points, whose products bound those of the points from above.

    Embeddings vary much in some directions and little in all others. With a the part of x in the
    first directions and b the rest, x y = a a' + b b' is at most a a' + |b| |b'|: a product of
    vectors that have |b| as one more dimension. Most centroids are ruled out by it at a fraction
    of the cost.
    """

    directions: np.ndarray  # (D, H) orthonormal columns
    points: np.ndarray  # (N, H + 1)

    def of(self, rows: np.ndarray) -> np.ndarray:
        return _shortened(rows, self.directions)


def short_forms(points: np.ndarray) -> Short | None:
    """Short forms of these points, unless they vary in too many directions."""
    N, D = points.shape
    sample = points[:: max(1, N // SAMPLE)].astype(np.float64)
    values, vectors = np.linalg.eigh(sample.T @ sample)
    rest = 1 - np.cumsum(values[::-1]) / max(values.sum(), np.finfo(np.float64).tiny)
    H = STEP * (int(np.argmax(rest <= REST)) // STEP + 1)
    if H > LONGEST * D:
        return None
    directions = np.ascontiguousarray(vectors[:, ::-1][:, :H], np.float32)
    return Short(directions, _shortened(points, directions))


def _shortened(rows: np.ndarray, directions: np.ndarray) -> np.ndarray:
    out = np.empty((len(rows), directions.shape[1] + 1), np.float32)
    out[:, :-1] = rows @ directions
    whole = np.einsum("ij,ij->i", rows, rows)
    rest = whole - np.einsum("ij,ij->i", out[:, :-1], out[:, :-1])
    out[:, -1] = np.sqrt(np.maximum(rest, 0) + ROUNDING * whole)
    return out


class Clusters:
    """Points, centroids that are still to be found, and what is known of their distances.

    short: with it, most distances are ruled out without being computed.
    """

    def __init__(self, points: np.ndarray, k: int, threads: int, short: Short | None) -> None:
        N, D = points.shape
        self.points = points  # (N, D) float32
        self.norms = squared_lengths(points)  # (N,)
        self.centroids = np.zeros((k, D), np.float32)
        self.label = np.full(N, -1, np.int32)  # the cluster of each point
        self.own = np.full(N, np.inf, np.float32)  # squared distance to its own centroid
        self.other = np.full(N, np.inf, np.float32)  # at most that to any other centroid
        self.threads, self.short = threads, short

    @property
    def state(self) -> State:
        """The arrays as the compiled loops take them."""
        return State(self.points, self.norms, self.centroids, self.label, self.own, self.other)

    @property
    def objective(self) -> float:
        """The sum of squared distances of all points to their centroids."""
        return float(self.own.sum(dtype=np.float64))


def squared_lengths(rows: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ij->i", rows, rows)


def from_centroids(
    points: np.ndarray, centroids: np.ndarray, threads: int, short: Short | None = None
) -> Clusters:
    """Assign all points to the nearest of these centroids."""
    found = Clusters(points, len(centroids), threads, short)
    found.centroids[:] = centroids
    _compare(found, np.arange(len(points)), np.arange(len(centroids)))
    return found


def from_labels(points: np.ndarray, label: np.ndarray, k: int, threads: int) -> Clusters:
    """Points in these clusters, whose centroids the first iteration computes."""
    found = Clusters(points, k, threads, None)
    found.centroids[:] = np.inf  # so that all of them move
    found.label[:], found.other[:] = label, 0.0
    return found


def iterate(found: Clusters, most: int, tick: Callable[[], object]) -> int:
    """Move centroids and assign points until nothing changes; return the number of iterations."""
    k, D = found.centroids.shape
    sums, counts = np.zeros((k, D)), np.zeros(k, np.int64)
    before = np.full(len(found.points), -1, np.int32)
    for iteration in range(most):
        if np.array_equal(before, found.label):
            return iteration
        # Its cluster will be that point alone; its former centroid is one of the others now.
        found.other[fill_empty(found.label, found.own, k)] = 0.0
        changed = np.flatnonzero(before != found.label)
        touched = np.zeros(k, np.bool_)
        kernels.transfer(found.points, changed, before, found.label, sums, counts, touched)
        before = found.label.copy()
        _assign(found, *_move(found, sums, counts, touched))
        tick()
    return most


def fill_empty(label: np.ndarray, own: np.ndarray, k: int) -> list[int]:
    """Give each empty cluster the point farthest from its own centroid, as scikit-learn does.

    label and own are changed; returns the points that were moved.
    """
    sizes, moved = np.bincount(label, minlength=k), []
    empty = np.flatnonzero(sizes == 0).tolist()
    for row in np.argsort(-own, kind="stable").tolist() if empty else ():
        if sizes[label[row]] > 1:  # there is one: k is at most N
            sizes[label[row]] -= 1
            label[row], own[row] = empty.pop(), 0.0
            moved.append(row)
        if not empty:
            break
    return moved


def _move(
    found: Clusters, sums: np.ndarray, counts: np.ndarray, touched: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Set the centroids of changed clusters to the means; return those that moved, and how far."""
    rows = np.flatnonzero(touched & (counts > 0))
    means = (sums[rows] / counts[rows, None]).astype(np.float32)
    far = np.sqrt(squared_lengths(means - found.centroids[rows]))
    found.centroids[rows] = means
    return rows[far > 0], far[far > 0]


def _assign(found: Clusters, moved: np.ndarray, far: np.ndarray) -> None:
    """Bring labels and distances up to date after these centroids have moved so far."""
    is_moved = np.zeros(len(found.centroids), np.bool_)
    is_moved[moved] = True
    _measure_own(found, np.flatnonzero(is_moved[found.label]))
    slack = SLACK * (found.norms + found.own)
    rows = np.flatnonzero(found.own + slack > found.other)
    found.other[rows] = np.inf
    _compare(found, rows, np.flatnonzero(~is_moved))
    bound = np.sqrt(np.maximum(found.other - slack, 0))
    gap = bound - np.sqrt(found.own)
    gap[rows] = -np.inf  # their bounds do not know of the moved centroids yet
    order = np.argsort(far, kind="stable")
    cut, limit = _best_limit(far[order], np.sort(gap))
    if cut:
        # Those that moved little have come nearer to the other points by no more than the limit.
        safe = gap > limit
        found.other[safe] = np.square(bound[safe] - limit)
        _compare(found, np.flatnonzero(~safe), moved[order[:cut]])
    _compare(found, np.arange(len(gap)), moved[order[cut:]])


def _best_limit(far: np.ndarray, gaps: np.ndarray) -> tuple[int, np.float32]:
    """Find the movement up to which centroids are compared only with points of a smaller gap.

    far (m,) and gaps (N,) ascend. Returns how many centroids that are, and the limit.
    """
    m, N = len(far), len(gaps)
    best = (m * N, 0, np.float32(0))
    for cut in sorted({m * part // CHOICES for part in range(1, CHOICES + 1)} - {0}):
        limit = far[cut - 1]
        near = int(np.searchsorted(gaps, limit, side="right"))
        best = min(best, ((m - cut) * N + cut * near, cut, limit))
    return best[1], best[2]


def _measure_own(found: Clusters, rows: np.ndarray) -> None:
    """Compute the distances of these points to their own centroids."""

    def measure(part: slice) -> None:
        kernels.measure(rows[part], found.state)

    work = 2 * len(rows) * found.points.shape[1]
    for_each(measure, slices(len(rows), 4 * ROWS), found.threads, work)


def _compare(found: Clusters, rows: np.ndarray, columns: np.ndarray) -> None:
    """Compare points with centroids other than their own, and assign them to nearer ones."""
    if not len(rows) or not len(columns):
        return
    centroids = found.centroids[columns]
    norms, zeros = squared_lengths(centroids), np.zeros(len(columns), np.float32)
    shorts = found.short.of(centroids) if found.short else None
    state = found.state

    def compare(part: slice) -> None:
        some = rows[part]
        distances = np.full((2, len(some)), np.inf, np.float32)
        nearest = Nearest(distances, np.full(len(some), -1, np.int32))
        limits, exact = found.own[some] - found.norms[some], np.full(len(some), -np.inf, np.float32)
        short = _taken(found.short.points, some) if found.short else None
        points = None  # taken when they are needed: often the short forms are enough
        for tile in slices(len(columns), COLUMNS):
            vectors = Vectors(centroids[tile], norms[tile])
            if short is not None and shorts is not None:
                bounds = short @ shorts[tile].T
                limits = np.minimum(limits, distances[0])
                nearer = kernels.count_below(bounds, -limits, norms[tile], zeros[tile])
                if nearer * DENSE <= bounds.size:
                    kernels.fold(bounds, vectors, columns[tile], some, limits, state, nearest)
                    continue
            points = _taken(found.points, some) if points is None else points
            product = points @ vectors.rows.T
            kernels.fold(product, vectors, columns[tile], some, exact, state, nearest)
        kernels.settle(some, state, nearest)

    size = min(ROWS, max(64, -(-len(rows) // 8)))
    for_each(compare, slices(len(rows), size), found.threads, len(rows) * centroids.size)


def _taken(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Ascending rows of an array, without a copy if they follow each other."""
    first, last = int(rows[0]), int(rows[-1])
    return array[first : last + 1] if last - first + 1 == len(rows) else array[rows]


def for_each(function: Callable[[T], None], items: Iterable[T], threads: int, work: int) -> None:
    """Call a function with each item, on several threads unless there is little work.

    work: how many multiplications all calls take together.
    """
    run_all(function, items, threads if work >= WORTH_THREADS else 1)
