"""Measure classes for a report: spread, distance, and which are confused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from retrieval.distances import row_scores, unit_rows
from retrieval.metrics import per_class_recall
from retrieval.neighbours import Best, nearest_quickly, pair_scores
from retrieval.problem import Problem, from_arrays
from retrieval.reporting.view import ClassColumns
from retrieval.resources import blocks
from retrieval.results import LEAVE_ONE_OUT, QUERY_GALLERY

CONFUSED, EXAMPLES, DUPLICATES = 60, 3, 60


def columns(problem: Problem, ranks: np.ndarray, distance: str, names: list[str]) -> ClassColumns:
    """Items, recall, spread, nearest and gap of every class, in the order of problem.names."""
    C = len(problem.names)
    codes = np.concatenate([codes for _, codes in _sides(problem)])
    items = np.bincount(codes, minlength=C)
    means = _means(problem, items, distance)
    known, recall, _ = per_class_recall(ranks, problem.query_codes)
    recalls: list[float | None] = [None] * C
    for code, value in zip(known.tolist(), recall.tolist(), strict=True):
        recalls[code] = round(value, 5)
    nearest = nearest_quickly(from_arrays(means, np.arange(C)), distance).negative
    gaps = _distances(means, means[np.maximum(nearest, 0)], distance)
    return {
        "name": names,
        "items": items.tolist(),
        "recall": recalls,
        "spread": [_short(x) for x in _spread(problem, means, items, distance)],
        "nearest": nearest.tolist(),
        "gap": [_short(x) if n >= 0 else None for x, n in zip(gaps, nearest, strict=True)],
    }


def confused(
    problem: Problem, ranks: np.ndarray, best: Best
) -> Iterator[tuple[int, int, int, float, np.ndarray]]:
    """The most confused pairs of classes, with number, share and examples of the queries.

    Only queries that have a positive count; the share is of all queries of their class.
    """
    failed = np.flatnonzero((ranks > 1) & (best.negative >= 0))
    own, found = problem.query_codes[failed], problem.gallery_codes[best.negative[failed]]
    pairs, member, counts = np.unique(
        np.stack([own, found]), axis=1, return_inverse=True, return_counts=True
    )
    queries = np.bincount(problem.query_codes, minlength=len(problem.names))
    share = counts / queries[pairs[0]] if len(counts) else counts
    order = np.lexsort((best.margin[failed], member.ravel()))  # the clearest mistakes first
    starts = np.cumsum(counts) - counts
    for pair in np.lexsort((*pairs[::-1], -share, -counts))[:CONFUSED]:
        some = failed[order[starts[pair] :][: min(EXAMPLES, counts[pair])]]
        yield int(pairs[0, pair]), int(pairs[1, pair]), int(counts[pair]), float(share[pair]), some


def closest_negatives(problem: Problem, best: Best, distance: str) -> np.ndarray:
    """(n,) queries with the closest negatives, closest first; each pair of items once."""
    queries = np.flatnonzero(best.negative >= 0)
    scores = pair_scores(problem, queries, best.negative[queries], distance)
    queries = queries[np.argsort(-scores if distance == "cos" else scores, kind="stable")]
    if problem.protocol == LEAVE_ONE_OUT:
        pairs = np.sort(np.stack([queries, best.negative[queries]]), axis=0)
        queries = queries[np.sort(np.unique(pairs, axis=1, return_index=True)[1])]
    return queries[:DUPLICATES]


def _sides(problem: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    sides = [(problem.gallery, problem.gallery_codes)]
    if problem.protocol == QUERY_GALLERY:
        sides.append((problem.query_vectors, problem.query_codes))
    return sides


def _rows(problem: Problem, distance: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of rows (n, D), of length 1 for cos, and their classes (n,), side by side."""
    for vectors, codes in _sides(problem):
        order = np.argsort(codes, kind="stable")
        for part in blocks(vectors):
            rows = vectors[order[part]].astype(np.float64)
            yield unit_rows(rows) if distance == "cos" else rows, codes[order[part]]


def _means(problem: Problem, items: np.ndarray, distance: str) -> np.ndarray:
    """(C, D) float64."""
    total = np.zeros((len(items), problem.gallery.shape[1]))
    for rows, codes in _rows(problem, distance):
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
        total[codes[starts]] += np.add.reduceat(rows, starts, axis=0)
    return total / np.maximum(items, 1)[:, None]


def _spread(problem: Problem, means: np.ndarray, items: np.ndarray, distance: str) -> np.ndarray:
    """(C,) mean distance of items to the mean of their class."""
    total = np.zeros(len(items))
    for rows, codes in _rows(problem, distance):
        total += np.bincount(codes, _distances(rows, means[codes], distance), len(items))
    return total / np.maximum(items, 1)


def _distances(a: np.ndarray, b: np.ndarray, distance: str) -> np.ndarray:
    """(n,) Euclidean, or 1 - cosine, row by row."""
    scores = row_scores(a, b, distance)
    return 1 - scores if distance == "cos" else scores


def _short(value: float) -> float:
    return float(f"{max(0.0, value):.4g}")
