"""Retrieval and clustering scores: pure functions that return unrounded floats.

Rank of a query: 1 + the number of wrong items at least as near as its nearest right item; 0 when
it has no right item at all. Such a lone query counts as a miss and stays in the denominator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

DISTANCES = ("l2", "cos")  # in the order in which they are shown everywhere


class PositivePositions(NamedTuple):
    """Where the right items of each query stand, as far as R-precision and MAP@R look.

    The m-th nearest right item stands at m + the number of wrong items at least as near. Query i
    owns positions[offsets[i]:offsets[i + 1]], ascending from m = 1, none beyond what was asked for
    (for R-precision and MAP@R: its counts[i]).
    """

    counts: np.ndarray  # (Q,) int64, right items in the gallery
    offsets: np.ndarray  # (Q + 1,) int64
    positions: np.ndarray  # (P,) int64, 1 is the nearest


def recall_at(ranks: np.ndarray, ks: Iterable[int]) -> dict[int, float]:
    """Share of queries with a right item among the K nearest, for every K."""
    ranks = np.asarray(ranks)
    return {int(k): _mean((ranks > 0) & (ranks <= k)) for k in ks}


def mean_reciprocal_rank(ranks: np.ndarray) -> float:
    """Mean of 1 / rank; a lone query adds 0."""
    return _mean(reciprocal_ranks(ranks))


def reciprocal_ranks(ranks: np.ndarray) -> np.ndarray:
    """1 / rank per query (Q,), 0 for a lone one."""
    ranks = np.asarray(ranks)
    return np.divide(1.0, ranks, out=np.zeros(len(ranks)), where=ranks > 0)


def per_class_recall(
    ranks: np.ndarray, labels: np.ndarray, k: int = 1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes (C,) in ascending order, Recall@k of each (C,), queries of each (C,)."""
    ranks = np.asarray(ranks)
    classes, member, counts = np.unique(labels, return_inverse=True, return_counts=True)
    hits = np.bincount(member[(ranks > 0) & (ranks <= k)], minlength=len(classes))
    return classes, hits / counts, counts


def r_precision(right: PositivePositions) -> tuple[float, np.ndarray]:
    """Mean over queries, and (Q,): the share of right items among the R nearest."""
    owner, _, _ = _within_r(right)
    hits = np.bincount(owner, minlength=len(right.counts))
    return _per_right(hits, right.counts)


def map_at_r(right: PositivePositions) -> tuple[float, np.ndarray]:
    """Mean over queries, and (Q,): 1/R * the sum of m / pos_m over right items with pos_m <= R."""
    owner, position, order = _within_r(right)
    gains = np.bincount(owner, weights=order / position, minlength=len(right.counts))
    return _per_right(gains, right.counts)


def nmi(labels: np.ndarray, assignment: np.ndarray) -> float:
    """Normalised mutual information, arithmetic averaging."""
    # scikit-learn takes about a second to import; recall alone must not pay for it.
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(labels, assignment, average_method="arithmetic"))


def ami(labels: np.ndarray, assignment: np.ndarray) -> float:
    """Adjusted mutual information, arithmetic averaging: 0 for a random assignment."""
    from sklearn.metrics import adjusted_mutual_info_score

    return float(adjusted_mutual_info_score(labels, assignment, average_method="arithmetic"))


def _within_r(right: PositivePositions) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Owner, position and m of every right item that stands within the first R of its query."""
    lengths = np.diff(right.offsets)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    order = np.arange(1, len(owner) + 1) - right.offsets[owner]
    near = right.positions <= right.counts[owner]
    return owner[near], right.positions[near], order[near]


def _per_right(sums: np.ndarray, counts: np.ndarray) -> tuple[float, np.ndarray]:
    values = np.divide(sums, counts, out=np.zeros(len(counts)), where=counts > 0)
    return _mean(values), values


def _mean(values: np.ndarray) -> float:
    """The mean, nan of nothing (NumPy would warn as well)."""
    return float(values.mean()) if len(values) else float("nan")
