"""The types of the table of backbones: an entry, and the network that is built of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from retrieval import registry

if TYPE_CHECKING:
    from torch import nn

Colours = tuple[float, float, float]
IMAGENET: tuple[Colours, Colours] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Entry(registry.Entry):
    """A backbone. Its path leads to a function (entry, weights, image size) -> Backbone."""

    features: int = 0
    """F, the number of features of an image; 0: known once it is built."""
    head: str = ""
    """The classifier in torchvision's network, as a dotted path; it is left out."""
    smallest: int = 1
    """The least number of pixels of a side of an image."""
    patch: int = 0
    """Images have a fixed size, a multiple of this."""
    normalisation: tuple[Colours, Colours] = IMAGENET
    """Mean and standard deviation of the images that it was trained on."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of torchvision's constructor."""
    also_removed: tuple[str, ...] = ()
    """Further parts of the classifier, by name."""
    renamed: tuple[str, str] = ("", "")
    """Names of tensors in torchvision's file that its code has changed: pattern, replacement."""
    check: str = ""
    """The dotted path of a function that raises if the library has no network of this name."""


class Backbone(NamedTuple):
    """A network without its classifier, and how its input is normalised."""

    module: "nn.Module"
    features: int
    mean: Colours
    std: Colours
    notes: tuple[str, ...]
    """What the user should know, such as parts of a file that were left out."""
