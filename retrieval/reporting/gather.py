"""Gather everything that the page of a report shows, as one typed view."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retrieval import bootstrap
from retrieval.checks import warnings
from retrieval.comparison import align, difference, flipped
from retrieval.distances import DISTANCES
from retrieval.embeddings import Embeddings, class_names
from retrieval.errors import install
from retrieval.evaluation import Evaluation, Settings, run
from retrieval.loading.load import comparable
from retrieval.metrics import hits
from retrieval.neighbours import Best, nearest_quickly, pair_scores
from retrieval.problem import Problem, from_embeddings
from retrieval.ranking.backends.choice import DEVICES, PATTERN
from retrieval.reporting import MAPS, classes, layout, nearest, sampling, thumbs
from retrieval.resources import StageProgress, of_file, stage
from retrieval.results import LEAVE_ONE_OUT, QUERY_GALLERY
from retrieval.settings import Checked, accepting, one_of, within

if TYPE_CHECKING:
    from retrieval.reporting import view
    from retrieval.results import Source

NEAR, FLIPS, LONGEST = 8, 100, 300
CURVE = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1000)  # values of K
MEMORY = 512 << 20


@dataclass(frozen=True)
class Options(Checked):
    """What a report computes."""

    distance: str = one_of(*DISTANCES, default="cos")
    """Of rows, confusions and the map."""
    nmi: bool | None = None
    """None: if k-means does not take long."""
    map: str = one_of(*MAPS, default=MAPS[0])
    seed: int = within(0, default=0)
    drop_nonfinite: bool = False
    """Leave out rows with NaN or infinity instead of failing."""
    device: str = accepting(PATTERN.fullmatch, DEVICES, default="auto")
    """That counts ranks."""
    budget: int = within(0, default=thumbs.BUDGET)
    """Characters for thumbnails."""

    def __post_init__(self) -> None:
        self.require_valid()


@dataclass
class Items:
    """The items shown anywhere, numbered in the order in which they are to get pictures."""

    data: Embeddings
    problem: Problem
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # (side, row) -> item

    def query(self, n: int) -> int:
        return self._numbers(0, [n])[0]

    def answers(self, found: Sequence[int]) -> list[int]:
        return self._numbers(int(self.problem.protocol == QUERY_GALLERY), found)

    def _numbers(self, side: int, rows: Sequence[int]) -> list[int]:
        return [self.numbers.setdefault((side, int(row)), len(self.numbers)) for row in rows]

    def paths(self) -> list[str | None]:
        return [self._path(side, row) for side, row in self.numbers]

    def _path(self, side: int, row: int) -> str | None:
        paths = self.data.splits["gallery" if side else self.problem.split].paths
        return None if paths is None else str(paths[self._row_in_file(side, row)])

    def _row_in_file(self, side: int, row: int) -> int:
        return int((self.problem.gallery_rows if side else self.problem.query_rows)[row])

    def columns(self, pictured: dict[str, int]) -> view.ItemColumns:
        codes = [self.problem.query_codes, self.problem.gallery_codes]
        paths = self.paths()
        return {
            "class": [int(codes[side][row]) for side, row in self.numbers],
            "path": [None if path is None else shown(path) for path in paths],
            "thumb": [-1 if path is None else pictured.get(path, -1) for path in paths],
            "row": [self._row_in_file(side, row) for side, row in self.numbers],
            "side": [side for side, _ in self.numbers],
        }


def gather(
    data: Embeddings,
    source: Source,
    others: Sequence[Embeddings] = (),
    options: Options | None = None,
    *,
    pictures: thumbs.Pictures | None = None,
    run_view: view.Run | None = None,
    notes: Sequence[str] = (),
    progress: StageProgress | None = None,
) -> view.View:
    """source: what the result says of the file; others: files of the same items to compare with."""
    options, tell = options or Options(), progress or _silent
    title, *names = _tails([data.source, *(other.source for other in others)])
    pairs = [align(*comparable(data, other)) for other in others]  # before anything takes long
    drop = options.drop_nonfinite
    problem = from_embeddings(data, drop_nonfinite=drop, beside=pairs)
    settings = Settings(
        nmi=options.nmi, memory=MEMORY, seed=options.seed, device=options.device
    ).of(data)
    own = run(problem, settings, progress)
    ranks, d = own.ranks[options.distance], options.distance
    best = nearest_quickly(problem, d, stage(progress, "nearest items"))
    sample = sampling.choose(ranks, problem.query_codes, best.margin, options.seed)
    rows = nearest.rows_of(
        problem, sample.queries, ranks[sample.queries], d, NEAR, stage(progress, "rows")
    )
    items = Items(data, problem)
    for n in sorted(n for tab in sample.tabs.values() for n in tab):
        _query(sample.queries[n], ranks, rows[n], items)
    tell("classes", 0, 1)
    columns = classes.columns(problem, ranks, d, _names(data, problem))
    # Items are numbered, and get their pictures, in the order of these calls.
    confused = _confused(items, ranks, best, d)
    duplicates = _pairs(items, classes.closest_negatives(problem, best, d), best, d)
    compared = [
        _compared(
            name,
            own,
            from_embeddings(theirs, drop_nonfinite=drop, beside=[data, *pairs]),
            items,
            settings,
            options,
            progress,
        )
        for name, theirs in zip(names, pairs, strict=True)
    ]
    tell("histograms", 0, 1)
    histograms = sampling.histograms(problem, options.seed)
    tell("map", 0, 1)
    plane = _map(problem, sample.queries, options)
    for query in sample.queries:  # all of them before the neighbours of some
        items.query(query)
    queries = [
        _query(query, ranks, row, items) for query, row in zip(sample.queries, rows, strict=True)
    ]
    pictured, unread = _thumbs(items, pictures, options, progress)
    return {
        "title": title,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dmltool": version("dmltool"),
        "result": own.result | {"source": source},
        "provenance": _provenance(source, own.result["settings"]),
        "curve": _curve(own, settings),
        "distance": d,
        "classes": columns,
        "tabs": sample.tabs,
        "total_queries": len(ranks),
        "confused": confused,
        "duplicates": duplicates,
        "compare": compared,
        "histograms": histograms,
        "map": plane,
        "run": run_view,
        "queries": queries,
        "items": items.columns(pictured.of),
        "thumbs": {"side": thumbs.SIDE, "images": pictured.images},
        "warnings": [*warnings(own.result), *_dropped(problem), *map(shown, notes), *unread],
    }


# Parts of the view


def _query(
    n: int, ranks: np.ndarray, row: tuple[list[int], list[float]], items: Items
) -> view.Query:
    near, scores = row
    return {
        "item": items.query(n),
        "rank": int(ranks[n]),
        "near": items.answers(near),
        "score": _digits(scores),
    }


def _curve(own: Evaluation, settings: Settings) -> dict[str, view.Curve]:
    """Recall@K with intervals for the K of CURVE, the last of them that of all candidates."""
    problem = own.problem
    last = min(CURVE[-1], max(1, len(problem.gallery) - (problem.protocol == LEAVE_ONE_OUT)))
    ks = [*(k for k in CURVE if k < last), last]
    table = np.stack([hits(rank, k) for rank in own.ranks.values() for k in ks], axis=1)  # (Q, 2 K)
    low, high = bootstrap.interval(
        table, problem.query_codes, settings.resamples, settings.level, settings.seed
    )
    columns = np.stack([table.mean(axis=0), low, high]).reshape(3, len(own.ranks), len(ks)).round(6)
    known = not np.isnan(columns).any()  # there are no intervals with fewer than two classes
    return {
        d: {
            "k": ks,
            "recall": columns[0, n].tolist(),
            "low": columns[1, n].tolist() if known else None,
            "high": columns[2, n].tolist() if known else None,
        }
        for n, d in enumerate(own.ranks)
    }


def _dropped(problem: Problem) -> list[str]:
    """A note on items that are left out because of the files to compare with."""
    others = problem.dropped - problem.nonfinite
    return [f"items with NaN or Inf in another file only, left out: {others:,}"] if others else []


def _names(data: Embeddings, problem: Problem) -> list[str]:
    labels = problem.names.tolist()
    known = class_names(problem.names, data.label_names) or labels
    return [shown(name or label) for name, label in zip(known, labels, strict=True)]


def _confused(items: Items, ranks: np.ndarray, best: Best, d: str) -> list[view.Confusion]:
    return [
        {
            "a": a,
            "b": b,
            "count": count,
            "share": round(share, 4),
            "examples": _pairs(items, some, best, d),
        }
        for a, b, count, share, some in classes.confused(items.problem, ranks, best)
    ]


def _pairs(items: Items, queries: np.ndarray, best: Best, d: str) -> list[view.Pair]:
    """Query, its nearest negative, score."""
    found = best.negative[queries]
    answers = items.answers(found)
    scores = _digits(pair_scores(items.problem, queries, found, d))
    return [[items.query(q), g, s] for q, g, s in zip(queries, answers, scores, strict=True)]


def _compared(
    name: str,
    own: Evaluation,
    problem: Problem,
    items: Items,
    settings: Settings,
    options: Options,
    progress: StageProgress | None,
) -> view.Compared:
    """The comparison with another file: differences, and the queries gained and lost."""
    tell = of_file(progress, name)
    theirs = run(problem, replace(settings, nmi=False), tell)
    ranks, their_ranks = own.ranks[options.distance], theirs.ranks[options.distance]
    changed = flipped(their_ranks, ranks)
    rng = np.random.default_rng(options.seed)
    drawn = {kind: rng.permutation(rows)[:FLIPS] for kind, rows in changed.items()}
    chosen = np.concatenate(list(drawn.values()))
    kinds = [kind for kind, rows in drawn.items() for _ in rows]
    lists = [
        nearest.rows_of(e.problem, chosen, r[chosen], options.distance, NEAR, stage(tell, "rows"))
        for e, r in ((own, ranks), (theirs, their_ranks))
    ]
    flips: list[view.ChangedQuery] = [
        {
            "item": items.query(query),
            "kind": kind,
            "rank": int(ranks[query]),
            "their_rank": int(their_ranks[query]),
            "ours": items.answers(ours[0]),
            "theirs": items.answers(other[0]),
            "score": _digits(ours[1]),
            "their_score": _digits(other[1]),
        }
        for query, kind, ours, other in zip(chosen, kinds, *lists, strict=True)
    ]
    distances = {d: difference(theirs, own, d, settings) for d in settings.distances}
    return {
        "file": name,
        "distances": distances,
        "gained": len(changed["gained"]),
        "lost": len(changed["lost"]),
        "flips": flips,
    }


def _map(problem: Problem, queries: np.ndarray, options: Options) -> view.Map | None:
    if options.map == "none":
        return None
    method, points = layout.plane(
        problem.query_vectors, queries, options.distance, options.map, options.seed
    )
    x, y = points.round(4).T.tolist()
    return {"method": method, "x": x, "y": y, "query": list(range(len(queries)))}


def _thumbs(
    items: Items,
    pictures: thumbs.Pictures | None,
    options: Options,
    progress: StageProgress | None,
) -> tuple[thumbs.Thumbs, list[str]]:
    paths = [path for path in items.paths() if path is not None]
    none = thumbs.Thumbs([], {}, [])
    if pictures is None or not paths:
        return none, []
    if find_spec("PIL") is None:
        return none, [f"images are not shown: that needs Pillow. {install('cpu')}"]
    made = thumbs.thumbnails(paths, pictures, options.budget, stage(progress, "thumbnails"))
    if not made.unread:
        return made, []
    count, tried = len(made.unread), len(made.unread) + len(made.of)
    first = shown(made.unread[0])
    return made, [f"images that could not be read: {count:,} of {tried:,}; the first: {first}"]


def _provenance(source: Source, settings: dict[str, Any]) -> list[list[str]]:
    pairs = {"file": source["file"], "format": source["format"], **source["attrs"]}
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in (pairs | settings).items()
    }
    return [[shown(name), shown(text)] for name, text in texts.items()]


# Texts, numbers, progress


def shown(value: object) -> str:
    """A text of the file as it is shown: printable, and of bounded length."""
    text = _shortened(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value))
    if not text.isprintable():
        signs = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        text = _shortened("".join(signs))
    return text


def _shortened(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]}…{text[1 - half :]}"


def _tails(paths: Sequence[Path | str]) -> list[str]:
    """Names of files, with as many folders as are needed to tell them apart."""
    parts = [Path(path).parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        tails = ["/".join(part[-depth:]) for part in parts]
        if len(set(tails)) == len(set(parts)):
            break
    return [shown(tail) for tail in tails]


def _digits(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""
