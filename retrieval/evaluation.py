"""Evaluate a retrieval problem: ranks and clusters become one dict of scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retrieval import bootstrap, checks, metrics
from retrieval.distances import DISTANCES
from retrieval.distributed.world import ALONE, World
from retrieval.embeddings import Embeddings
from retrieval.errors import DmlError
from retrieval.kmeans import ITERATIONS, STARTS
from retrieval.loading.load import load
from retrieval.problem import (
    Problem,
    from_arrays,
    from_embeddings,
    require_common_label,
    sample,
)
from retrieval.ranking.backends.choice import DEVICES, PATTERN
from retrieval.ranking.ranks import count_ranks
from retrieval.resources import StageProgress, allowed, stage
from retrieval.settings import Checked, Fault, accepting, one_of, within

if TYPE_CHECKING:
    from retrieval.results import Result, Scores

VERSION = 1


@dataclass(frozen=True)
class Settings(Checked):
    """How to evaluate; recorded in every result."""

    distances: tuple[str, ...] = one_of(*DISTANCES, default=DISTANCES)
    """Distances to rank by; one of them may be given alone."""
    recall_at: tuple[int, ...] = within(1, default=())
    """Values of K for Recall@K; empty: those that papers use for the data set that the file names,
    else 1, 2, 4, 8."""
    map_at_r: bool = True
    """Compute R-precision and MAP@R."""
    nmi: bool | None = None
    """Compute NMI and AMI; None: if k-means takes less than two minutes."""
    seeds: int = within(1, default=3)
    """Number of seeds of k-means, which are 0, 1, ..."""
    kmeans_init: str = one_of(*STARTS, default=STARTS[0])
    """Initial centroids: greedy k-means++, or random items with "random"."""
    kmeans_iterations: int = within(1, default=ITERATIONS)
    """Maximum number of k-means iterations."""
    kmeans_restarts: int | None = within(1, default=None)
    """Starts of k-means for each seed; None: ten up to 1,000 clusters, else one."""
    queries: int | None = within(1, default=None)
    """Evaluate only this many queries, drawn at random."""
    memory: int = within(64 << 20, default=2 << 30)
    """Bytes of working memory, in addition to the embeddings."""
    threads: int | None = within(1, default=None)
    """Number of threads; None: one per processor."""
    device: str = accepting(PATTERN.fullmatch, DEVICES, default="auto")
    """Device that counts ranks: "auto", "cpu", "cuda" or one GPU such as "cuda:1"."""
    resamples: int = within(1, default=2000)
    """Number of resamples of the class bootstrap."""
    level: float = accepting(lambda level: 0 < level < 1, "above 0 and below 1", default=0.95)
    """Level of the intervals."""
    seed: int = within(0, default=0)
    """Seed of the bootstrap and of the choice of queries."""

    def __post_init__(self) -> None:
        for name in ("distances", "recall_at"):  # one of them may be given alone
            given = getattr(self, name)
            several = isinstance(given, Iterable) and not isinstance(given, str)
            object.__setattr__(self, name, tuple(given) if several else (given,))
        self.require_valid()

    def conflicts(self) -> Iterator[Fault]:
        if len(set(self.distances)) != len(self.distances) or not self.distances:
            listed = ", ".join(self.distances)
            text = (
                f"distances = {listed} names a distance twice." if listed else "distances is empty."
            )
            yield Fault(("distances",), text)

    def of(self, data: Embeddings | None = None) -> Settings:
        """The settings with the usual K of the embeddings' data set, unless some are given."""
        if self.recall_at:
            return self
        return replace(self, recall_at=metrics.usual_recall_at(data.attrs if data else {}))


@dataclass(frozen=True)
class Evaluation:
    """The result and, per distance, what every query contributed to it."""

    problem: Problem
    result: Result
    ranks: dict[str, np.ndarray]  # distance -> (Q,), 0: no positive
    per_query: dict[str, dict[str, np.ndarray]] = field(repr=False)  # distance -> metric -> (Q,)

    def noted(self, note: str) -> Evaluation:
        """A copy with one more note for the user."""
        return replace(self, result=self.result | {"notes": [*self.result["notes"], note]})


