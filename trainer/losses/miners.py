"""The table of miners, which choose the pairs or triplets of a batch that a loss sees.

All are those of pytorch-metric-learning, and so are the losses that take them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from retrieval.errors import DmlError
from retrieval.registry import Registry
from trainer.losses import LOSSES, PML, Entry, build
from trainer.parameters import check_options

if TYPE_CHECKING:
    from torch import nn

PATH = "trainer.losses.pml:build_miner"


def _miner(name: str, summary: str, miner: str, **options: Any) -> Entry:
    return Entry(name, PATH, summary, {"miner": miner, **options})


MINERS = Registry(
    "miner",
    _miner(
        "multi_similarity",
        "drops negatives farther than the hardest positive by epsilon, and vice versa",
        "MultiSimilarityMiner",
    ),
    _miner(
        "semihard",
        "triplets whose negative is farther than the positive, within the margin",
        "TripletMarginMiner",
        type_of_triplets="semihard",
    ),
    _miner(
        "batch_hard", "the farthest positive and nearest negative of each image", "BatchHardMiner"
    ),
    _miner(
        "distance_weighted",
        "negatives drawn so that all distances are equally likely",
        "DistanceWeightedMiner",
    ),
    _miner(
        "easy_positive",
        "the nearest positive of each image with a semi-hard negative",
        "BatchEasyHardMiner",
    ),
    _miner("pair_margin", "pairs that violate a margin", "PairMarginMiner"),
    _miner("angular", "triplets whose angle at the negative is large", "AngularMiner"),
    _miner("hdc", "the hardest fraction of positive and negative pairs", "HDCMiner"),
    _miner("histogram", "pairs drawn evenly over bins of their distance", "UniformHistogramMiner"),
    option="--miner",
    listed="miners",
    families={"pml": lambda name: _miner(f"pml:{name}", "a miner of the library", name)},
)


def check(
    name: str,
    options: Mapping[str, Any],
    miner: str = "",
    miner_options: Mapping[str, Any] | None = None,
) -> None:
    """Raise for a loss, miner or option that does not exist; a name of the table needs no torch."""
    if not (options or miner or ":" in name):
        LOSSES.find(name)
        return
    loss = build(name, 4, 8, **options)
    if miner:
        add_miner(loss, name, miner, miner_options or {})


def add_miner(loss: "nn.Module", loss_name: str, name: str, options: Mapping[str, Any]) -> None:
    """Let a loss see only what the miner of that name chooses; the miner is tried once."""
    import torch

    from trainer.losses.pml import MetricLearning, parameters_of, refused

    entry = MINERS.find(name)
    if not isinstance(loss, MetricLearning):
        raise takes_no_miner(loss_name, "It uses all images of a batch.")
    parameters = parameters_of("miner", entry.defaults["miner"])
    check_options(f"The miner {name!r}", options, parameters, entry.defaults, "loss.miner_options")
    loss.miner = entry.load()(**{**entry.defaults, **options})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        batch = torch.randn(8, loss.dim), torch.arange(8) % min(loss.num_classes, 4)
        try:
            loss.parts(*batch)
        except (ValueError, TypeError, AssertionError) as error:
            raise takes_no_miner(loss_name, f"{error}.") from error
        except Exception as error:  # such as of an empty list, whatever the library made of it
            given = {f"loss.miner_options.{key}": value for key, value in options.items()}
            raise refused(f"The miner {name!r}", given, error) from error


def takes_no_miner(loss: str, why: str) -> DmlError:
    """The error for a loss that has no use for pairs."""
    some = [entry.name for entry in LOSSES if entry.path == PML and entry.compares][:3]
    return DmlError(
        f"The loss {loss!r} takes no miner.",
        why,
        f"Leave --miner out, or choose a loss of pairs or triplets: {', '.join(some)}.",
    )
