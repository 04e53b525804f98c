"""The table of losses, and `build`. The module of a loss is imported when the loss is built.

A loss is a module that owns its head: forward(embeddings (B, D), labels (B,)) -> scalar, and
parts(embeddings, labels) -> the same value as named summands.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from retrieval import registry
from retrieval.errors import DmlError
from retrieval.registry import Registry

if TYPE_CHECKING:
    from torch import nn

PML = "trainer.losses.pml:MetricLearning"


@dataclass(frozen=True)
class Entry(registry.Entry):
    """A loss, and what has to be known of it before it is built."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ from the defaults of the class; the user's options come last."""
    compares: bool = True
    """It compares the images of a batch with each other, so classes need several in it."""
    has_head: bool = False
    """It classifies with a linear layer called `head`."""
    monitor: bool = False
    """It can be computed beside the loss that trains."""
    needs_head: bool = False
    """As a monitor it takes the head of the loss that trains."""


def _pml(name: str) -> Entry:
    return Entry(f"pml:{name}", PML, "a loss of pytorch-metric-learning", {"loss": name})


def _own(path: str) -> Entry:
    return Entry(path, path, "a loss of your own")


LOSSES = Registry(
    "loss",
    Entry(
        "ce",
        "trainer.losses.ce:CrossEntropy",
        "softmax cross-entropy on a linear head, with label smoothing and dropout",
        compares=False,
        has_head=True,
    ),
    Entry(
        "spce",
        "trainer.losses.spce:SimplifiedPairwiseCrossEntropy",
        "simplified pairwise cross-entropy: dot products in the batch, no head",
        monitor=True,
    ),
    Entry(
        "pce",
        "trainer.losses.pce:PairwiseCrossEntropy",
        "pairwise cross-entropy, related to ce; for --monitor rather than for training",
        compares=False,
        has_head=True,
        monitor=True,
        needs_head=True,
    ),
    Entry(
        "group",
        "trainer.losses.group:Group",
        "Group Loss: refines class probabilities with the similarities in the batch",
        has_head=True,
    ),
    Entry(
        "center",
        "trainer.losses.center:Center",
        "center loss: cross-entropy plus the distance to the class mean in the batch",
        has_head=True,
    ),
    Entry(
        "contrastive", PML, "margins on positive and negative pairs", {"loss": "ContrastiveLoss"}
    ),
    Entry("triplet", PML, "triplets with a margin", {"loss": "TripletMarginLoss"}),
    Entry("multi_similarity", PML, "soft weights on hard pairs", {"loss": "MultiSimilarityLoss"}),
    Entry(
        "proxy_nca",
        PML,
        "NCA with one learned proxy per class",
        {"loss": "ProxyNCALoss"},
        compares=False,
    ),
    Entry(
        "norm_softmax",
        PML,
        "cross-entropy on cosines, with a temperature",
        {"loss": "NormalizedSoftmaxLoss"},
        compares=False,
    ),
    Entry(
        "soft_triple",
        PML,
        "several learned centres per class",
        {"loss": "SoftTripleLoss"},
        compares=False,
    ),
    Entry("n_pairs", PML, "one positive against one negative per class", {"loss": "NPairsLoss"}),
    Entry(
        "lifted", PML, "each positive pair against all negatives", {"loss": "LiftedStructureLoss"}
    ),
    Entry("angular", PML, "limits the angle at the negative", {"loss": "AngularLoss"}),
    Entry(
        "snca",
        PML,
        "scalable NCA: neighbours weighted by cosine / 0.05",
        {"loss": "NCALoss", "distance": "CosineSimilarity", "softmax_scale": 20.0},
    ),
    Entry("nca", PML, "neighbours weighted by squared distance", {"loss": "NCALoss"}),
    Entry("fastap", PML, "average precision from histograms", {"loss": "FastAPLoss"}),
    Entry(
        "ranked_list",
        PML,
        "margin between all positives and all negatives",
        {"loss": "RankedListLoss", "margin": 0.4, "Tn": 5.0},
    ),
    Entry(
        "arcface",
        PML,
        "cross-entropy on angles, with a margin",
        {"loss": "ArcFaceLoss"},
        compares=False,
    ),
    option="--loss",
    families={"pml": _pml},
    own=_own,
)


def build(name: str, num_classes: int, dim: int, **options: Any) -> "nn.Module":
    """Build a loss by its name, `pml:CLASS` of pytorch-metric-learning, or `module:CLASS`."""
    entry = LOSSES.find(name)
    loss = _load_own(entry) if entry.path == name else entry.load()
    if entry.path != PML:  # the adapter checks the options of the class behind it
        check_options(name, options, options_of(loss))
    elif "loss" in options:
        check_options(name, ["loss"], [])
    return loss(num_classes=num_classes, dim=dim, **{**entry.defaults, **options})


def options_of(loss: type) -> dict[str, Any]:
    """The options of a loss class and their defaults: its keyword-only parameters."""
    parameters = inspect.signature(loss).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _load_own(entry: Entry) -> type:
    """The class at a dotted path; only losses are accepted, since a file may name the path."""
    from trainer.losses.base import Loss

    try:
        found = entry.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise DmlError(
            f"The loss {entry.name!r} cannot be imported.",
            f"{error}.",
            "Name a class as package.module:Class; PYTHONPATH=. finds modules of this folder.",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Loss)):
        raise DmlError(
            f"{entry.name!r} is not a loss.",
            "A class derived from trainer.losses.base.Loss is needed.",
            "The page docs/extending.md shows how to write one.",
        )
    return found


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise for a loss or an option that does not exist; a name of the table needs no torch."""
    if options or ":" in name:
        build(name, num_classes=4, dim=8, **options)
    else:
        LOSSES.find(name)


def check_options(loss: str, given: Iterable[str], valid: Iterable[str]) -> None:
    """Raise for the first option that the loss does not have."""
    registry.check_options(f"The loss {loss!r}", given, valid, "loss.options")
