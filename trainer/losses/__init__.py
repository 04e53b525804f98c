"""The table of losses, and `build`. A module is imported when a loss of it is built.

A loss is a module that owns its head: forward(embeddings (B, D), labels (B,)) -> scalar, and
parts(embeddings, labels) -> the same value as named summands.
"""

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from retrieval.errors import DmlError

if TYPE_CHECKING:
    from torch import nn

PML = "trainer.losses.pml:MetricLearning"


@dataclass(frozen=True)
class Entry:
    name: str
    path: str
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ from the defaults of the class; the user's options come last."""
    compares: bool = True
    """It compares the images of a batch with each other, so classes need several in it."""


LOSSES = (
    Entry(
        "ce",
        "trainer.losses.ce:CrossEntropy",
        "softmax cross-entropy on a linear head, smoothed labels, dropout",
        compares=False,
    ),
    Entry(
        "spce",
        "trainer.losses.spce:SimplifiedPairwiseCrossEntropy",
        "simplified pairwise cross-entropy: dot products within the batch, no head",
    ),
    Entry(
        "pce",
        "trainer.losses.pce:PairwiseCrossEntropy",
        "pairwise cross-entropy behind ce; to watch rather than to train with",
        compares=False,
    ),
    Entry(
        "group",
        "trainer.losses.group:Group",
        "Group Loss: class probabilities refined by the similarities within the batch",
    ),
    Entry(
        "center",
        "trainer.losses.center:Center",
        "center loss: cross-entropy and the distance to the class mean of the batch",
    ),
    Entry("contrastive", PML, "pairs: pull same, push different", {"loss": "ContrastiveLoss"}),
    Entry("triplet", PML, "triplets with a margin", {"loss": "TripletMarginLoss"}),
    Entry("multi_similarity", PML, "soft weights on hard pairs", {"loss": "MultiSimilarityLoss"}),
    Entry(
        "proxy_nca",
        PML,
        "NCA against one learned proxy a class",
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
        "several learned centres a class",
        {"loss": "SoftTripleLoss"},
        compares=False,
    ),
    Entry("n_pairs", PML, "one positive against a negative of each class", {"loss": "NPairsLoss"}),
    Entry("lifted", PML, "all negatives of each positive pair", {"loss": "LiftedStructureLoss"}),
    Entry("angular", PML, "bounds the angle at the negative", {"loss": "AngularLoss"}),
    Entry(
        "snca",
        PML,
        "scalable NCA: neighbours weighed by cosine over sigma = 0.05",
        {"loss": "NCALoss", "distance": "CosineSimilarity", "softmax_scale": 20.0},
    ),
    Entry("nca", PML, "neighbours weighed by squared distance", {"loss": "NCALoss"}),
    Entry("fastap", PML, "average precision by histogram", {"loss": "FastAPLoss"}),
    Entry(
        "ranked_list",
        PML,
        "margin between the set of positives and of negatives",
        {"loss": "RankedListLoss", "margin": 0.4, "Tn": 5.0},
    ),
    Entry(
        "arcface",
        PML,
        "cross-entropy on angles, with a margin",
        {"loss": "ArcFaceLoss"},
        compares=False,
    ),
)


def build(name: str, num_classes: int, dim: int, **options: Any) -> "nn.Module":
    """The loss of that name; `pml:NAME` is any loss class of pytorch-metric-learning."""
    entry = find(name)
    module, _, attribute = entry.path.partition(":")
    loss = getattr(import_module(module), attribute)
    if entry.path != PML:  # the adapter asks the class behind it
        parameters = inspect.signature(loss).parameters.values()
        valid = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        check_options(name, options, valid)
    elif "loss" in options:
        check_options(name, ["loss"], [])
    return loss(num_classes=num_classes, dim=dim, **{**entry.defaults, **options})


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raises for a loss or an option that does not exist; without options torch is not needed."""
    if options or name.startswith("pml:"):
        build(name, num_classes=4, dim=8, **options)
    else:
        find(name)


def find(name: str) -> Entry:
    if name.startswith("pml:"):
        return Entry(name, PML, "", {"loss": name.removeprefix("pml:")})
    table = {entry.name: entry for entry in LOSSES}
    if name not in table:
        raise DmlError(
            f"There is no loss {name!r}.",
            f"Losses: {', '.join(table)}, and pml:NAME for those of pytorch-metric-learning.",
            f"Did you mean {nearest(name, table)!r}? --loss {nearest(name, table)}",
        )
    return table[name]


def check_options(loss: str, given: Iterable[str], valid: Iterable[str]) -> None:
    """Raises for the first option that the loss does not have."""
    valid = list(valid)
    for option in given:
        if option not in valid:
            raise DmlError(
                f"The loss {loss!r} has no option {option!r}.",
                f"Its options: {', '.join(valid)}." if valid else "It has no options.",
                f"Did you mean {nearest(option, valid)!r}? "
                f"--set loss.options.{nearest(option, valid)}=..."
                if valid
                else f"Leave out --set loss.options.{option}",
            )


def nearest(word: str, valid: Iterable[str]) -> str:
    """The most similar of the valid words, however little it is."""
    return difflib.get_close_matches(word, list(valid), n=1, cutoff=0.0)[0]
