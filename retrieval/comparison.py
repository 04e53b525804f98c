"""Compare two embedding files of the same items: which retrieves better, and by how much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from retrieval import bootstrap
from retrieval.distributed.world import ALONE, World
from retrieval.embeddings import Embeddings, Split
from retrieval.evaluation import Evaluation, Settings, score, with_nmi
from retrieval.loading.load import comparable, loaded
from retrieval.matching import match_rows
from retrieval.metrics import cluster_metrics, mean
from retrieval.problem import Problem, from_embeddings
from retrieval.resources import StageProgress, of_file
from retrieval.results import Comparison, Difference, Flip

VERSION = 1


def compare(
    a: Embeddings | str | Path,
    b: Embeddings | str | Path,
    settings: Settings | None = None,
    progress: StageProgress | None = None,
    world: World = ALONE,
    *,
    drop_nonfinite: bool = False,
) -> Comparison:
    """Compare two embeddings of the same items: the difference B - A of every score.

    Items are matched by path where both have paths, by row otherwise; labels must agree.

    Parameters
    ----------
    a, b : Embeddings, str or Path
        Embeddings, or files of them.
    settings : Settings, optional
        How to evaluate both. Default: without NMI.
    progress : function, optional
        Called with (stage, done, total).
    world : World, optional
        The processes that share the work: all of them call this.
    drop_nonfinite : bool
        Leave out items with NaN or infinity in A or B. Default: they are an error.

    Returns
    -------
    dict
        Differences with paired class-bootstrap intervals and p values, as in docs/json.md.
    """
    a, b = comparable(loaded(a), loaded(b))
    b, settings = align(a, b), (settings or Settings(nmi=False)).of(a)
    problems = [
        from_embeddings(data, drop_nonfinite=drop_nonfinite, beside=[other])
        for data, other in ((a, b), (b, a))
    ]
    if settings.queries is not None:
        problems = [_drawn_by_path(problem, a, b) for problem in problems]
    tells = [of_file(progress, name) for name in "AB"]
    # k-means comes last: the first process does it alone, and the others wait.
    scored = [score(p, settings, tell, world) for p, tell in zip(problems, tells, strict=True)]
    first, second = (
        with_nmi(found, problem, settings, tell, world)
        for found, problem, tell in zip(scored, problems, tells, strict=True)
    )
    dropped = first.problem.dropped
    left_out = [f"items with NaN or Inf in A or B, left out: {dropped:,}"] if dropped else []
    return {
        "version": VERSION,
        "a": str(a.source),
        "b": str(b.source),
        "protocol": first.result["protocol"],
        "queries": first.result["queries"],
        "gallery": first.result["gallery"],
        "classes": first.result["classes"],
        "dim": {"a": first.result["dim"], "b": second.result["dim"]},
        "distances": {d: difference(first, second, d, settings) for d in settings.distances},
        "flipped": {d: _flipped(first, second, d, a) for d in settings.distances},
        "checks": {"a": first.result["checks"], "b": second.result["checks"]},
        "settings": first.result["settings"],
        "notes": left_out + first.result["notes"],  # B has the same items, and so the same notes
    }


def _drawn_by_path(problem: Problem, a: Embeddings, b: Embeddings) -> Problem:
    """Let `queries` draw items by their paths, so that the order of rows in a file plays no part.

    Queries without paths, or of which two have one path, are matched and drawn by their rows.
    """
    paths, others = (data.splits[problem.split].paths for data in (a, b))
    if paths is None or others is None or len(np.unique(paths)) < len(paths):
        return problem
    return replace(problem, drawing_order=np.argsort(paths[problem.query_rows]))


def align(a: Embeddings, b: Embeddings) -> Embeddings:
    """Return B with its rows in the order of A, after checking that both hold the same items."""
    orders = match_rows(a, b, leave_out=["train"])
    return replace(b, splits={name: _taken(b.splits[name], rows) for name, rows in orders.items()})


def _taken(split: Split, rows: np.ndarray | None) -> Split:
    if rows is None or np.array_equal(rows, np.arange(len(rows))):
        return split
    labels, paths = (None if each is None else each[rows] for each in (split.labels, split.paths))
    return Split(split.vectors[rows], labels, paths)


def difference(
    first: Evaluation, second: Evaluation, d: str, settings: Settings
) -> dict[str, Difference]:
    """Second minus first in every score of one distance; both have the same queries in order."""
    out: dict[str, Difference] = {}
    for metric, one in first.per_query[d].items():
        two = second.per_query[d][metric]
        gain, span, p = bootstrap.paired(
            two, one, first.problem.query_codes, settings.resamples, settings.level, settings.seed
        )
        known = not np.isnan(span[0])
        out[metric] = {
            "a": mean(one),
            "b": mean(two),
            "difference": gain,
            "ci": list(span) if known else None,
            "p": p if known else None,
        }
    for name in (metric.name for metric in cluster_metrics()):
        ours, theirs = (e.result["distances"][d].get(name) for e in (first, second))
        if ours and theirs:  # a score of the whole set: no queries to resample
            a, b = ours["mean"], theirs["mean"]
            out[name] = {"a": a, "b": b, "difference": b - a, "ci": None, "p": None}
    return out


def _flipped(first: Evaluation, second: Evaluation, d: str, a: Embeddings) -> dict[str, list[Flip]]:
    """Rows (and paths) of the queries that only one of the two gets right at rank 1."""
    rows, split = first.problem.query_rows, a.splits[first.problem.split]
    changed = flipped(first.ranks[d], second.ranks[d])
    return {kind: _listed(split, rows[queries]) for kind, queries in changed.items()}


def flipped(first: np.ndarray, second: np.ndarray) -> dict[str, np.ndarray]:
    """Queries with rank 1 in the second file only (gained), or in the first only (lost)."""
    one, two = first == 1, second == 1
    return {"gained": np.flatnonzero(two & ~one), "lost": np.flatnonzero(one & ~two)}


def _listed(split: Split, rows: np.ndarray) -> list[Flip]:
    assert split.labels is not None, "queries without labels are not evaluated"
    labels = split.labels[rows].tolist()
    flips: list[Flip] = [{"row": n, "label": x} for n, x in zip(rows.tolist(), labels, strict=True)]
    if split.paths is not None:
        for flip in flips:
            flip["path"] = str(split.paths[flip["row"]])
    return flips
