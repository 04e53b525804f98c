"""Compare the neighbours that a file lists for its queries with those of exact search.

ann-benchmarks files have no labels: `neighbors` names, for each query of `test`, the nearest rows
of `train`. Recall@K is defined as in ann-benchmarks: the share of the first K listed neighbours
that are among the K nearest rows. A row as near as the K-th nearest counts as one of them.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np

from retrieval.checks import MESSAGES
from retrieval.distances import largest_equal
from retrieval.embeddings import Embeddings
from retrieval.errors import DmlError
from retrieval.evaluation import Settings
from retrieval.metrics import mean, title_of
from retrieval.neighbours import POSITIVE, Neighbours, nearest
from retrieval.number_format import percent
from retrieval.problem import Problem, from_arrays, sample
from retrieval.resources import StageProgress, slices, stage
from retrieval.results import Agreement

VERSION = 1
SINGLE = 1e-6  # relative to a squared distance that was computed in float32, as for the lists
OWN = {"angular": "cos", "euclidean": "l2", "hamming": "l2"}  # how ann-benchmarks calls distances


def agreement(
    data: Embeddings,
    settings: Settings,
    progress: StageProgress | None = None,
    *,
    drop_nonfinite: bool = False,
) -> Agreement:
    """Recall@K of the listed neighbours, by each distance, as a JSON-able dict (docs/json.md).

    With `drop_nonfinite`, rows with NaN or infinity are left out: as queries, and as neighbours,
    where a list that names them misses.
    """
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
    # Without labels, every item is a positive of every query.
    one, other = np.zeros(len(queries), np.int64), np.zeros(len(gallery), np.int64)
    problem = from_arrays(
        queries, one, gallery, other, drop_nonfinite=drop_nonfinite, source=str(data.source)
    )
    if settings.queries is not None:
        problem = sample(problem, settings.queries, settings.seed)
    kept = np.full(len(gallery), -1)
    kept[problem.gallery_rows] = np.arange(len(problem.gallery))
    listed = kept[listed[problem.query_rows, :most]]
    distances = {}
    for d in settings.distances:
        report = stage(progress, f"neighbours ({d})")
        found = nearest(problem, min(most, len(problem.gallery)), d, report)
        hits = _hits(problem, listed, found, settings.recall_at)
        distances[d] = {"recall": {str(n): mean(share) for n, share in hits.items()}}
    return {
        "version": VERSION,
        "protocol": "listed-neighbours",
        "queries": len(problem.query_codes),
        "gallery": len(problem.gallery),
        "dim": int(gallery.shape[1]),
        "listed": int(data.neighbours.shape[1]),
        "distance": OWN.get(str(data.attrs.get("distance"))),
        "distances": distances,
        "checks": {"nonfinite_rows": problem.nonfinite},
        "settings": {
            "distances": list(settings.distances),
            "recall_at": list(settings.recall_at),
            "queries": settings.queries,
            "seed": settings.seed,
            "dmltool": version("dmltool"),
        },
    }


def _hits(
    problem: Problem, listed: np.ndarray, found: Neighbours, recall_at: tuple[int, ...]
) -> dict[int, np.ndarray]:
    """K -> (Q,) share of the first K listed that are no further than the K-th nearest.

    listed: gallery items, -1 for a row that was left out.
    """
    nearest, space = found.squared[:, POSITIVE], found.space
    out = {k: np.empty(len(listed)) for k in recall_at}
    for part in slices(len(listed), max(1, (1 << 23) // (space.width * listed.shape[1]))):
        items = space.points(problem.gallery, listed[part].ravel())
        queries = space.points(problem.query_vectors, part, query=True)[:, None]
        theirs = np.square(queries - items.reshape(*listed[part].shape, -1)).sum(axis=-1)
        theirs[_repeated(listed[part]) | (listed[part] < 0)] = np.inf
        for k in recall_at:
            last = nearest[part, min(k, nearest.shape[1]) - 1, None]
            out[k][part] = (theirs[:, :k] <= largest_equal(last, SINGLE)).sum(axis=1) / k
    return out


def _repeated(listed: np.ndarray) -> np.ndarray:
    """(n, K) bool: rows that a list has named before."""
    order = np.argsort(listed, axis=1, kind="stable")
    ordered = np.take_along_axis(listed, order, axis=1)
    again = np.zeros(listed.shape, bool)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    return again


def warnings(result: Agreement) -> list[str]:
    """Warn if rows are left out, or the lists differ from exact search by the file's distance."""
    own, left_out = result["distance"], result["checks"]["nonfinite_rows"]
    found = [MESSAGES["nonfinite_rows"].format(n=left_out)] if left_out else []
    if own not in result["distances"]:
        return found
    recall = result["distances"][own]["recall"]
    k, worst = min(recall.items(), key=lambda pair: pair[1])
    if worst > 1 - 1e-4:
        return found
    return [
        *found,
        f"the listed neighbours are not those of exact search by {own}, the file's own distance: "
        f"{title_of(f'recall@{k}')} {percent(worst)} %",
    ]
