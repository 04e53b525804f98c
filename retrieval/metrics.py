"""The scores, and METRICS: the table that evaluation, tables, reports and docs read.

The rank of a query is 1 + the number of negatives at least as near as its nearest positive, or 0
if it has no positive. Such a query counts as a miss and stays in the denominator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from retrieval.distances import DISTANCES
from retrieval.number_format import interval, percent


class PositivePositions(NamedTuple):
    """Positions of the positives of each query in its ranking, as far as MAP@R needs them.

    The m-th nearest positive is at position m + the number of negatives at least as near. Query i
    has positions[offsets[i]:offsets[i + 1]], ascending from m = 1, none beyond its counts[i].
    """

    counts: np.ndarray  # (Q,) int64, positives in the gallery
    offsets: np.ndarray  # (Q + 1,) int64
    positions: np.ndarray  # (P,) int64, 1 is the nearest


def hits(ranks: np.ndarray, k: int) -> np.ndarray:
    """(Q,) bool: whether a positive is among the K nearest."""
    ranks = np.asarray(ranks)
    return (ranks > 0) & (ranks <= k)


RECALL_AT = (1, 2, 4, 8)
"""The usual values of K where nothing is known of the data set."""
BEFORE_RECORDED = {
    "cub": (1, 2, 4, 8, 16, 32),
    "cars": (1, 2, 4, 8, 16, 32),
    "sop": (1, 10, 100, 1000),
    "inshop": (1, 10, 20, 30, 40, 50),
}
"""The usual values of K for embedding files that name their data set, but do not record them."""
MOST_RECORDED = 100  # values of K; a file may be damaged or hostile


def usual_recall_at(attrs: Mapping[str, object]) -> tuple[int, ...]:
    """The values of K that papers give for a data set, from the metadata of its embeddings."""
    with suppress(ValueError, RecursionError):
        found = json.loads(str(attrs.get("recall_at", "")))
        listed = isinstance(found, list) and 0 < len(found) <= MOST_RECORDED
        if listed and all(type(k) is int and 1 <= k <= 10**9 for k in found):
            return tuple(dict.fromkeys(found))
    return BEFORE_RECORDED.get(str(attrs.get("dataset")), RECALL_AT)


def recall_at(ranks: np.ndarray, ks: Iterable[int]) -> dict[int, float]:
    """Share of queries with a positive among the K nearest, for every K; nan without queries."""
    return {int(k): float(hits(ranks, k).mean()) if len(ranks) else float("nan") for k in ks}


def mean(values: np.ndarray) -> float:
    """The mean of values (Q,), rounded once, so that their order changes no digit; nan of none."""
    return math.fsum(values.tolist()) / len(values) if len(values) else math.nan


def reciprocal_ranks(ranks: np.ndarray) -> np.ndarray:
    """(Q,) 1 / rank, 0 for a query without positives."""
    ranks = np.asarray(ranks)
    return np.divide(1.0, ranks, out=np.zeros(len(ranks)), where=ranks > 0)


def per_class_recall(
    ranks: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes (C,) in ascending order, Recall@1 of each (C,), queries of each (C,)."""
    classes, member, counts = np.unique(labels, return_inverse=True, return_counts=True)
    found = np.bincount(member[hits(ranks, 1)], minlength=len(classes))
    return classes, found / counts, counts


def r_precision(found: PositivePositions) -> np.ndarray:
    """(Q,) share of positives among the R nearest."""
    owner, _, _ = _within_r(found)
    return _per_positive(np.bincount(owner, minlength=len(found.counts)), found.counts)


def map_at_r(found: PositivePositions) -> np.ndarray:
    """(Q,) 1/R * the sum of m / pos_m over positives with pos_m <= R."""
    owner, position, order = _within_r(found)
    gains = np.bincount(owner, weights=order / position, minlength=len(found.counts))
    return _per_positive(gains, found.counts)


def nmi(labels: np.ndarray, assignment: np.ndarray) -> float:
    """Normalised mutual information, arithmetic averaging."""
    # scikit-learn takes about a second to import; recall alone must not pay for it.
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(labels, assignment, average_method="arithmetic"))


def ami(labels: np.ndarray, assignment: np.ndarray) -> float:
    """Adjusted mutual information, arithmetic averaging: 0 for a random assignment."""
    from scipy.special import gammaln
    from sklearn.metrics import mutual_info_score

    from retrieval.kmeans.kernels import information_by_chance

    classes, clusters = (np.unique(each, return_counts=True)[1] for each in (labels, assignment))
    groups = (len(classes), len(clusters))
    if min(groups) in (1, len(labels)):  # one group, or each item in its own: chance decides all
        return float(groups[0] == groups[1])
    sizes = [np.unique(counts, return_counts=True) for counts in (classes, clusters)]
    log_factorials = gammaln(np.arange(1.0, len(labels) + 2))
    by_chance = information_by_chance(*sizes[0], *sizes[1], log_factorials)
    shares = (classes / len(labels), clusters / len(labels))
    most = -np.mean([np.dot(share, np.log(share)) for share in shares])
    found = (mutual_info_score(labels, assignment) - by_chance) / (most - by_chance)
    return min(1.0, float(found))  # rounding may exceed it


