"""NMI and AMI of an evaluation: clusters that k-means finds, compared with the classes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from retrieval import clustering
from retrieval.number_format import duration
from retrieval.problem import QUERY_GALLERY, Problem
from retrieval.resources import Progress, StageProgress, allowed, stage
from retrieval.space import unit_length

if TYPE_CHECKING:
    from retrieval.evaluation import Evaluation, Settings
    from retrieval.results import Scores


def add_nmi(
    found: Evaluation,
    problem: Problem,
    settings: Settings,
    progress: StageProgress | None = None,
) -> Evaluation:
    """The evaluation with NMI and AMI of the same problem, all its queries among the points."""
    vectors, codes = problem.gallery, problem.gallery_codes
    if problem.protocol == QUERY_GALLERY:
        vectors = np.concatenate([problem.query_vectors, vectors])
        codes = np.concatenate([problem.query_codes, codes])
    if len(settings.distances) > 1 and _unit_length(problem):  # both have the same clusters
        shared = _clusters(vectors, codes, settings, "cos", stage(progress, "k-means"))
        clusters = dict.fromkeys(settings.distances, shared)
    else:
        clusters = {
            d: _clusters(vectors, codes, settings, d, stage(progress, f"k-means ({d})"))
            for d in settings.distances
        }
    scores = {d: values | clusters[d] for d, values in found.result["distances"].items()}
    used = found.result["settings"] | {
        "nmi": True,
        "kmeans_k": len(problem.names),
        "kmeans_restarts": kmeans_settings(settings).starts(len(problem.names)),
        "nmi_average": "arithmetic",
    }
    if faiss := clustering.faiss_with_gpu():
        used |= {"faiss": faiss.__version__}
    return replace(found, result=found.result | {"distances": scores, "settings": used})


def left_out(problem: Problem, settings: Settings) -> str:
    """Return a note why NMI is left out, because k-means would take long; empty if it is not."""
    seconds = 0.0 if settings.nmi else estimated_seconds(problem, settings)
    if seconds <= clustering.LONG:
        return ""
    return (
        f"NMI was left out: k-means with {len(problem.names):,} clusters would take about "
        f"{duration(seconds)} on two cores; --nmi computes it"
    )


def estimated_seconds(problem: Problem, settings: Settings) -> float:
    """How long k-means takes, estimated."""
    N = len(problem.gallery)
    N += len(problem.query_codes) if problem.protocol == QUERY_GALLERY else 0
    k = len(problem.names)
    distances = 1 if _unit_length(problem) else len(settings.distances)
    runs = distances * settings.seeds * kmeans_settings(settings).starts(k)
    return clustering.estimated_seconds(N, problem.gallery.shape[1], k, runs)


def _unit_length(problem: Problem) -> bool:
    """Whether all queries and gallery items have length 1, so that l2 and cos are alike."""
    return unit_length(problem.gallery) and unit_length(problem.query_vectors)


def _clusters(
    vectors: np.ndarray,
    codes: np.ndarray,
    settings: Settings,
    d: str,
    progress: Progress | None,
) -> Scores:
    """NMI and AMI of k-means, k the number of classes, over all items of the test set."""
    seeds = list(range(settings.seeds))
    scores, iterations = clustering.cluster_scores(
        vectors, codes, d, seeds, settings=kmeans_settings(settings), progress=progress
    )
    return {
        name: {
            "mean": float(np.mean(values)),
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
            "values": [float(v) for v in values],
        }
        for name, values in scores.items()
    } | {"kmeans_iterations": iterations}


def kmeans_settings(settings: Settings) -> clustering.KMeans:
    """How to cluster."""
    return clustering.KMeans(
        settings.kmeans_init,
        settings.kmeans_iterations,
        settings.kmeans_restarts,
        settings.threads and allowed(settings.threads),
    )
