"""What exports leave: the names of their files, and the types of results as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

EXPORT = "export.json"


class ParityResult(TypedDict):
    """How far the embeddings of a model are from those of its network: `exporter.parity`."""

    max_abs: float
    """Largest absolute difference of two numbers."""
    max_rel: float
    """Length of the difference divided by the length of the embedding, for the worst image."""
    min_cosine: float
    recall_torch: float
    """Recall@1 by cosine on the real images, 0 to 1."""
    recall_onnx: float
    agreement: float
    """Share of the real images whose nearest neighbour is the same."""
    images: int
    """Number of real images."""
    batches: list[int]
    """Batch sizes that were compared, each with real and with random images."""


class PrecisionResult(TypedDict):
    """One precision in the comparison of an export."""

    precision: str
    bytes: int
    images_per_second: float
    recall: float
    """Recall@1 by cosine, 0 to 1."""
    changed: float
    """Share of images whose nearest neighbour differs from that of the first model."""


class ModelResult(TypedDict):
    """The model that an export wrote."""

    path: str
    bytes: int
    sha256: str
    dim: int | None
    precision: str
    normalized: bool
    parity: ParityResult
    precisions: list[PrecisionResult]
    provider: NotRequired[str]
    provider_why: NotRequired[str]


class EmbeddingsResult(TypedDict):
    """The result of `embed`, and the embeddings that an export wrote."""

    path: str
    splits: dict[str, int]
    dim: int
    dtype: str
    computed: int
    skipped: Sequence[Sequence[str]]  # path and reason of each image that is left out
    recall: dict[str, Sequence[float]] | None  # distance -> Recall@1 in float32 and in float16
    seconds: float
    writing: float
    run_by: str
    labelled: NotRequired[bool]
    notes: NotRequired[list[str]]


class ExportResult(TypedDict):
    """The result of `export`, export.json."""

    runs: list[str]
    folder: str
    notes: list[str]
    threads: NotRequired[str]
    model: NotRequired[ModelResult]
    embeddings: NotRequired[EmbeddingsResult]


class GraphSummary(TypedDict):
    producer: str
    ir_version: int
    opsets: dict[str, int]
    nodes: int
    inputs: list[str]
    outputs: list[str]


class InputSummary(TypedDict):
    name: str
    layout: str | None
    dtype: str
    size: list[int] | None  # height, width
    batch: int | None


class OutputSummary(TypedDict):
    name: str
    dim: int | None


class RandomImages(TypedDict):
    """What a model computes for random images."""

    images: int
    dim: int
    norms: list[float]  # smallest, largest
    lowest_cosine_alone: float


class CheckResult(TypedDict):
    """The checks of a model that was run."""

    passed: dict[str, bool]
    random_images: RandomImages
    parity: NotRequired[ParityResult]


class ModelInspection(TypedDict):
    """The result of `inspect` for a model; of one that cannot embed images, with the problem."""

    version: int
    file: str
    format: str
    bytes: int
    graph: GraphSummary
    problem: NotRequired[dict[str, str]]  # what, why, fix
    sha256: NotRequired[str]
    weights_beside: NotRequired[list[str]]
    input: NotRequired[InputSummary]
    output: NotRequired[OutputSummary]
    dmltool: NotRequired[dict[str, Any]]  # its metadata, which anyone may have written
    preprocessing: NotRequired[dict[str, Any]]
    check: NotRequired[CheckResult]
