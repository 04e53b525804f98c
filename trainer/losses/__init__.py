"""The table of losses, and `build`. The module of a loss is imported when the loss is built.

A loss is a module that owns its head: forward(embeddings (B, D), labels (B,)) -> scalar, and
parts(embeddings, labels) -> the same value as named summands.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from retrieval import registry
from retrieval.errors import DmlError
from retrieval.registry import Registry
from trainer.parameters import check_options, options_of

if TYPE_CHECKING:
    from trainer.losses.base import Loss

PML = "trainer.losses.pml:MetricLearning"


@dataclass(frozen=True)
class Entry(registry.Entry):
    """A loss, and what has to be known of it before it is built."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options that differ from the defaults of the class; the user's options come last."""
    compares: bool = True
    """It compares the images of a batch with each other, so classes need several in it."""
    has_head: bool = False
    """It classifies with a linear layer called `head`; as a monitor with that of the training."""
    below_images: str = ""
    """An option that has to be below the number of images of a class in a batch."""
    own_weights: bool = False
    """It learns weights other than a head, such as proxies, so it cannot be a monitor."""


def _pml(name: str, summary: str, loss: str, own_weights: bool = False, **options: Any) -> Entry:
    """A loss of pytorch-metric-learning; options: our defaults."""
    return Entry(name, PML, summary, {"loss": loss, **options}, own_weights=own_weights)


def _proxies(name: str, summary: str, loss: str) -> Entry:
    """A loss of pytorch-metric-learning that compares images with learned weights."""
    return replace(_pml(name, summary, loss), compares=False, own_weights=True)


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
    ),
    Entry(
        "pce",
        "trainer.losses.pce:PairwiseCrossEntropy",
        "pairwise cross-entropy, related to ce; for --monitor rather than for training",
        compares=False,
        has_head=True,
    ),
    Entry(
        "group",
        "trainer.losses.group:Group",
        "Group Loss: refines class probabilities with the similarities in the batch",
        {"anchors": 2},
        has_head=True,
        below_images="anchors",
    ),
    Entry(
        "center",
        "trainer.losses.center:Center",
        "center loss: cross-entropy plus the squared distance to the class mean in the batch",
        has_head=True,
    ),
    Entry(
        "contrastive",
        "trainer.losses.contrastive:Contrastive",
        "squared distances of positive pairs, a squared margin for negative pairs",
    ),
    _pml(
        "triplet",
        "triplets: the negative must be farther than the positive by a margin",
        "TripletMarginLoss",
    ),
    _pml(
        "margin",
        "positive pairs below, negative pairs above a learned distance per class, with a margin",
        "MarginLoss",
        own_weights=True,
        learn_beta=True,
    ),
    _pml(
        "multi_similarity",
        "all pairs of the batch, with higher weights for harder pairs",
        "MultiSimilarityLoss",
    ),
    _proxies("proxy_nca", "NCA with one learned proxy per class", "ProxyNCALoss"),
    _proxies(
        "norm_softmax", "cross-entropy on cosines, with a temperature", "NormalizedSoftmaxLoss"
    ),
    _proxies(
        "soft_triple",
        "cross-entropy on the similarities to several learned centres per class",
        "SoftTripleLoss",
    ),
    _pml("n_pairs", "one positive against one negative per class", "NPairsLoss"),
    _pml("lifted", "each positive pair against all negatives", "LiftedStructureLoss"),
    _pml("angular", "limits the angle at the negative", "AngularLoss"),
    _pml(
        "snca",
        "scalable NCA: neighbours weighted by cosine / 0.05",
        "NCALoss",
        distance="CosineSimilarity",
        softmax_scale=20.0,
    ),
    _pml("nca", "neighbours weighted by squared distance", "NCALoss"),
    _pml("fastap", "average precision, approximated with histograms of distances", "FastAPLoss"),
    _pml(
        "ranked_list",
        "positives within a distance, negatives beyond it by a margin",
        "RankedListLoss",
        margin=0.4,
        Tn=5.0,
    ),
    _proxies("arcface", "cross-entropy on angles, with a margin", "ArcFaceLoss"),
    option="--loss",
    listed="losses",
    families={"pml": lambda name: _pml(f"pml:{name}", "a loss of the library", name)},
    own=lambda path: Entry(path, path, "a loss of your own"),
)


def build(name: str, num_classes: int, dim: int, /, **options: Any) -> "Loss":
    """Build a loss by its name, `pml:CLASS` of pytorch-metric-learning, or `module:CLASS`."""
    from trainer.losses.base import Loss

    entry = LOSSES.find(name)
    own = entry.path == name
    loss = registry.own_class("loss", entry, Loss) if own else entry.load()
    if entry.path == PML:
        from trainer.losses.pml import parameters_of

        parameters = parameters_of("loss", entry.defaults["loss"])
    else:
        parameters = options_of(loss)
    check_options(f"The loss {name!r}", options, parameters, entry.defaults, "loss.options")
    try:
        return loss(num_classes=num_classes, dim=dim, **{**entry.defaults, **options})
    except DmlError:
        raise
    except Exception as error:
        if not own:
            raise
        raise DmlError(
            f"The loss {name!r} cannot be built.",
            f"Its code raises {type(error).__name__}: {str(error).rstrip('.')}.",
            "Correct the class. The page docs/extending.md shows how to write one.",
        ) from error


def described(name: str, options: Mapping[str, Any]) -> Entry:
    """The entry of a loss; one outside the table is built, to see which weights it has."""
    entry = LOSSES.find(name)
    if ":" not in name:
        return entry
    from torch import nn

    loss = build(name, 4, 8, **options)
    has_head = isinstance(getattr(loss, "head", None), nn.Linear)
    own_weights = any(True for _ in loss.parameters()) and not has_head
    return replace(entry, has_head=has_head, own_weights=own_weights)


def check_monitors(names: Iterable[str], loss: str, options: Mapping[str, Any]) -> None:
    """Raise for the first name that cannot be logged beside the training loss of that name."""
    valid = [entry.name for entry in LOSSES if not entry.own_weights]
    for name in names:
        if ":" not in name and name not in LOSSES.names():
            raise registry.unknown("monitor", name, valid, "--monitor", ["pml:NAME"])
        monitor = described(name, {})
        if monitor.own_weights:
            raise DmlError(
                f"{name} cannot be a monitor.",
                "It has weights of its own, such as proxies, that only training with it changes.",
                f"Train with it, or log one of these: --monitor NAME, of {', '.join(valid)}.",
            )
        if monitor.has_head and not described(loss, options).has_head:
            raise DmlError(
                f"The monitor {name} needs a loss with a linear head.",
                f"The loss {loss!r} has none; these have one: {with_head()}.",
                f"Train with one of them, or leave {name} out of --monitor.",
            )


def with_head() -> str:
    """The names of the losses that have a linear head."""
    return ", ".join(entry.name for entry in LOSSES if entry.has_head)


def check_phase(epochs: int, loss: str, options: Mapping[str, Any]) -> None:
    """Raise if classification epochs are set and the loss has no head."""
    if epochs and not described(loss, options).has_head:
        raise DmlError(
            f"The loss {loss!r} has no head to classify with.",
            "The setting phase.epochs starts with plain cross-entropy on it.",
            "Use --set phase.epochs=0, or --loss group.",
        )
