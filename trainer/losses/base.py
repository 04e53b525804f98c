"""The base class of our losses: float32 under autocast, and a value that is a sum of parts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from retrieval.errors import DmlError
from retrieval.settings import either

T = TypeVar("T")
Number = TypeVar("Number", bound=float)


class Loss(nn.Module, ABC):
    """Subclasses give `split`; it sees float32 (or float64) embeddings and no autocast."""

    note = ""
    """What has to be known to read the last value, if anything."""
    warn = True
    """Whether the first note is a warning as well."""

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        self.num_classes = require(num_classes >= 1, "num_classes", num_classes, "1 or more")
        self.dim = require(dim >= 1, "dim", dim, "1 or more")

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return total(self.parts(embeddings, labels))

    def parts(self, embeddings: Tensor, labels: Tensor, **extra: Any) -> dict[str, Tensor]:
        """The summands of the loss, by name."""
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.split(full_precision(embeddings), labels, **extra)

    @abstractmethod
    def split(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Compute the summands of the loss in float32; every loss defines it."""

    def further_values(self) -> dict[str, float]:
        """Values of the last batch that are not summands of the loss, for monitors."""
        return {}


def total(parts: Mapping[str, Tensor]) -> Tensor:
    """The loss, which is the sum of its parts."""
    return sum(parts.values(), torch.zeros(()))


def full_precision(embeddings: Tensor) -> Tensor:
    """Half precision as float32. Float64 stays: gradients are checked in it."""
    return embeddings if embeddings.dtype == torch.float64 else embeddings.float()


def with_length(embeddings: Tensor, length: float) -> Tensor:
    """The embeddings (B, D) scaled to this length; 0 leaves them as they are."""
    return length * nn.functional.normalize(embeddings) if length else embeddings


def require(holds: bool, option: str, value: T, accepted: str) -> T:
    """The value of an option; DmlError unless the condition holds."""
    if not holds:
        raise DmlError(
            f"The loss option {option} cannot be {value!r}.",
            f"{option} is {accepted}.",
            f"Give another value, or leave it out for its default: --set loss.options.{option}=...",
        )
    return value


def not_negative(option: str, value: Number) -> Number:
    """The value of an option that is 0 or more."""
    return require(value >= 0, option, value, "0 or more")


def one_of(choices: Sequence[str], option: str, value: str) -> str:
    """The value of an option that has a few choices."""
    return require(value in choices, option, value, either(tuple(map(repr, choices))))
