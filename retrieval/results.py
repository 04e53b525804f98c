"""Types of the results, which become JSON: docs/json.md."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

LEAVE_ONE_OUT, QUERY_GALLERY = "leave-one-out", "query-gallery"
"""The protocols: each item is a query for all others, or queries are ranked against a gallery."""

Scores = dict[str, Any]
"""The scores of one distance by name; the names come from the table METRICS."""


class Source(TypedDict):
    """Where embeddings came from."""

    file: str
    format: str
    attrs: dict[str, Any]
    taken: dict[str, dict[str, str]]  # split -> vectors, labels, paths -> name
    notes: list[str]


class Result(TypedDict):
    """The result of `evaluate`."""

    version: int
    protocol: str
    queries: int
    gallery: int
    classes: int
    dim: int
    distances: dict[str, Scores]
    checks: dict[str, int]
    notes: list[str]
    settings: dict[str, Any]
    source: NotRequired[Source]


class Agreement(TypedDict):
    """The result of `eval` for a file that lists neighbours and has no labels."""

    version: int
    protocol: str
    queries: int
    gallery: int
    dim: int
    listed: int
    distance: str | None
    distances: dict[str, Scores]
    checks: dict[str, int]
    settings: dict[str, Any]


class Difference(TypedDict):
    """One score of two files."""

    a: float
    b: float
    difference: float
    ci: list[float] | None
    p: float | None


class Flip(TypedDict):
    """A query that only one of two files gets right at rank 1."""

    row: int
    label: int | str
    path: NotRequired[str]


class Comparison(TypedDict):
    """The result of `compare`."""

    version: int
    a: str
    b: str
    protocol: str
    queries: int
    gallery: int
    classes: int
    dim: dict[str, int]
    distances: dict[str, dict[str, Difference]]
    flipped: dict[str, dict[str, list[Flip]]]
    checks: dict[str, dict[str, int]]
    notes: list[str]
    settings: dict[str, Any]


class Spread(TypedDict):
    """Least, median and largest value; None: beyond float64."""

    min: float | None
    median: float | None
    max: float | None


class LabelSummary(TypedDict):
    kind: str
    classes: int
    items_per_class: Spread | None
    single_item_classes: int


class Entropies(TypedDict):
    """In nats, up to a constant: `retrieval.entropy`."""

    embeddings: float | None
    given_labels: float | None
    difference: float | None
    identical_pairs: int


class HeadInformation(TypedDict):
    """H(Y) - CE by the head of a run, on the finite rows of the classes it knows, in nats."""

    rows: int
    label_entropy: float
    cross_entropy: float
    difference: float


class SplitEntropy(TypedDict):
    labels: float | None
    l2: Entropies
    cos: Entropies
    head: NotRequired[HeadInformation | None]


class SplitSummary(TypedDict):
    rows: int
    dim: int
    dtype: str
    bytes: int
    norms: Spread | None
    unit_length: bool
    labels: LabelSummary | None
    paths: bool
    taken: dict[str, str]
    checks: dict[str, int | None]
    entropy: NotRequired[SplitEntropy]


class Inspection(TypedDict):
    """The result of `inspect` for an embedding file."""

    version: int
    file: str
    format: str
    attrs: dict[str, Any]
    label_names: int | None
    splits: dict[str, SplitSummary]
    notes: list[str]
