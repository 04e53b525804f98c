"""The shape of a report's view: everything its page shows, as dicts that become JSON."""

from __future__ import annotations

from typing import Any, TypedDict

from retrieval.results import Difference, Result

Pair = list[float]
"""Item of a query, item of a gallery row, score."""


class Curve(TypedDict):
    """Recall@K over K, and its interval; None with fewer than two classes."""

    k: list[int]
    recall: list[float]
    low: list[float] | None
    high: list[float] | None


class ClassColumns(TypedDict):
    """A value for each class, in the order of its code."""

    name: list[str]
    items: list[int]
    recall: list[float | None]
    spread: list[float]
    nearest: list[int]
    gap: list[float | None]


class Query(TypedDict):
    """A query with its nearest items."""

    item: int
    rank: int
    near: list[int]
    score: list[float]


class Confusion(TypedDict):
    """Queries of class a whose nearest item is of class b."""

    a: int
    b: int
    count: int
    share: float
    examples: list[Pair]


class ChangedQuery(TypedDict):
    """A query that one of two files gets right at rank 1, with its nearest items in both."""

    item: int
    kind: str
    rank: int
    their_rank: int
    ours: list[int]
    theirs: list[int]
    score: list[float]
    their_score: list[float]


class Compared(TypedDict):
    """The comparison with another file: differences, and the queries gained and lost."""

    file: str
    distances: dict[str, dict[str, Difference]]
    gained: int
    lost: int
    flips: list[ChangedQuery]


class Histogram(TypedDict):
    """Shares of positive and of negative pairs between two edges."""

    edges: list[float]
    positive: list[float]
    negative: list[float]
    overlap: float | None


class Map(TypedDict):
    """Queries in the plane."""

    method: str
    x: list[float]
    y: list[float]
    query: list[int]


# A value for each item; "class" cannot be an attribute.
ItemColumns = TypedDict(
    "ItemColumns",
    {
        "class": list[int],
        "path": list[str | None],
        "thumb": list[int],
        "row": list[int],
        "side": list[int],
    },
)


class Images(TypedDict):
    side: int
    images: list[str]


class Run(TypedDict):
    """Curves and settings of a run folder."""

    name: str
    epochs: list[float]
    lines: dict[str, Any]  # loss, parts, monitor, recall_l2, recall_cos
    scores_of: str | None
    settings: str


class View(TypedDict):
    title: str
    created: str
    dmltool: str
    result: Result
    provenance: list[list[str]]
    curve: dict[str, Curve]
    distance: str
    classes: ClassColumns
    tabs: dict[str, list[int]]
    total_queries: int
    confused: list[Confusion]
    duplicates: list[Pair]
    compare: list[Compared]
    histograms: dict[str, Histogram]
    map: Map | None
    run: Run | None
    queries: list[Query]
    items: ItemColumns
    thumbs: Images
    warnings: list[str]
