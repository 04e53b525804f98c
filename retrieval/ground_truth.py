"""Compare the neighbours that a file lists for its queries with those of exact search.

ann-benchmarks files have no labels: `neighbors` names, for each query of `test`, the nearest rows
of `train`. Recall@K is here what it is there: of the K neighbours listed first, the share that is
among the K nearest; one as near as the K-th counts as well.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np

from retrieval.embeddings import Embeddings
from retrieval.errors import DmlError
from retrieval.evaluation import Settings
from retrieval.metrics import title_of
from retrieval.number_format import percent
from retrieval.problem import Problem, from_arrays
from retrieval.resources import StageProgress, slices, stage
from retrieval.results import Agreement

VERSION = 1
EQUAL = 1e-6  # relative; the lists were made in float32
OWN = {"angular": "cos", "euclidean": "l2", "hamming": "l2"}  # how ann-benchmarks calls distances


def agreement(
    data: Embeddings, settings: Settings, progress: StageProgress | None = None
) -> Agreement:
    """Recall@K of the listed neighbours, by each distance, as a JSON-able dict (docs/json.md)."""
    from retrieval.neighbours import POSITIVE, nearest  # compiled, and needed here alone

    queries, gallery = (data.splits[name].vectors for name in ("query", "gallery"))
    assert data.neighbours is not None
    settings = settings.of(data)
    listed, most = data.neighbours, max(settings.recall_at)
    if most > listed.shape[1]:
        raise DmlError(
            f"{data.source} lists {listed.shape[1]} neighbours of each query.",
            f"{title_of(f'recall@{most}')} needs {most} of them.",
            f"Use smaller K: --recall-at 1,{min(10, listed.shape[1])},{listed.shape[1]}",
        )
    rows = np.arange(len(queries))
    if settings.queries is not None and settings.queries < len(rows):
        rng = np.random.default_rng(settings.seed)
        rows = np.sort(rng.choice(len(rows), settings.queries, False))
    drawn, listed = queries[rows], listed[rows, :most]
    # Without labels, every item is a positive of every query.
    one, other = np.zeros(len(drawn), np.int64), np.zeros(len(gallery), np.int64)
    problem = from_arrays(drawn, one, gallery, other)
    distances = {}
    for d in settings.distances:
        report = stage(progress, f"neighbours ({d})")
        found = nearest(problem, min(most, len(gallery)), d, report).ids[:, POSITIVE]
        hits = _hits(problem, listed, found, settings.recall_at, d)
        distances[d] = {"recall": {str(n): float(share.mean()) for n, share in hits.items()}}
    return {
        "version": VERSION,
        "protocol": "listed-neighbours",
        "queries": len(rows),
        "gallery": len(gallery),
        "dim": int(gallery.shape[1]),
        "listed": int(data.neighbours.shape[1]),
        "distance": OWN.get(str(data.attrs.get("distance"))),
        "distances": distances,
        "settings": {
            "distances": list(settings.distances),
            "recall_at": list(settings.recall_at),
            "queries": settings.queries,
            "seed": settings.seed,
            "dmltool": version("dmltool"),
        },
    }


def _hits(
    problem: Problem,
    listed: np.ndarray,
    found: np.ndarray,
    recall_at: tuple[int, ...],
    distance: str,
) -> dict[int, np.ndarray]:
    """K -> (Q,) share of the first K listed that are no further than the K-th nearest."""
    queries, gallery = problem.query_vectors, problem.gallery
    out = {k: np.empty(len(queries)) for k in recall_at}
    width = gallery.shape[1] * (listed.shape[1] + found.shape[1])
    for part in slices(len(queries), max(1, (1 << 23) // width)):
        theirs = _distances(queries[part], gallery[listed[part]], distance)
        ours = np.sort(_distances(queries[part], gallery[found[part]], distance), axis=1)
        theirs[_repeated(listed[part])] = np.inf
        for k in recall_at:
            limit = ours[:, min(k, ours.shape[1]) - 1, None]
            near = theirs[:, :k] <= limit * (1 + EQUAL) + np.finfo(np.float32).tiny
            out[k][part] = near.sum(axis=1) / k
    return out


def _repeated(listed: np.ndarray) -> np.ndarray:
    """(n, K) bool: rows that a list has named before."""
    order = np.argsort(listed, axis=1, kind="stable")
    ordered = np.take_along_axis(listed, order, axis=1)
    again = np.zeros(listed.shape, bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return again


def _distances(queries: np.ndarray, items: np.ndarray, distance: str) -> np.ndarray:
    """(n, K) squared distances of queries (n, D) and their items (n, K, D), in float64."""
    a, b = queries[:, None].astype(np.float64), items.astype(np.float64)
    if distance == "cos":
        a, b = (x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-300) for x in (a, b))
    return np.square(a - b).sum(axis=-1)


def warnings(result: Agreement) -> list[str]:
    """Warn if the lists differ from exact search by the distance that the file names."""
    own = result["distance"]
    if own not in result["distances"]:
        return []
    recall = result["distances"][own]["recall"]
    k, worst = min(recall.items(), key=lambda pair: pair[1])
    if worst > 1 - 1e-4:
        return []
    return [
        f"the listed neighbours are not those of exact search by {own}, the file's own distance: "
        f"{title_of(f'recall@{k}')} {percent(worst)} %"
    ]
