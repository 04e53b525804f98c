"""Losses computed beside the one that trains, such as the PCE behind cross-entropy.

They see the embeddings of a training step and change nothing: no gradient, no random numbers.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from retrieval.errors import DmlError
from trainer.losses import LOSSES, build
from trainer.losses.base import Loss


class Monitors:
    """Losses to compute on training batches; `notes` has at most one for each of them."""

    def __init__(self, watched: dict[str, Loss], head: nn.Linear | None) -> None:
        self.watched = watched
        self.head = head
        self.notes: list[str] = []
        self.noted: set[str] = set()
        self.told = 0

    @torch.no_grad()
    def measure(self, embeddings: Tensor, labels: Tensor) -> dict[str, float]:
        """Values by name, the whole of a loss and its parts: spce, spce/tightness, ...

        NaN embeddings give NaN: monitors never abort training.
        """
        embeddings = embeddings.detach().float()
        values: dict[str, float] = {}
        for name, loss in self.watched.items():
            extra = {"head": self.head} if LOSSES.find(name).needs_head else {}
            try:
                parts = {k: v.item() for k, v in loss.parts(embeddings, labels, **extra).items()}
            except torch.linalg.LinAlgError:
                parts = dict.fromkeys(("tightness", "contrastive"), math.nan)
            values[name] = total = sum(parts.values())
            further = loss.further_values()
            if not math.isfinite(total):
                further = dict.fromkeys(further, math.nan)
            elif loss.note and name not in self.noted:
                self.notes.append(loss.note)
                self.noted.add(name)
            values |= {f"{name}/{part}": value for part, value in (parts | further).items()}
        return values

    def news(self) -> list[str]:
        """Notes since the last call."""
        new, self.told = self.notes[self.told :], len(self.notes)
        return new


def build_monitors(names: Iterable[str], num_classes: int, dim: int, loss: nn.Module) -> Monitors:
    """Build the named losses; some take their probabilities from the head of `loss`."""
    names = list(names)
    head = getattr(loss, "head", None)
    lacking = [name for name in names if LOSSES.find(name).needs_head]
    if lacking and not isinstance(head, nn.Linear):
        with_head = ", ".join(entry.name for entry in LOSSES if entry.has_head)
        raise DmlError(
            f"The monitor {lacking[0]} needs a loss with a linear head.",
            f"{type(loss).__name__} has none; these have one: {with_head}.",
            f"Train with one of them, or leave {lacking[0]} out of loss.monitor.",
        )
    with torch.random.fork_rng(devices=[]):  # a monitor must not change what is drawn later
        watched = {name: build(name, num_classes, dim) for name in names}
    for monitor in watched.values():
        monitor.warn = False  # its note is passed on instead
    return Monitors(watched, head)