def evaluate(
    data: np.ndarray | Embeddings | str | Path,
    labels: np.ndarray | str | Path | None = None,
    gallery: np.ndarray | str | Path | None = None,
    gallery_labels: np.ndarray | str | Path | None = None,
    *,
    drop_nonfinite: bool = False,
    progress: StageProgress | None = None,
    **settings: Any,
) -> Result:
    """Compute Recall@K and the other scores of embeddings.

    Without a gallery, every item is a query against all others.

    Parameters
    ----------
    data : array (N, D), Embeddings, str or Path
        Vectors, embeddings, or a file of them.
    labels : array (N,), str or Path
        Labels of the vectors; of a file, another file that holds its labels. An `Embeddings`
        has its own.
    gallery : array (G, D), str or Path, optional
        Vectors, or a file of them, that the data are queries against.
    gallery_labels : array (G,), str or Path, optional
        Labels of the gallery.
    drop_nonfinite : bool
        Leave out rows with NaN or infinity. Default: they are an error.
    progress : function, optional
        Called with (stage, done, total).
    settings
        Fields of `Settings`: distances, recall_at, map_at_r, nmi, seeds, queries, memory, ...

    Returns
    -------
    dict
        The versioned result of docs/json.md.
    """
    beside: dict[str, Any] = {
        "labels": labels,
        "gallery": gallery,
        "gallery_labels": gallery_labels,
    }
    given = [each for each in beside.values() if each is not None]
    if isinstance(data, Embeddings) and given:
        raise DmlError(
            "An `Embeddings` has its own labels and gallery.",
            "Other labels or another gallery are given as well.",
            "Pass arrays, or a file: evaluate(path, labels=other_path)",
        )
    chosen = Settings(**settings)
    of_file = isinstance(data, str | Path)
    if any(isinstance(each, str | Path) != of_file for each in given):
        raise DmlError(
            "Arrays and files are given together.",
            "Vectors, labels and gallery are all arrays, or all files.",
            "Read the file first: load(path).splits",
        )
    if isinstance(data, str | Path):
        data = load(data, **beside, train=False, progress=progress)
    if isinstance(data, Embeddings):
        problem = from_embeddings(data, drop_nonfinite=drop_nonfinite)
        return run(problem, chosen.of(data), progress).result
    if labels is None:
        raise DmlError(
            "There are no labels.",
            "Without them nothing says which items are of the same class.",
            "Pass them after the vectors: evaluate(vectors, labels)",
        )
    problem = from_arrays(data, **beside, drop_nonfinite=drop_nonfinite)
    return run(problem, chosen, progress).result


def run(problem: Problem, settings: Settings, progress: StageProgress | None = None) -> Evaluation:
    """Evaluate the problem; `progress(stage, done, total)` is called during long stages."""
    return with_nmi(score(problem, settings, progress), problem, settings, progress)


def with_nmi(
    found: Evaluation,
    problem: Problem,
    settings: Settings,
    progress: StageProgress | None = None,
    world: World = ALONE,
) -> Evaluation:
    """Add NMI and AMI where they are wanted; of several processes, the first one clusters."""
    if settings.nmi is False or world.rank:
        return found
    from retrieval.clustering import add_nmi  # not imported where k-means is not wanted

    return add_nmi(found, problem, settings, progress)


def score(
    problem: Problem,
    settings: Settings,
    progress: StageProgress | None = None,
    world: World = ALONE,
) -> Evaluation:
    """All scores but NMI and AMI, which k-means may take long for: `clustering.add_nmi`."""
    settings, full = settings.of(), problem
    require_common_label(problem)
    if settings.queries is not None:
        problem = sample(problem, settings.queries, settings.seed)
    if world.size > 1:
        world.require_same(problem.checksum(), "embeddings")
    ranked = count_ranks(
        problem,
        distances=settings.distances,
        positions=settings.map_at_r,
        memory=settings.memory,
        threads=settings.threads and allowed(settings.threads),
        device=settings.device,
        progress=stage(progress, "ranks"),
        world=world,
    )
    found = checks.data_checks(full)
    per_query = {
        d: metrics.query_scores(r.rank, r.positions, settings.recall_at) for d, r in ranked.items()
    }
    scores = {}
    for d, r in ranked.items():
        scores[d] = _summary(per_query[d], problem.query_codes, settings)
        scores[d]["tied_queries"] = int(np.count_nonzero(r.ties))
    tied = np.any([r.ties > 0 for r in ranked.values()], axis=0)
    found["tied_queries"] = int(np.count_nonzero(tied))
    ranks = {d: r.rank for d, r in ranked.items()}
    found["lone_queries"] = int(np.count_nonzero(ranks[settings.distances[0]] == 0))
    result: Result = {
        "version": VERSION,
        "protocol": problem.protocol,
        "queries": len(problem.query_codes),
        "gallery": len(problem.gallery),
        "classes": len(problem.names),
        "dim": int(problem.gallery.shape[1]),
        "distances": scores,
        "checks": found,
        "notes": checks.notes(problem, settings.recall_at),
        "settings": _recorded(settings),
    }
    return Evaluation(problem, result, ranks, per_query)


def _summary(scores: dict[str, np.ndarray], codes: np.ndarray, settings: Settings) -> Scores:
    """Means over queries with class-bootstrap intervals, in the shape of the JSON."""
    table = np.stack([np.asarray(column, np.float64) for column in scores.values()], axis=1)
    low, high = bootstrap.interval(table, codes, settings.resamples, settings.level, settings.seed)
    spans = {
        name: None if math.isnan(a) else [float(a), float(b)]
        for name, a, b in zip(scores, low, high, strict=True)
    }
    means = {name: metrics.mean(column) for name, column in scores.items()}
    out: Scores = {}
    for metric in metrics.query_metrics():
        for name, values in ((metric.name, means), (f"{metric.name}_ci", spans)):
            if metric.at_k:
                out[name] = {str(k): values[f"{metric.name}@{k}"] for k in settings.recall_at}
            else:
                out[name] = values.get(metric.name)
    return out


def _recorded(settings: Settings) -> dict[str, Any]:
    """The settings as used; threads, memory and the device of the ranks change no score."""
    used = asdict(settings) | {"nmi": False}
    for name in ("threads", "memory", "device"):
        used.pop(name)
    used |= {"engine": "count"} | {name: version(name) for name in ("dmltool", "numpy", "numba")}
    return used | {"distances": list(settings.distances), "recall_at": list(settings.recall_at)}
