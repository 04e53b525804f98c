"""Find the retrieved items that a report shows for each query, in order of rank."""

from __future__ import annotations

import numpy as np

from retrieval.distances import largest_equal
from retrieval.neighbours import NEGATIVE, POSITIVE, nearest
from retrieval.problem import Problem
from retrieval.resources import Progress

Row = list[tuple[float, int]]  # squared distance and gallery index, nearest first


def rows_of(
    problem: Problem,
    queries: np.ndarray,
    ranks: np.ndarray,
    distance: str,
    k: int = 8,
    progress: Progress | None = None,
) -> list[tuple[list[int], list[float]]]:
    """For each of some queries (n,): its k nearest gallery items, nearest first, and scores.

    A score is the cosine, or the distance. ranks (n,) are the exact ones: they say where the
    nearest positive stands, so that a row never contradicts the scores, ties included.
    """
    found = nearest(problem.select(queries), k, distance, progress)
    out = []
    for ids, squared, rank in zip(found.ids, found.squared, ranks, strict=True):
        positives, negatives = (
            [
                (s, n)
                for s, n in zip(squared[side].tolist(), ids[side].tolist(), strict=True)
                if n >= 0
            ]
            for side in (POSITIVE, NEGATIVE)
        )
        row = _merged(positives, negatives, int(rank), k)
        scores = found.space.score(np.array([s for s, _ in row]))
        out.append(([item for _, item in row], scores.tolist()))
    return out


def _merged(positives: Row, negatives: Row, rank: int, k: int) -> Row:
    """rank - 1 negatives, the nearest positive, then the rest with negatives first among equals."""
    if rank == 0:
        return negatives[:k]
    rest = [(s, 0, s, n) for s, n in negatives[rank - 1 :]]
    rest += [(largest_equal(s), 1, s, n) for s, n in positives[1:]]
    return [*negatives[: rank - 1], *positives[:1], *((s, n) for _, _, s, n in sorted(rest))][:k]
