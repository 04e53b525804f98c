"""Count what may be wrong with the data; a count above zero becomes a warning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from retrieval.metrics import title_of
from retrieval.number_format import counted
from retrieval.problem import Problem
from retrieval.resources import blocks
from retrieval.results import QUERY_GALLERY
from retrieval.rows.identical import rows_among
from retrieval.rows.scan import Scan

if TYPE_CHECKING:
    from retrieval.results import Result

# A 95% interval over two classes holds the true score in half of all cases, over five in 85%, over
# thirty in 94%: docs/protocol.md.
FEW = 5

# Each check: what its count means, said to the person who reads the table.
MESSAGES = {
    "nonfinite_rows": "rows with NaN or Inf, left out: {n}",
    "zero_norm_rows": "rows of zeros, which have no direction (their cosine is taken as 0): {n}",
    "conflicting_duplicates": "rows identical to a row with another label: {n}",
    "tied_queries": "queries with a negative exactly as near as their nearest positive, "
    "counted against them: {n} of {queries}",
    "lone_queries": "queries without any positive to find, scored as misses: {n} of {queries}",
    "single_item_classes": "classes of a single item: {n} of {classes}",
    "queries_in_gallery": "queries that are also in the gallery, identical in every number: {n}",
}


def data_checks(problem: Problem) -> dict[str, int]:
    """The checks that need no ranks."""
    both = problem.protocol == QUERY_GALLERY
    codes, query_codes = problem.gallery_codes, problem.query_codes
    sizes = np.bincount(codes, minlength=len(problem.names))
    group = problem.gallery_groups
    checks = {
        "nonfinite_rows": problem.nonfinite,
        "zero_norm_rows": zero_rows(problem.gallery, problem.gallery_scan),
        "conflicting_duplicates": conflicting_rows(group, codes),
    }
    if both:
        sizes = sizes + np.bincount(query_codes, minlength=len(problem.names))
        scans = (problem.query_scan, problem.gallery_scan)
        same = rows_among(problem.query_vectors, problem.gallery, scans)  # (Q,) a row, or -1
        inside = same >= 0
        checks["zero_norm_rows"] += zero_rows(problem.query_vectors, problem.query_scan)
        checks["queries_in_gallery"] = int(np.count_nonzero(inside))
        # Of a query and the rows identical to it, some have another label.
        where = group[same[inside]]
        other = (_labels_of(group, codes)[where] > 1) | (codes[same[inside]] != query_codes[inside])
        checks["conflicting_duplicates"] += int(np.count_nonzero(other))
    checks["single_item_classes"] = int(np.count_nonzero(sizes == 1))
    return checks


def warnings(result: Result) -> list[str]:
    """Warnings about a result: a sentence for every check that found something, and the notes."""
    known = {"queries": result["queries"], "classes": result["classes"]}
    found = [MESSAGES[name].format(n=n, **known) for name, n in result["checks"].items() if n]
    return found + result["notes"]


def notes(problem: Problem, recall_at: Sequence[int]) -> list[str]:
    """One sentence for each reason why scores may mislead."""
    alone = problem.protocol != QUERY_GALLERY
    classes, candidates = len(problem.names), len(problem.gallery) - alone
    found = []
    if classes <= 1 <= candidates:
        found.append(
            "there is only one class: no query has a negative, so every score is trivially 100 %"
        )
    if alone and 1 < classes == len(problem.gallery):
        found.append(
            "no two items have the same label, so every retrieval score is 0: are the labels row "
            "numbers? Others are given by --labels FILE or FILE::vectors,labels"
        )
    number = np.count_nonzero(np.bincount(problem.query_codes))
    if 1 < number <= FEW:
        found.append(
            f"queries have only {number} classes, so intervals are too narrow and p values too "
            "small"
        )
    beyond = ", ".join(title_of(f"recall@{k}") for k in recall_at if k >= candidates)
    if beyond and candidates:
        some = counted(candidates, "candidate")
        found.append(f"{beyond}: a query has only {some}, so every one with a positive finds it")
    return found


def zero_rows(vectors: np.ndarray, scanned: Scan | None = None) -> int:
    if scanned is not None:
        return int(np.count_nonzero(scanned.square == 0))
    return sum(int(np.count_nonzero(~vectors[part].any(axis=1))) for part in blocks(vectors))


def conflicting_rows(group: np.ndarray, codes: np.ndarray) -> int:
    """Rows that share every number, but not the label, with another row of their group."""
    return int(np.count_nonzero(_labels_of(group, codes)[group] > 1))


def _labels_of(group: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """(N,) how many labels the rows of each group have; rows of their own have one."""
    sizes = np.bincount(group, minlength=len(group))
    rows = np.flatnonzero(sizes[group] > 1)  # usually few or none
    pairs = np.unique(np.stack([group[rows], codes[rows]]), axis=1)
    return np.maximum(np.bincount(pairs[0], minlength=len(group)), sizes > 0)
