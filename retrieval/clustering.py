"""Compute NMI and AMI: compare the clusters that k-means finds with the classes.

The start is greedy k-means++ (`kmeans/seeding.py`), the iterations are exact (`kmeans/lloyd.py`).
Several starts on up to 8,192 points share the distances of all pairs (`kmeans/pairs.py`). Other
iterations are those of FAISS where it finds a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from retrieval.distances import single_precision, unit_length
from retrieval.kmeans import lloyd, pairs, seeding
from retrieval.kmeans.seeding import MANY
from retrieval.metrics import cluster_metrics
from retrieval.number_format import duration
from retrieval.problem import Problem
from retrieval.resources import (
    Progress,
    StageProgress,
    allowed,
    processors,
    run_all,
    single_blas_thread,
    stage,
)
from retrieval.results import QUERY_GALLERY
from retrieval.rows.identical import row_groups

if TYPE_CHECKING:
    from retrieval.evaluation import Evaluation, Settings
    from retrieval.results import Scores

# A start and its iterations take as long as so many assignments of all points to all centroids:
PASSES = 6  # above MANY clusters
PASSES_BY_PAIRS = 8  # with the distances of all pairs
PASSES_ONE_BY_ONE = 40  # without them, and with one centroid chosen at a time
RESTARTS = 10  # of each seed, up to MANY clusters: beyond them they would take minutes
SMALL = 1 << 31  # multiplications of an assignment: up to here every thread has its own start
SOME = 64  # clusters from which short forms of the points save more than they cost
SPEED = 1 << 36  # multiplications a second on two cores
LONG = 120.0  # seconds; longer k-means runs only on request


def add_nmi(
    found: Evaluation,
    problem: Problem,
    settings: Settings,
    progress: StageProgress | None = None,
) -> Evaluation:
    """Add NMI and AMI to the evaluation of this problem; all its queries are clustered.

    A note says so if k-means is left out because it would take long and was not requested.
    """
    if settings.nmi is False:
        return found
    k = len(problem.names)
    seconds = 0.0 if settings.nmi else seconds_of(problem, settings)
    if seconds > LONG:
        return found.noted(
            f"NMI was left out: k-means with {k:,} clusters would take about "
            f"{duration(seconds)} on two cores; --nmi computes it"
        )
    vectors, codes = problem.gallery, problem.gallery_codes
    if problem.protocol == QUERY_GALLERY:
        vectors = np.concatenate([problem.query_vectors, vectors])
        codes = np.concatenate([problem.query_codes, codes])
    clusters = {
        d: cluster_scores(vectors, codes, d, settings, stage(progress, f"k-means ({d})"))
        for d in _clustered(problem, settings)
    }
    scores = {
        d: values | clusters[d if d in clusters else "cos"]
        for d, values in found.result["distances"].items()
    }
    used = found.result["settings"] | {
        "nmi": True,
        "kmeans_k": k,
        "kmeans_restarts": restarts(settings, k),
        "nmi_average": "arithmetic",
    }
    if faiss := faiss_with_gpu():
        used |= {"faiss": faiss.__version__}
    return replace(found, result=found.result | {"distances": scores, "settings": used})


def seconds_of(problem: Problem, settings: Settings) -> float:
    """How long k-means takes, estimated."""
    N, D = problem.gallery.shape
    N += len(problem.query_codes) if problem.protocol == QUERY_GALLERY else 0
    k = len(problem.names)
    runs = len(_clustered(problem, settings)) * settings.seeds * restarts(settings, k)
    return estimated_seconds(N, D, k, runs)


def estimated_seconds(points: int, dim: int, clusters: int, runs: int) -> float:
    """How long so many runs of k-means take on two cores."""
    passes = PASSES
    if clusters <= MANY:
        passes = PASSES_BY_PAIRS if points <= pairs.MOST else PASSES_ONE_BY_ONE
    return points * dim * clusters * runs * passes / SPEED


def restarts(settings: Settings, k: int) -> int:
    """How many starts each seed has."""
    return settings.kmeans_restarts or (RESTARTS if k <= MANY else 1)


def _clustered(problem: Problem, settings: Settings) -> Sequence[str]:
    """The distances to cluster by; only cos if all vectors have length 1: l2 is the same."""
    if len(settings.distances) < 2:
        return settings.distances
    alike = unit_length(problem.gallery) and (
        problem.queries is None or unit_length(problem.queries)
    )
    return ("cos",) if alike else settings.distances


def cluster_scores(
    vectors: np.ndarray,
    labels: np.ndarray,
    distance: str,
    settings: Settings,
    progress: Progress | None = None,
) -> Scores:
    """NMI and AMI of as many clusters as there are classes, and the iterations, for each seed."""
    k = len(np.unique(labels))
    found = kmeans(vectors, k, distance, range(settings.seeds), settings, progress)
    scores: Scores = {}
    for metric in cluster_metrics():
        values = [float(metric.function(labels, one.assignment)) for one in found]
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        scores[metric.name] = {"mean": float(np.mean(values)), "std": std, "values": values}
    return scores | {"kmeans_iterations": [one.iterations for one in found]}


@dataclass(frozen=True)
class Found:
    """The best of several runs."""

    assignment: np.ndarray  # (N,) the cluster of each row
    objective: float  # sum of squared distances of rows to their centroids
    iterations: int


@dataclass(frozen=True)
class _Job:
    """What all runs share."""

    points: np.ndarray  # (N, D) float32
    k: int
    settings: Settings
    workers: int  # threads; they change no result
    tell: _Meter
    short: lloyd.Short | None  # short forms of the points
    pairs: pairs.Pairs | None  # their distances, for several starts on not too many points


def kmeans(
    vectors: np.ndarray,
    k: int,
    distance: str,
    seeds: Sequence[int],
    settings: Settings,
    progress: Progress | None = None,
) -> list[Found]:
    """Cluster rows by k-means, with each of the seeds.

    cos clusters the rows scaled to length 1 (zero rows stay zero); centroids are plain means in
    both cases. Of several starts, the one with the least objective is kept. One float32 copy of all
    rows is needed.
    """
    N = len(vectors)
    assert 1 <= k <= N, "every class has an item"
    points, scale = single_precision(vectors, distance)
    alike = row_groups(points)
    if len(distinct := np.unique(alike)) <= k:  # identical rows are never split
        return [Found(np.searchsorted(distinct, alike), 0.0, 1) for _ in seeds]
    starts = restarts(settings, k)
    workers = allowed(settings.threads or processors())
    tell = _Meter(progress, len(seeds) * starts, k)
    by_pairs = starts > 1 and settings.kmeans_init != "random" and k <= MANY and N <= pairs.MOST
    with single_blas_thread():
        known = pairs.all_pairs(points, workers) if by_pairs else None
        short = lloyd.short_forms(points) if k >= SOME and not by_pairs else None
        job = _Job(points, k, settings, workers, tell, short, known)
        found = [_best(job, [_derived(seed, start) for start in range(starts)]) for seed in seeds]
    return [replace(one, objective=one.objective / scale / scale) for one in found]


def _derived(seed: int, restart: int) -> int:
    """The seed of a start: `seed` itself, then seeds that no other seed in use shares."""
    if restart == 0:
        return seed
    return int(np.random.SeedSequence((seed, restart)).generate_state(1)[0] >> 1)


def _best(job: _Job, seeds: list[int]) -> Found:
    small = job.pairs is not None or (job.points.size * job.k <= SMALL and not faiss_with_gpu())
    found: dict[int, Found] = {}

    def run(seed: int, threads: int) -> None:
        found[seed] = _run(job, seed, threads)
        job.tell.finished()

    if small and len(seeds) > 1:
        run_all(partial(run, threads=1), seeds, job.workers, stop=job.tell.stop)
    else:
        for seed in seeds:
            run(seed, job.workers)
    best = min((found[seed] for seed in seeds), key=lambda one: one.objective)
    left = job.settings.kmeans_iterations - best.iterations
    if job.pairs is None or not left:
        return best
    # With centroids until nothing changes: sums of distances round more than they do.
    confirmed = lloyd.from_labels(job.points, best.assignment, job.k, job.workers)
    used = best.iterations + lloyd.iterate(confirmed, left, job.tell) - 1
    return Found(confirmed.label, confirmed.objective, used)


def _run(job: _Job, seed: int, threads: int) -> Found:
    """One start and its iterations."""
    k, most = job.k, job.settings.kmeans_iterations
    if job.pairs is not None:
        known = pairs.initial(job.pairs, k, int(seeding.trials(0, k)), seed, job.tell)
        used = pairs.iterate(known, most, job.tell)
        return Found(known.label, known.objective, used)
    kind = job.settings.kmeans_init
    found = seeding.initial(job.points, k, kind, seed, threads, job.tell, short=job.short)
    if faiss := faiss_with_gpu():
        return _on_gpu(faiss, job.points, found.centroids, most, job.tell)
    used = lloyd.iterate(found, most, job.tell)
    return Found(found.label, found.objective, used)


def faiss_with_gpu() -> ModuleType | None:
    """FAISS, if it is there and finds a GPU."""
    try:
        import faiss
    except ImportError:
        return None
    return faiss if getattr(faiss, "get_num_gpus", int)() > 0 else None


def _on_gpu(
    faiss: ModuleType,
    points: np.ndarray,
    centroids: np.ndarray,
    most: int,
    tell: Callable[[], object],
) -> Found:
    """Run FAISS one iteration per call, to show progress and to stop soon after Ctrl-C."""
    faiss_kmeans = faiss.Kmeans(
        points.shape[1],
        len(centroids),
        niter=1,
        gpu=True,
        check_input_data_for_NaNs=False,  # checked once already, not in every iteration
        # All points, however many; and no complaint on stderr about few.
        max_points_per_centroid=len(points),
        min_points_per_centroid=1,
    )
    used = most
    for iteration in range(most):
        faiss_kmeans.train(points, init_centroids=centroids)
        tell()
        if np.array_equal(centroids, faiss_kmeans.centroids):  # a fixed point
            used = iteration + 1
            break
        centroids = faiss_kmeans.centroids
    squared, assignment = faiss_kmeans.assign(points)
    return Found(assignment, float(squared.sum(dtype=np.float64)), used)


class _Meter:
    """Progress of several runs: two thirds of each for its start, one for its iterations."""

    def __init__(self, progress: Progress | None, runs: int, k: int) -> None:
        self.progress, self.each = progress, k + k // 2
        self.total, self.done, self.ended = runs * self.each, 0, 0
        self.lock, self.stopped = Lock(), False

    def stop(self) -> None:
        self.stopped = True

    def finished(self) -> None:
        """A run has ended."""
        with self.lock:
            self.ended += self.each
            more = max(0, self.ended - self.done)
        self(more)

    def __call__(self, more: int | None = None) -> None:
        """Centroids were chosen, or without a number, an iteration was done.

        How many iterations follow is not known, but they get shorter and shorter. Several starts
        may tell at once; none after a failure of another one.
        """
        with self.lock:
            if self.stopped:
                raise InterruptedError
            if more is None:
                more = max(0, self.ended + self.each - self.done) // 2
            self.done = min(self.done + more, self.total)
            if self.progress is not None:
                self.progress(self.done, self.total)