def _within_r(found: PositivePositions) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query, position and m of every positive among the R nearest of its query."""
    lengths = np.diff(found.offsets)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    order = np.arange(1, len(owner) + 1) - found.offsets[owner]
    near = found.positions <= found.counts[owner]
    return owner[near], found.positions[near], order[near]


def _per_positive(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.divide(sums, counts, out=np.zeros(len(counts)), where=counts > 0)


@dataclass(frozen=True)
class Metric:
    """A score: what it is called, and the function that computes it.

    The function depends on what the metric reads:
    "ranks": ranks (Q,) -> (Q,) values, whose mean is the score; with `at_k` also K
    "positions": `PositivePositions` -> (Q,) values
    "clusters": labels (N,), k-means assignment (N,) -> the score
    """

    name: str  # key in the JSON
    title: str  # in tables and reports; {k} stands for K
    help: str
    function: Callable[..., Any]
    reads: Literal["ranks", "positions", "clusters"]
    at_k: bool = False  # one score for every K of `recall_at`


METRICS: tuple[Metric, ...] = (
    Metric(
        "recall",
        "Recall@{k}",
        "Fraction of queries with a positive among the K nearest; ties count against the query.",
        hits,
        "ranks",
        at_k=True,
    ),
    Metric(
        "mrr",
        "MRR",
        "Mean of 1 / rank of the nearest positive.",
        reciprocal_ranks,
        "ranks",
    ),
    Metric(
        "r_precision",
        "R-precision",
        "Fraction of positives among the R nearest, where R is the number of positives.",
        r_precision,
        "positions",
    ),
    Metric(
        "map_at_r",
        "MAP@R",
        "Mean average precision over the R nearest; unlike R-precision, it depends on order.",
        map_at_r,
        "positions",
    ),
    Metric(
        "nmi",
        "NMI",
        "Normalised mutual information of k-means clusters and classes; ± is over seeds.",
        nmi,
        "clusters",
    ),
    Metric(
        "ami",
        "AMI",
        "Mutual information of clusters and classes, adjusted for chance: 0 for random clusters.",
        ami,
        "clusters",
    ),
)


def query_metrics() -> list[Metric]:
    """The metrics that have a value for each query."""
    return [metric for metric in METRICS if metric.reads != "clusters"]


def cluster_metrics() -> list[Metric]:
    return [metric for metric in METRICS if metric.reads == "clusters"]


def query_scores(
    ranks: np.ndarray, positions: PositivePositions | None, ks: Iterable[int]
) -> dict[str, np.ndarray]:
    """(Q,) values by key ("recall@1", "mrr", ...); without positions, what needs none."""
    found: dict[str, np.ndarray] = {}
    for metric in query_metrics():
        if metric.at_k:
            found |= {f"{metric.name}@{k}": metric.function(ranks, k) for k in ks}
        elif metric.reads == "ranks":
            found[metric.name] = metric.function(ranks)
        elif positions is not None:
            found[metric.name] = metric.function(positions)
    return found


def occurrences(labels: np.ndarray) -> np.ndarray:
    """(n,) how often the same label came before."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    out = np.empty(len(labels), np.int64)
    out[order] = np.arange(len(labels)) - np.searchsorted(ordered, ordered)
    return out


def title_of(key: str) -> str:
    """Return the title of a score: "recall@5" -> "Recall@5", "mrr" -> "MRR"."""
    name, _, k = key.partition("@")
    return next(metric.title.format(k=k) for metric in METRICS if metric.name == name)


class Score(NamedTuple):
    """A score of one distance as text; empty if it was not computed."""

    value: str
    span: str  # its interval, or its standard deviation over the seeds of k-means


def score_rows(
    distances: Mapping[str, Mapping[str, Any]], *reads: str
) -> Iterator[tuple[str, list[Score]]]:
    """Yield title and scores by distance, in the order of METRICS, of all that were computed.

    Parameters
    ----------
    distances : the scores of each distance, as in the JSON of `eval`
    reads : what the metrics read ("ranks", "positions", "clusters"); none: all of them
    """
    shown = [distances[d] for d in DISTANCES if d in distances]
    for metric in METRICS:
        if reads and metric.reads not in reads:
            continue
        for k in shown[0].get(metric.name, ()) if metric.at_k else ("",):
            row = [_score(scores, metric, k) for scores in shown]
            if any(score.value for score in row):
                yield metric.title.format(k=k), row


def _score(scores: Mapping[str, Any], metric: Metric, k: str) -> Score:
    value, span = scores.get(metric.name), scores.get(f"{metric.name}_ci")
    if value is None:
        return Score("", "")
    if metric.at_k:
        return Score(percent(value[k]), interval((span or {}).get(k)))
    if metric.reads != "clusters":
        return Score(percent(value), interval(span))
    seeds = f"± {percent(value['std'])} ({len(value['values'])} seeds)"
    return Score(percent(value["mean"]), "" if value["std"] is None else seeds)
