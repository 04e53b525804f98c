"""k-means by FAISS on all points, and the clustering scores that follow.

FAISS runs one iteration per call, each from the centroids of the last: the result is that of
`faiss.Kmeans` with the same settings, progress is seen and Ctrl-C waits for one iteration only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np

from retrieval import metrics
from retrieval.errors import DmlError, install
from retrieval.resources import Progress

SPEED = 1 << 35  # multiplications a second on two cores; large problems reach twice that
LONG = 30.0  # seconds that are worth waiting for without being asked


def load_faiss() -> ModuleType:
    """Import FAISS, or say what to install."""
    try:
        import faiss
    except ImportError as error:
        raise DmlError(
            "FAISS is not installed.", "Clustering by k-means needs it.", install("cpu")
        ) from error
    return faiss


def estimated_seconds(points: int, dim: int, clusters: int, iterations: int) -> float:
    """How long so many iterations of k-means take on two cores, all runs together."""
    return points * dim * clusters * iterations / SPEED


def kmeans(
    vectors: np.ndarray,
    k: int,
    *,
    seed: int,
    iterations: int = 20,
    restarts: int = 1,
    distance: str = "l2",
    progress: Progress | None = None,
) -> tuple[np.ndarray, float]:
    """Cluster of each row (N,) int64, and the sum of squared distances to its centroid.

    cos clusters the rows scaled to length 1 (zero rows stay zero); centroids are plain means in
    both cases. Of several restarts, the one with the least sum is kept. FAISS needs one float32
    copy of all rows.
    """
    points, scale = _points(vectors, distance)
    tick = _ticker(progress, restarts * iterations)
    return _best_of(points, scale, k, seed, iterations, restarts, tick)


def cluster_scores(
    vectors: np.ndarray,
    labels: np.ndarray,
    distance: str,
    seeds: Sequence[int],
    *,
    iterations: int = 20,
    restarts: int = 1,
    progress: Progress | None = None,
) -> dict[str, list[float]]:
    """NMI and AMI of as many clusters as there are classes, one value per seed."""
    k = len(np.unique(labels))
    points, scale = _points(vectors, distance)
    tick = _ticker(progress, len(seeds) * restarts * iterations)
    scores: dict[str, list[float]] = {metric.name: [] for metric in metrics.cluster_metrics()}
    for seed in seeds:
        assignment, _ = _best_of(points, scale, k, seed, iterations, restarts, tick)
        for metric in metrics.cluster_metrics():
            scores[metric.name].append(metric.function(labels, assignment))
    return scores


def _points(vectors: np.ndarray, distance: str) -> tuple[np.ndarray, float]:
    from retrieval.space import single_precision  # scores without NMI do not need it

    return single_precision(vectors, distance)


def _best_of(
    points: np.ndarray,
    scale: float,
    k: int,
    seed: int,
    iterations: int,
    restarts: int,
    tick: Callable[[int], None],
) -> tuple[np.ndarray, float]:
    N = len(points)
    if not 1 <= k <= N:
        raise DmlError(
            f"{k} clusters of {N} points cannot be made.",
            f"Between 1 and {N} are possible.",
            "Ask for fewer clusters.",
        )
    runs = (_run(points, k, _derived(seed, r), iterations, tick) for r in range(restarts))
    assignment, objective = min(runs, key=lambda run: run[1])  # holds the best and one more
    return assignment, objective / scale / scale


def _derived(seed: int, restart: int) -> int:
    """The seed itself, then others that do not meet those of neighbouring seeds."""
    if restart == 0:
        return seed
    return int(np.random.SeedSequence((seed, restart)).generate_state(1)[0] >> 1)


def _run(
    points: np.ndarray, k: int, seed: int, iterations: int, tick: Callable[[int], None]
) -> tuple[np.ndarray, float]:
    faiss = load_faiss()
    faiss_kmeans = faiss.Kmeans(
        points.shape[1],
        k,
        niter=1,
        seed=seed,
        spherical=False,
        verbose=False,
        gpu=hasattr(faiss, "get_num_gpus") and faiss.get_num_gpus() > 0,
        check_input_data_for_NaNs=False,  # checked once already, not in every iteration
        # All points, however many; and no complaint on stderr about few.
        max_points_per_centroid=len(points),
        min_points_per_centroid=1,
    )
    centroids = None
    for iteration in range(iterations):
        faiss_kmeans.train(points, init_centroids=centroids)
        if centroids is not None and np.array_equal(centroids, faiss_kmeans.centroids):
            tick(iterations - iteration)  # a fixed point: the rest would repeat it
            break
        centroids = faiss_kmeans.centroids
        tick(1)
    squared, assignment = faiss_kmeans.assign(points)
    return assignment, float(squared.sum(dtype=np.float64))


def _ticker(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def tick(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    return tick
