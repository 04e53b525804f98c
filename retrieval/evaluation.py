"""Evaluate a retrieval problem: ranks and clusters become one dict of scores."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from retrieval import bootstrap, checks, clustering, metrics
from retrieval.embeddings import Embeddings
from retrieval.errors import DmlError, install
from retrieval.loading import load
from retrieval.metrics import DISTANCES
from retrieval.number_format import duration
from retrieval.problem import (
    LEAVE_ONE_OUT,
    QUERY_GALLERY,
    Problem,
    from_arrays,
    from_embeddings,
    require_common_label,
    sample,
)
from retrieval.ranking.ranks import count_ranks
from retrieval.resources import StageProgress, allowed, stage
from retrieval.results import Result, Scores

VERSION = 1
LEAST = {"seeds": 1, "kmeans_iterations": 1, "kmeans_restarts": 1, "queries": 1, "threads": 1}
LEAST |= {"seed": 0, "memory": 64 << 20}


@dataclass(frozen=True)
class Settings:
    """How to evaluate; recorded in every result."""

    distances: tuple[str, ...] = DISTANCES
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    map_at_r: bool = True  # R-precision and MAP@R
    nmi: bool | None = None  # NMI and AMI; None: if FAISS is there and k-means is not long
    seeds: int = 3  # k-means is run with seeds 0, 1, ...
    kmeans_iterations: int = 20
    kmeans_restarts: int = 1
    queries: int | None = None  # ask only so many, drawn at random
    memory: int = 2 << 30  # bytes beyond the embeddings themselves
    threads: int | None = None
    resamples: int = 2000  # of the class bootstrap
    level: float = 0.95
    seed: int = 0  # of the bootstrap and of the sampled queries

    def __post_init__(self) -> None:
        for name in ("distances", "recall_at"):  # one of them may be given alone, or a list
            given = getattr(self, name)
            several = [given] if isinstance(given, str | int) else given
            object.__setattr__(self, name, tuple(several))
        rules = {
            "distances": (
                0 < len(set(self.distances) & {*DISTANCES}) == len(self.distances),
                f"wants some of {DISTANCES}",
            ),
            "recall_at": (
                min(self.recall_at, default=0) >= 1
                and all(
                    isinstance(k, int | np.integer) and not isinstance(k, bool)
                    for k in self.recall_at
                ),
                "wants whole numbers from 1",
            ),
        }
        for name, low in LEAST.items():
            value = getattr(self, name)
            rules[name] = (value is None or value >= low, f"wants at least {low:,}")
        wrong = [
            f"{name} = {getattr(self, name)!r}: {rule}"
            for name, (good, rule) in rules.items()
            if not good
        ]
        if wrong:
            raise DmlError("These settings do not work.", "; ".join(wrong) + ".", "Change them.")


@dataclass(frozen=True)
class Evaluation:
    """The result and, per distance, what every query contributed to it."""

    problem: Problem
    result: Result
    ranks: dict[str, np.ndarray]  # distance -> (Q,), 0: no positive
    per_query: dict[str, dict[str, np.ndarray]] = field(repr=False)  # distance -> metric -> (Q,)


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
    if isinstance(data, str | Path):
        data = load(
            data, labels=_file(labels), gallery=_file(gallery), gallery_labels=_file(gallery_labels)
        )
        labels = gallery = gallery_labels = None
    if not isinstance(data, Embeddings):
        if labels is None:
            raise DmlError(
                "There are no labels.",
                "Without them nothing says which items are of the same class.",
                "Pass them after the vectors: evaluate(vectors, labels)",
            )
        arrays = (_array(given) for given in (labels, gallery, gallery_labels))
        problem = from_arrays(data, *arrays, drop_nonfinite=drop_nonfinite)
    elif any(given is not None for given in (labels, gallery, gallery_labels)):
        raise DmlError(
            "An `Embeddings` has its own labels and gallery.",
            "Others are given beside it.",
            "Pass arrays, or a file: evaluate(path, labels=other_path)",
        )
    else:
        problem = from_embeddings(data, drop_nonfinite=drop_nonfinite)
    return run(problem, Settings(**settings), progress).result


def _file(given: np.ndarray | str | Path | None) -> str | Path | None:
    """What is given beside a file, which is a file too."""
    if given is None or isinstance(given, str | Path):
        return given
    raise _mixed()


def _array(given: np.ndarray | str | Path | None) -> Any:
    """What is given beside an array, as it is: NumPy would merge 1 and "1", fill masked values."""
    if isinstance(given, str | Path):
        raise _mixed()
    return given


def _mixed() -> DmlError:
    return DmlError(
        "Arrays and files are given together.",
        "Vectors, labels and gallery are all arrays, or all files.",
        "Read the file first: load(path).splits",
    )


def run(problem: Problem, settings: Settings, progress: StageProgress | None = None) -> Evaluation:
    """Evaluates the problem; `progress(stage, done, total)` hears of everything long."""
    found = score(problem, settings, progress)
    why = nmi_left_out(problem, settings)
    if why is None:
        return add_nmi(found, problem, settings, progress)
    return noted(found, why) if why else found


def score(
    problem: Problem, settings: Settings, progress: StageProgress | None = None
) -> Evaluation:
    """All scores but NMI and AMI, which k-means may take long for: `add_nmi`."""
    if settings.nmi:
        clustering.load_faiss()  # where it is missing, that is said at once
    require_common_label(problem)
    full = problem
    if settings.queries is not None:
        problem = sample(problem, settings.queries, settings.seed)
    found = checks.data_checks(full)
    ranked = count_ranks(
        problem,
        distances=settings.distances,
        positions=settings.map_at_r,
        memory=settings.memory,
        threads=settings.threads and allowed(settings.threads),
        progress=stage(progress, "ranks"),
    )
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
        "notes": _beyond(problem, settings),
        "settings": _recorded(settings, False, len(problem.names)),
    }
    return Evaluation(problem, result, ranks, per_query)


def add_nmi(
    found: Evaluation,
    problem: Problem,
    settings: Settings,
    progress: StageProgress | None = None,
) -> Evaluation:
    """The evaluation with NMI and AMI of the same problem, all its queries among the points."""
    if settings.threads:
        clustering.load_faiss().omp_set_num_threads(allowed(settings.threads))
    scores = {
        d: values | _clusters(problem, settings, d, progress)
        for d, values in found.result["distances"].items()
    }
    recorded = _recorded(settings, True, len(problem.names))
    return replace(found, result=found.result | {"distances": scores, "settings": recorded})


def noted(found: Evaluation, note: str) -> Evaluation:
    """The evaluation with one more note for people."""
    return replace(found, result=found.result | {"notes": [*found.result["notes"], note]})


def nmi_left_out(problem: Problem, settings: Settings) -> str | None:
    """Why NMI is not computed; None: it is; empty: it was not wanted."""
    if settings.nmi is not None:
        return None if settings.nmi else ""
    if find_spec("faiss") is None:
        return f"NMI was left out: k-means needs FAISS. {install('cpu')}"
    seconds = nmi_seconds(problem, settings)
    if seconds <= clustering.LONG:
        return None
    return (
        f"NMI was left out: k-means with {len(problem.names):,} clusters would take about "
        f"{duration(seconds)} on two cores; --nmi computes it"
    )


def nmi_seconds(problem: Problem, settings: Settings) -> float:
    """How long k-means takes, estimated."""
    N = len(problem.gallery)
    N += len(problem.query_codes) if problem.protocol == QUERY_GALLERY else 0
    runs = len(settings.distances) * settings.seeds * settings.kmeans_restarts
    return clustering.estimated_seconds(
        N, problem.gallery.shape[1], len(problem.names), runs * settings.kmeans_iterations
    )


def _beyond(problem: Problem, settings: Settings) -> list[str]:
    """A note if some K reach to the last candidate: there Recall@K says nothing."""
    candidates = len(problem.gallery) - (problem.protocol == LEAVE_ONE_OUT)
    names = ", ".join(f"Recall@{k}" for k in settings.recall_at if k >= candidates)
    if not names:
        return []
    return [
        f"{names}: a query has only {candidates:,} candidates, so every one with a positive "
        "finds it"
    ]


def _summary(scores: dict[str, np.ndarray], codes: np.ndarray, settings: Settings) -> Scores:
    """Means over queries with class-bootstrap intervals, in the shape of the JSON."""
    table = np.stack([np.asarray(column, np.float64) for column in scores.values()], axis=1)
    low, high = bootstrap.interval(table, codes, settings.resamples, settings.level, settings.seed)
    spans = {
        name: None if math.isnan(a) else [float(a), float(b)]
        for name, a, b in zip(scores, low, high, strict=True)
    }
    means = {name: float(column.mean()) for name, column in scores.items()}
    out: Scores = {}
    for metric in metrics.query_metrics():
        for name, values in ((metric.name, means), (f"{metric.name}_ci", spans)):
            if metric.at_k:
                out[name] = {str(k): values[f"{metric.name}@{k}"] for k in settings.recall_at}
            else:
                out[name] = values.get(metric.name)
    return out


def _clusters(
    problem: Problem, settings: Settings, d: str, progress: StageProgress | None
) -> Scores:
    """NMI and AMI of k-means, k the number of classes, over all items of the test set."""
    vectors, codes = problem.gallery, problem.gallery_codes
    if problem.protocol == QUERY_GALLERY:
        vectors = np.concatenate([problem.query_vectors, vectors])
        codes = np.concatenate([problem.query_codes, codes])
    scores = clustering.cluster_scores(
        vectors,
        codes,
        d,
        list(range(settings.seeds)),
        iterations=settings.kmeans_iterations,
        restarts=settings.kmeans_restarts,
        progress=stage(progress, f"k-means ({d})"),
    )
    return {
        name: {
            "mean": float(np.mean(values)),
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "values": [float(v) for v in values],
        }
        for name, values in scores.items()
    }


def _recorded(settings: Settings, nmi: bool, classes: int) -> dict[str, Any]:
    """The settings as used; how many threads and how much memory changes no score."""
    used = asdict(settings) | {"nmi": nmi}
    for name in ("threads", "memory"):
        used.pop(name)
    used |= {"engine": "count"} | {name: version(name) for name in ("dmltool", "numpy", "numba")}
    if nmi:
        faiss = clustering.load_faiss().__version__
        used |= {"kmeans_k": classes, "nmi_average": "arithmetic", "faiss": faiss}
    return used | {"distances": list(settings.distances), "recall_at": list(settings.recall_at)}
