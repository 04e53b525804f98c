"""Exact k-means iterations (Lloyd's algorithm) that compute only distances that can matter.

Each point keeps the squared distance to its own centroid and a lower bound of the distance to all
others. A centroid that did not move cannot newly attract a point unless the point's own centroid
went beyond that bound; a centroid that moved by m cannot attract a point whose bound exceeds its
own distance by more than m. What remains is computed as matrix products over tiles of fixed sizes,
each by one thread, so that the result does not depend on how many threads there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from retrieval.kmeans import kernels
from retrieval.kmeans.bounds import DENSE, Short
from retrieval.resources import run_all, slices

ROWS, COLUMNS = 1024, 512  # points and centroids of a tile
SLACK = np.float32(1e-5)  # room for rounding in bounds, as a fraction of squared lengths
WORTH_THREADS = 1 << 27  # multiplications; fewer take less time than starting threads
CHOICES = 16  # how many limits of movement are tried in each iteration


@dataclass
class Clusters:
    """Points, centroids, and what is known of their distances."""

    points: np.ndarray  # (N, D) float32
    norms: np.ndarray  # (N,) squared lengths of the points
    centroids: np.ndarray  # (k, D) float32
    label: np.ndarray  # (N,) int32, the cluster of each point
    own: np.ndarray  # (N,) float32, squared distance to its own centroid
    other: np.ndarray  # (N,) float32, at most the squared distance to any other centroid
    threads: int
    short: Short | None = None  # with it, most distances are ruled out without being computed

    @property
    def objective(self) -> float:
        """The sum of squared distances of all points to their centroids."""
        return float(self.own.sum(dtype=np.float64))


def squared_lengths(rows: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ij->i", rows, rows)


def unassigned(points: np.ndarray, k: int, threads: int, short: Short | None) -> Clusters:
    """Clusters whose centroids are still to be found."""
    N, D = points.shape
    return Clusters(
        points,
        squared_lengths(points),
        np.zeros((k, D), np.float32),
        np.full(N, -1, np.int32),
        np.full(N, np.inf, np.float32),
        np.full(N, np.inf, np.float32),
        threads,
        short,
    )


def from_centroids(
    points: np.ndarray, centroids: np.ndarray, threads: int, short: Short | None = None
) -> Clusters:
    """Assign all points to the nearest of these centroids."""
    found = unassigned(points, len(centroids), threads, short)
    found.centroids[:] = centroids
    _compare(found, np.arange(len(points)), np.arange(len(centroids)))
    return found


def from_labels(points: np.ndarray, label: np.ndarray, k: int, threads: int) -> Clusters:
    """Points in these clusters, whose centroids the first iteration computes."""
    found = unassigned(points, k, threads, None)
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
        kernels.measure(
            found.points, found.norms, found.centroids, rows[part], found.label, found.own
        )

    tasks = [partial(measure, part) for part in slices(len(rows), 4 * ROWS)]
    run_tasks(tasks, found.threads, 2 * len(rows) * found.points.shape[1])


def _compare(found: Clusters, rows: np.ndarray, columns: np.ndarray) -> None:
    """Compare points with centroids other than their own, and assign them to nearer ones."""
    if not len(rows) or not len(columns):
        return
    whole = found.centroids[columns]
    shorts = found.short.of(whole) if found.short else None
    others = Others(columns, whole, squared_lengths(whole), shorts)
    size = min(ROWS, max(64, -(-len(rows) // 8)))
    tasks = [partial(_compare_tile, found, rows[part], others) for part in slices(len(rows), size)]
    run_tasks(tasks, found.threads, len(rows) * whole.size)


class Others(NamedTuple):
    """Centroids that points are compared with."""

    columns: np.ndarray  # (m,) which they are
    centroids: np.ndarray  # (m, D)
    norms: np.ndarray  # (m,) squared lengths
    shorts: np.ndarray | None  # (m, H + 1)


def _compare_tile(found: Clusters, rows: np.ndarray, others: Others) -> None:
    label, limits = found.label[rows], found.own[rows] - found.norms[rows]
    nearest = np.full((2, len(rows)), np.inf, np.float32)
    which = np.full(len(rows), -1, np.int32)
    shorts = _taken(found.short.points, rows) if found.short else None
    exact = np.full(len(rows), -np.inf, np.float32)
    points = None  # taken when they are needed: often the short forms are enough
    for part in slices(len(others.columns), COLUMNS):
        columns, centroids, norms = others.columns[part], others.centroids[part], others.norms[part]
        parts = (found.points, rows, centroids, nearest, which)
        if shorts is not None and others.shorts is not None:
            bounds = shorts @ others.shorts[part].T
            limits = np.minimum(limits, nearest[0])
            if kernels.count_nearer(bounds, norms, limits) * DENSE <= bounds.size:
                kernels.fold(bounds, norms, columns, label, limits, *parts)
                continue
        points = _taken(found.points, rows) if points is None else points
        kernels.fold(points @ centroids.T, norms, columns, label, exact, *parts)
    state = (nearest, which, found.label, found.own, found.other)
    kernels.settle(rows, found.points, found.norms, found.centroids, *state)


def _taken(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Ascending rows of an array, without a copy if they follow each other."""
    first, last = int(rows[0]), int(rows[-1])
    return array[first : last + 1] if last - first + 1 == len(rows) else array[rows]


def run_tasks(tasks: Sequence[Callable[[], None]], threads: int, work: int) -> None:
    """Run tasks of so many multiplications on several threads, or here if that would be slower."""
    if threads > 1 and work >= WORTH_THREADS:
        run_all([(task, 1) for task in tasks], threads)
        return
    for task in tasks:
        task()
