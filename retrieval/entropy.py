"""Entropies of embeddings and labels: Boudiaf et al., ECCV 2020, eqs. 1 and 6.

Eq. 6 estimates the entropy of n embeddings of d dimensions, up to a constant, by
d / (n (n - 1)) * the sum of log D_ij^2 over all i != j, where D_ij is a Euclidean distance.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from retrieval.distances import squared_lengths, unit_rows
from retrieval.resources import Progress, processors, run_all, single_blas_thread, slices
from retrieval.rows.identical import row_groups

if TYPE_CHECKING:
    from retrieval.results import Entropies

TILE = 1024  # rows of a block of pairs: 8 MB a matrix, of which each thread holds a few
DOUBTFUL = 1e-6
"""Below this part of the longest squared norms, squared distances come from differences."""
SAME_DIRECTION = (32 * np.finfo(np.float64).eps) ** 2
"""Squared distance of unit vectors that float64 cannot tell apart."""


class LogSquares(NamedTuple):
    """The sum of log D^2 over pairs i < j of different vectors, and how many pairs there are."""

    total: float
    pairs: int
    identical: int  # pairs left out, since log 0 is infinite


def label_entropy(labels: np.ndarray) -> float:
    """H(Y) in nats, from the frequencies of the labels."""
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    return abs(float((shares * np.log(shares)).sum()))  # a sum of numbers <= 0; never -0.0


def embedding_entropies(
    vectors: np.ndarray,
    labels: np.ndarray | None,
    distance: str = "l2",
    progress: Progress | None = None,
    groups: np.ndarray | None = None,
) -> Entropies:
    """H(Z) by eq. 6, H(Z|Y) by eq. 6 within classes, and their difference, in nats.

    H(Z|Y) is the mean over classes, weighted by their images; classes without two different
    vectors are left out. `cos` scales the vectors to length 1 first. None: not enough vectors.

    groups: (N,) equal for identical rows, from `row_groups`, where they are known.
    """
    D = vectors.shape[1]
    for part in slices(len(vectors), TILE):
        squared_lengths(vectors[part].astype(np.float64))  # raises for numbers too large or small
    if groups is None:
        groups = row_groups(vectors)
    whole = log_squares(vectors, groups, distance, progress)
    found: Entropies = {
        "embeddings": _mean(whole, D),
        "given_labels": None,
        "difference": None,
        "identical_pairs": whole.identical,
    }
    if labels is None or whole.pairs == 0:
        return found
    codes = np.unique(labels, return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    weighted, images = 0.0, 0
    for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        value = _mean(log_squares(vectors[rows], groups[rows], distance), D)
        if value is not None:
            weighted += len(rows) * value
            images += len(rows)
    if images:
        found["given_labels"] = weighted / images
        found["difference"] = D * whole.total / whole.pairs - weighted / images
    return found


def _mean(sums: LogSquares, dim: int) -> float | None:
    return dim * sums.total / sums.pairs if sums.pairs else None


def log_squares(
    vectors: np.ndarray,
    groups: np.ndarray,
    distance: str = "l2",
    progress: Progress | None = None,
    tile: int = TILE,
) -> LogSquares:
    """Sum log D^2 over all pairs of different rows, in float64, a tile of pairs at a time.

    groups: (N,) equal for identical rows, from `row_groups`.
    """
    n = len(vectors)
    if n < 2:
        return LogSquares(0.0, 0, 0)
    centre, least = np.zeros(vectors.shape[1]), float(SAME_DIRECTION)
    if distance == "l2":  # distances do not change, and products lose fewer digits
        centre = sum(vectors[part].sum(0, np.float64) for part in slices(n, tile)) / n
        least = 0.0
    totals: list[float] = []
    counts: list[int] = []

    def rows(part: slice) -> np.ndarray:
        block = vectors[part].astype(np.float64)
        return block - centre if distance == "l2" else unit_rows(block)

    def add(tile: tuple[slice, slice]) -> None:
        a, b = tile
        left_out = groups[a][:, None] == groups[b]
        if a == b:  # every pair once
            left_out |= np.tri(len(left_out), dtype=bool)
        logs = _log_squares(rows(a), rows(b), left_out, least)
        totals.append(float(logs.sum()))
        counts.append(int(np.count_nonzero(~left_out)))

    parts = list(slices(n, tile))
    pairs = [(a, b) for i, a in enumerate(parts) for b in parts[i:]]
    if len(pairs) == 1:
        add(pairs[0])
    else:
        with single_blas_thread():
            run_all(add, pairs, processors(), progress)
    total = math.fsum(totals)  # exact, so the order does not matter
    return LogSquares(total, sum(counts), n * (n - 1) // 2 - sum(counts))


def _log_squares(a: np.ndarray, b: np.ndarray, left_out: np.ndarray, least: float) -> np.ndarray:
    """log D^2 (A, B) of two blocks of rows, 0 for the pairs that are left out.

    Pairs at squared distances up to `least` are left out as well; `left_out` (A, B) is changed.
    """
    norms_a, norms_b = (a * a).sum(1), (b * b).sum(1)
    squares = norms_a[:, None] - 2 * (a @ b.T) + norms_b
    doubtful = (squares <= DOUBTFUL * (norms_a.max() + norms_b.max())) & ~left_out
    i, j = np.nonzero(doubtful)
    for part in slices(len(i), max(1, (1 << 20) // a.shape[1])):  # their differences take 8 MB
        squares[i[part], j[part]] = ((a[i[part]] - b[j[part]]) ** 2).sum(1)
    left_out |= doubtful & (squares <= least)
    squares[left_out] = 1.0
    return np.log(squares, out=squares)
