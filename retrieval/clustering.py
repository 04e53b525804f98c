"""k-means on all points, and the clustering scores that follow.

The start is greedy k-means++ (`kmeans/seeding.py`), the iterations are exact (`kmeans/lloyd.py`).
Several starts on up to 8,192 points share the distances of all pairs (`kmeans/pairs.py`). Other
iterations are those of FAISS where it finds a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from types import ModuleType

import numpy as np

from retrieval import metrics
from retrieval.errors import DmlError
from retrieval.kmeans import ITERATIONS, STARTS, lloyd, pairs, seeding
from retrieval.kmeans.bounds import Short, short_forms
from retrieval.kmeans.pairs import Pairs, all_pairs
from retrieval.resources import Progress, processors, run_all, single_blas_thread
from retrieval.space import single_precision

# A start and its iterations take as long as so many assignments of all points to all centroids:
PASSES = 6  # above MANY clusters
PASSES_BY_PAIRS = 8  # with the distances of all pairs
PASSES_ONE_BY_ONE = 40  # without them, and with one centroid chosen at a time
RESTARTS = 10  # of each seed, up to MANY clusters; as in scikit-learn and the papers' code
SMALL = 1 << 31  # multiplications of an assignment: up to here every thread has its own start
SOME = 64  # clusters from which short forms of the points save more than they cost
MANY = 1000  # clusters beyond which ten starts would take minutes
SPEED = 1 << 36  # multiplications a second on two cores
LONG = 120.0  # seconds that are worth waiting for without being asked


@dataclass(frozen=True)
class KMeans:
    """How to cluster."""

    init: str = STARTS[0]  # or another of STARTS
    iterations: int = ITERATIONS
    restarts: int | None = None  # None: RESTARTS up to MANY clusters, else one
    threads: int | None = None  # None: one per processor; changes no result

    @property
    def workers(self) -> int:
        return self.threads or processors()

    def starts(self, k: int) -> int:
        """How many starts each seed has."""
        return self.restarts or (RESTARTS if k <= MANY else 1)


@dataclass(frozen=True)
class Found:
    """The best of several runs."""

    assignment: np.ndarray  # (N,) the cluster of each row
    objective: float  # sum of squared distances of rows to their centroids
    iterations: int


def estimated_seconds(points: int, dim: int, clusters: int, runs: int) -> float:
    """How long so many runs of k-means take on two cores."""
    passes = PASSES
    if clusters <= MANY:
        passes = PASSES_BY_PAIRS if points <= pairs.MOST else PASSES_ONE_BY_ONE
    return points * dim * clusters * runs * passes / SPEED


def kmeans(
    vectors: np.ndarray,
    k: int,
    *,
    seed: int,
    distance: str = "l2",
    settings: KMeans | None = None,
    progress: Progress | None = None,
) -> Found:
    """Cluster rows by k-means.

    cos clusters the rows scaled to length 1 (zero rows stay zero); centroids are plain means in
    both cases. Of several starts, the one with the least objective is kept. One float32 copy of all
    rows is needed.
    """
    settings = settings or KMeans()
    data = _data(vectors, distance, k, settings)
    return _best_of(data, k, seed, settings, _Meter(progress, settings.starts(k), k))


def cluster_scores(
    vectors: np.ndarray,
    labels: np.ndarray,
    distance: str,
    seeds: Sequence[int],
    *,
    settings: KMeans | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, list[float]], list[int]]:
    """NMI and AMI of as many clusters as there are classes, and the iterations, for each seed."""
    k = len(np.unique(labels))
    settings = settings or KMeans()
    data = _data(vectors, distance, k, settings)
    meter = _Meter(progress, len(seeds) * settings.starts(k), k)
    scores: dict[str, list[float]] = {metric.name: [] for metric in metrics.cluster_metrics()}
    iterations = []
    for seed in seeds:
        found = _best_of(data, k, seed, settings, meter)
        iterations.append(found.iterations)
        for metric in metrics.cluster_metrics():
            scores[metric.name].append(metric.function(labels, found.assignment))
    return scores, iterations


@dataclass(frozen=True)
class _Data:
    points: np.ndarray  # (N, D) float32
    scale: float  # what the vectors were multiplied by
    short: Short | None  # short forms of the points
    pairs: Pairs | None  # their distances, for several starts on not too many points


def _data(vectors: np.ndarray, distance: str, k: int, settings: KMeans) -> _Data:
    points, scale = single_precision(vectors, distance)
    several = settings.init != "random" and settings.starts(k) > 1 and k <= MANY
    with single_blas_thread():
        if several and len(points) <= pairs.MOST:
            return _Data(points, scale, None, all_pairs(points, settings.workers))
        return _Data(points, scale, short_forms(points) if k >= SOME else None, None)


def _best_of(data: _Data, k: int, seed: int, settings: KMeans, meter: _Meter) -> Found:
    N = len(data.points)
    if not 1 <= k <= N:
        raise DmlError(
            f"{k} clusters of {N} points cannot be made.",
            f"Between 1 and {N} are possible.",
            "Ask for fewer clusters.",
        )
    seeds = [_derived(seed, restart) for restart in range(settings.starts(k))]
    small = data.pairs is not None or (data.points.size * k <= SMALL and not faiss_with_gpu())
    threads = 1 if small and len(seeds) > 1 else settings.workers
    found: dict[int, Found] = {}

    def run(seed: int) -> None:
        found[seed] = _run(data, k, seed, threads, settings, meter)

    with single_blas_thread():
        if threads == 1:
            run_all([(partial(run, seed), 1) for seed in seeds], settings.workers, stop=meter.stop)
        else:
            for seed in seeds:
                run(seed)
        best = min((found[seed] for seed in seeds), key=lambda one: one.objective)
        if data.pairs is not None:
            best = _confirmed(data, k, best, settings, meter)
    meter.finished(len(seeds))
    return Found(best.assignment, best.objective / data.scale / data.scale, best.iterations)


def _derived(seed: int, restart: int) -> int:
    """The seed itself, then others that do not meet those of neighbouring seeds."""
    if restart == 0:
        return seed
    return int(np.random.SeedSequence((seed, restart)).generate_state(1)[0] >> 1)


def _run(data: _Data, k: int, seed: int, threads: int, settings: KMeans, meter: _Meter) -> Found:
    """One start and its iterations."""
    points, most = data.points, settings.iterations
    if data.pairs is not None:
        known = pairs.initial(data.pairs, k, int(seeding.trials(0, k)), seed, meter.seeded)
        used = pairs.iterate(known, most, meter.iterated)
        return Found(known.label, known.objective, used)
    given = (points, k, settings.init, seed, threads, meter.seeded)
    found = seeding.initial(*given, short=data.short)
    if faiss := faiss_with_gpu():
        return _on_gpu(faiss, points, found.centroids, most, meter)
    used = lloyd.iterate(found, most, meter.iterated)
    return Found(found.label, found.objective, used)


def _confirmed(data: _Data, k: int, best: Found, settings: KMeans, meter: _Meter) -> Found:
    """Iterate with centroids until nothing changes: sums of distances round more than they do."""
    most = settings.iterations - best.iterations
    if not most:
        return best
    found = lloyd.from_labels(data.points, best.assignment, k, settings.workers)
    used = lloyd.iterate(found, most, meter.iterated)
    return Found(found.label, found.objective, best.iterations + used - 1)


def faiss_with_gpu() -> ModuleType | None:
    """FAISS, if it is there and finds a GPU."""
    try:
        import faiss
    except ImportError:
        return None
    return faiss if getattr(faiss, "get_num_gpus", int)() > 0 else None


def _on_gpu(
    faiss: ModuleType, points: np.ndarray, centroids: np.ndarray, most: int, meter: _Meter
) -> Found:
    """One iteration per call, so that progress is seen and Ctrl-C waits for one only."""
    faiss_kmeans = faiss.Kmeans(
        points.shape[1],
        len(centroids),
        niter=1,
        gpu=getattr(faiss, "get_num_gpus", int)() > 0,
        check_input_data_for_NaNs=False,  # checked once already, not in every iteration
        # All points, however many; and no complaint on stderr about few.
        max_points_per_centroid=len(points),
        min_points_per_centroid=1,
    )
    used = most
    for iteration in range(most):
        faiss_kmeans.train(points, init_centroids=centroids)
        meter.iterated()
        if np.array_equal(centroids, faiss_kmeans.centroids):  # a fixed point
            used = iteration + 1
            break
        centroids = faiss_kmeans.centroids
    squared, assignment = faiss_kmeans.assign(points)
    return Found(assignment, float(squared.sum(dtype=np.float64)), used)


class _Meter:
    """Progress of several runs: two thirds of each for its start, one for its iterations."""

    def __init__(self, progress: Progress | None, runs: int, k: int) -> None:
        self.progress, self.k, self.each = progress, k, k + k // 2 + 1
        self.total, self.done, self.ended = runs * self.each, 0, 0
        self.lock, self.stopped = Lock(), False

    def seeded(self, centroids: int) -> None:
        self._tell(centroids)

    def iterated(self) -> None:
        """How many iterations follow is not known, but they get shorter and shorter."""
        self._tell((self.ended + self.each - self.done) // 2)

    def finished(self, runs: int) -> None:
        self.ended += runs * self.each
        self._tell(self.ended - self.done)

    def stop(self) -> None:
        self.stopped = True

    def _tell(self, more: int) -> None:
        """Several starts may tell at once; none after a failure of another one."""
        with self.lock:
            if self.stopped:
                raise InterruptedError
            self.done = min(self.done + max(0, more), self.total)
            if self.progress is not None:
                self.progress(self.done, self.total)
