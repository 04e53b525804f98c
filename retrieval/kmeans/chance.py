"""The mutual information that clusters and classes have by chance, for AMI."""

from __future__ import annotations

import math

import numpy as np

from retrieval.resources import compiled


def information_by_chance(classes: np.ndarray, clusters: np.ndarray) -> float:
    """The mean mutual information of all ways to form groups of these sizes.

    A class and a cluster add a number that depends on their sizes only. It is computed once for
    each pair of sizes, which are few even among thousands of clusters.
    """
    from scipy.special import gammaln

    log_factorials = gammaln(np.arange(1.0, classes.sum() + 2))
    sizes = (np.unique(groups, return_counts=True) for groups in (classes, clusters))
    return _sum_over_sizes(*next(sizes), *next(sizes), log_factorials)


@compiled(fastmath=False)  # sums in one order: the same on every processor
def _sum_over_sizes(
    A: np.ndarray,
    repeats_A: np.ndarray,
    B: np.ndarray,
    repeats_B: np.ndarray,
    log_factorials: np.ndarray,
) -> float:
    N = len(log_factorials) - 1
    total = 0.0
    for i, a in enumerate(A):
        for j, b in enumerate(B):
            ways = log_factorials[a] + log_factorials[N - a] - log_factorials[N]
            ways += log_factorials[b] + log_factorials[N - b]
            for both in range(max(1, a + b - N), min(a, b) + 1):  # items that the two share
                apart = log_factorials[a - both] + log_factorials[b - both]
                apart += log_factorials[both] + log_factorials[N - a - b + both]
                information = both / N * math.log(N * (both / (a * b)))
                total += repeats_A[i] * repeats_B[j] * information * math.exp(ways - apart)
    return total
