"""What may be wrong with the data, counted. A count above zero becomes a warning."""

from __future__ import annotations

import numpy as np

from retrieval.duplicates import row_groups, row_hashes
from retrieval.problem import QUERY_GALLERY, Problem
from retrieval.slices import blocks

# Each check: what its count means, said to the person who reads the table.
MESSAGES = {
    "nonfinite_rows": "{n} rows with NaN or Inf were left out",
    "zero_norm_rows": "{n} rows are all zero: they have no direction, their cosine is taken as 0",
    "conflicting_duplicates": "{n} rows are identical to a row with another label",
    "tied_queries": "{n} queries have a wrong item exactly as near as the nearest right one "
    "(counted against them)",
    "lone_queries": "{n} of {queries} queries have no right item to find (scored as misses)",
    "single_item_classes": "{n} of {classes} classes have a single item",
    "queries_in_gallery": "{n} queries are also in the gallery, identical in every number: "
    "they find themselves",
}


def data_checks(problem: Problem) -> dict[str, int]:
    """The checks that need no ranks."""
    both = problem.protocol == QUERY_GALLERY
    codes = problem.gallery_codes
    sizes = np.bincount(codes, minlength=len(problem.names))
    if both:
        sizes = sizes + np.bincount(problem.query_codes, minlength=len(problem.names))
    checks = {
        "nonfinite_rows": problem.dropped,
        "zero_norm_rows": zero_rows(problem.gallery) + (zero_rows(problem.asking) if both else 0),
        "conflicting_duplicates": conflicting_rows(problem.gallery, codes),
        "single_item_classes": int(np.count_nonzero(sizes == 1)),
    }
    if both:
        hashes = row_hashes(problem.gallery)
        inside = np.isin(row_hashes(problem.asking), hashes)
        checks["queries_in_gallery"] = int(np.count_nonzero(inside))
    return checks


def warnings(checks: dict[str, int], queries: int, classes: int) -> list[str]:
    """One sentence for every check that found something."""
    return [
        MESSAGES[name].format(n=n, queries=queries, classes=classes)
        for name, n in checks.items()
        if n
    ]


def zero_rows(vectors: np.ndarray) -> int:
    return sum(int(np.count_nonzero(~vectors[part].any(axis=1))) for part in blocks(vectors))


def conflicting_rows(vectors: np.ndarray, codes: np.ndarray) -> int:
    """Rows that share every number, but not the label, with another row."""
    group = row_groups(vectors)
    repeated = np.flatnonzero(np.bincount(group, minlength=len(group))[group] > 1)
    pairs = np.unique(np.stack([group[repeated], codes[repeated]]), axis=1)
    labels_of = np.bincount(pairs[0], minlength=len(group)) if len(repeated) else np.zeros(1)
    return int(np.count_nonzero(labels_of[group[repeated]] > 1)) if len(repeated) else 0
