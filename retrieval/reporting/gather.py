"""Gather everything that the page of a report shows, as one typed view."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrieval import bootstrap
from retrieval.checks import warnings
from retrieval.comparison import align, difference, flipped
from retrieval.distances import DISTANCES
from retrieval.embeddings import Embeddings, class_names, taken_of
from retrieval.errors import install
from retrieval.evaluation import Evaluation, Settings, run
from retrieval.loading.load import comparable
from retrieval.metrics import hits
from retrieval.neighbours import Best, nearest_quickly, pair_scores
from retrieval.number_format import as_text
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
# Not printable to Python, but part of ordinary text: spaces of French and Japanese, and the joiners
# of Persian, Hindi and emoji.
WRITTEN = "\xa0\u202f\u3000\u200c\u200d"


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


@dataclass(frozen=True)
class Beside:
    """What a page shows besides the scores of a file."""

    pictures: thumbs.Pictures | None = None
    run_view: view.Run | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Scored:
    """A file that has been evaluated, and how its page is made."""

    own: Evaluation
    settings: Settings
    options: Options
    items: Items
    progress: StageProgress | None

    @property
    def problem(self) -> Problem:
        return self.own.problem

    @property
    def distance(self) -> str:
        return self.options.distance

    @property
    def ranks(self) -> np.ndarray:
        """(Q,) by the distance of the page."""
        return self.own.ranks[self.distance]

    def tell(self, stage: str) -> None:
        """Report a stage that is not divided further."""
        if self.progress:
            self.progress(stage, 0, 1)


def gather(
    data: Embeddings,
    source: Source,
    others: Sequence[Embeddings] = (),
    options: Options | None = None,
    beside: Beside | None = None,
    progress: StageProgress | None = None,
) -> view.View:
    """Gather everything that the page of a report shows.

    source: what the result says of the file; others: files of the same items to compare with.
    """
    options, beside = options or Options(), beside or Beside()
    title, *names = _tails([data.source, *(other.source for other in others)])
    pairs = [align(*comparable(data, other)) for other in others]  # before anything takes long
    scored = _scored(data, pairs, options, progress)
    own, problem, items, ranks = scored.own, scored.problem, scored.items, scored.ranks
    best = nearest_quickly(problem, scored.distance, stage(progress, "nearest items"))
    sample = sampling.choose(ranks, problem.query_codes, best.margin, options.seed)
    rows = _rows(scored, sample.queries)
    # Items are numbered, and get their pictures, in the order of these calls.
    for n in sorted(n for tab in sample.tabs.values() for n in tab):
        _query(sample.queries[n], ranks, rows[n], items)
    scored.tell("classes")
    columns = classes.columns(problem, ranks, scored.distance, _names(data, problem))
    confused, duplicates = _confused(scored, best), _duplicates(scored, best)
    compared = _comparisons(scored, names, data, pairs)
    scored.tell("histograms")
    histograms = sampling.histograms(problem, options.seed)
    scored.tell("map")
    plane = _map(problem, sample.queries, options)
    queries = _queries(scored, sample.queries, rows)
    pictured, unread = _thumbs(scored, beside.pictures)
    notes = [*_dropped(problem), *map(shown, beside.notes), *unread]
    return {
        "title": title,
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dmltool": version("dmltool"),
        "result": own.result | {"source": source},
        "provenance": _provenance(source),
        "curve": _curve(own, scored.settings),
        "distance": scored.distance,
        "classes": columns,
        "tabs": sample.tabs,
        "total_queries": len(ranks),
        "confused": confused,
        "duplicates": duplicates,
        "compare": compared,
        "histograms": histograms,
        "map": plane,
        "run": beside.run_view,
        "queries": queries,
        "items": items.columns(pictured.of),
        "thumbs": {"side": thumbs.SIDE, "images": pictured.images},
        "warnings": [*warnings(own.result), *notes],
    }


def _scored(
    data: Embeddings,
    pairs: Sequence[Embeddings],
    options: Options,
    progress: StageProgress | None,
) -> Scored:
    """Evaluate a file on the rows that it and the files it is compared with can be scored on."""
    problem = from_embeddings(data, drop_nonfinite=options.drop_nonfinite, beside=pairs)
    settings = Settings(
        nmi=options.nmi, memory=MEMORY, seed=options.seed, device=options.device
    ).of(data)
    own = run(problem, settings, progress)
    return Scored(own, settings, options, Items(data, problem), progress)


# Parts of the view


def _rows(scored: Scored, queries: np.ndarray) -> list[tuple[list[int], list[float]]]:
    """The nearest items of some queries, and their scores."""
    tell = stage(scored.progress, "rows")
    ranks, d = scored.ranks[queries], scored.distance
    return nearest.rows_of(scored.problem, queries, ranks, d, NEAR, tell)


def _queries(
    scored: Scored, queries: np.ndarray, rows: Sequence[tuple[list[int], list[float]]]
) -> list[view.Query]:
    items = scored.items
    for query in queries:  # all of them before the neighbours of some
        items.query(query)
    return [
        _query(query, scored.ranks, row, items) for query, row in zip(queries, rows, strict=True)
    ]


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


def _confused(scored: Scored, best: Best) -> list[view.Confusion]:
    return [
        {
            "a": a,
            "b": b,
            "count": count,
            "share": round(share, 4),
            "examples": _pairs(scored, some, best),
        }
        for a, b, count, share, some in classes.confused(scored.problem, scored.ranks, best)
    ]


def _duplicates(scored: Scored, best: Best) -> list[view.Pair]:
    closest = classes.closest_negatives(scored.problem, best, scored.distance)
    return _pairs(scored, closest, best)


def _pairs(scored: Scored, queries: np.ndarray, best: Best) -> list[view.Pair]:
    """Query, its nearest negative, score."""
    found, items = best.negative[queries], scored.items
    answers = items.answers(found)
    scores = _digits(pair_scores(scored.problem, queries, found, scored.distance))
    return [[items.query(q), g, s] for q, g, s in zip(queries, answers, scores, strict=True)]


def _comparisons(
    scored: Scored, names: Sequence[str], data: Embeddings, pairs: Sequence[Embeddings]
) -> list[view.Compared]:
    """The comparisons with other files of the same items: `pairs`, in the order of `data`."""
    drop, beside = scored.options.drop_nonfinite, [data, *pairs]
    return [
        _compared(scored, name, from_embeddings(theirs, drop_nonfinite=drop, beside=beside))
        for name, theirs in zip(names, pairs, strict=True)
    ]


def _compared(scored: Scored, name: str, problem: Problem) -> view.Compared:
    """The comparison with another file: differences, and the queries gained and lost."""
    own, settings, options = scored.own, scored.settings, scored.options
    items, tell = scored.items, of_file(scored.progress, name)
    theirs = run(problem, replace(settings, nmi=False), tell)
    ranks, their_ranks = scored.ranks, theirs.ranks[options.distance]
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


def _thumbs(scored: Scored, pictures: thumbs.Pictures | None) -> tuple[thumbs.Thumbs, list[str]]:
    options, progress = scored.options, scored.progress
    paths = [path for path in scored.items.paths() if path is not None]
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


def _provenance(source: Source) -> list[list[str]]:
    """The file, its format, what was taken of it, and its metadata, whose names may be any."""
    pairs = [("file", source["file"]), ("format", source["format"])]
    pairs += [(name, taken_of(split)) for name, split in source["taken"].items() if split]
    pairs += source["attrs"].items()
    return [[shown(name), shown(as_text(value))] for name, value in pairs]


# Texts, numbers, progress


def shown(value: object) -> str:
    """A text of the file as it is shown: printable, and of bounded length."""
    text = _shortened(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value))
    if not text.isprintable():
        text = _shortened("".join(map(_visible, text)))
    return text


def _visible(sign: str) -> str:
    """The character, or an escape for one that does not show or that reverses the text."""
    written = sign.isprintable() or sign in WRITTEN
    return sign if written else sign.encode("unicode_escape").decode()


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
