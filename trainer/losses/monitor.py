"""Losses that are watched beside the one that trains: SPCE, and the PCE behind cross-entropy.

They see the embeddings of a training step and change nothing: no gradient, no random numbers.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from retrieval.errors import DmlError
from trainer.losses import LOSSES, PML, build


class Monitors:
    """`notes` fills with what a reader of the values has to know, each once."""

    def __init__(self, watched: dict[str, nn.Module], head: nn.Linear | None) -> None:
        self.watched = watched
        self.head = head
        self.notes: list[str] = []
        self.told = 0

    @torch.no_grad()
    def measure(self, embeddings: Tensor, labels: Tensor) -> dict[str, float]:
        """Values by name, the whole of a loss and its parts: spce, spce/tightness, ...

        NaN embeddings give NaN: to stop is not for those who watch.
        """
        embeddings = embeddings.detach().float()
        values: dict[str, float] = {}
        for name, loss in self.watched.items():
            extra = {"head": self.head} if name == "pce" else {}
            try:
                parts = {k: v.item() for k, v in loss.parts(embeddings, labels, **extra).items()}
            except torch.linalg.LinAlgError:
                parts = dict.fromkeys(("tightness", "contrastive"), math.nan)
            values[name] = sum(parts.values())
            values |= {f"{name}/{part}": value for part, value in parts.items()}
            if name == "pce":
                known = math.isfinite(values[name])
                values["pce/lambda"] = loss.smallest if known else math.nan
                if known and loss.note and not self.notes:
                    self.notes.append(loss.note)
        return values

    def news(self) -> list[str]:
        """Notes since the last call."""
        new, self.told = self.notes[self.told :], len(self.notes)
        return new


def build_monitors(names: Iterable[str], num_classes: int, dim: int, loss: nn.Module) -> Monitors:
    """`pce` takes its probabilities from the head of `loss`, the one that trains."""
    names = list(names)
    head = getattr(loss, "head", None)
    if "pce" in names and not isinstance(head, nn.Linear):
        raise DmlError(
            "The monitor pce needs a loss with a linear head.",
            f"{type(loss).__name__} has none; these have one: {', '.join(with_head())}.",
            "Train with one of them, or leave pce out of loss.monitor.",
        )
    with torch.random.fork_rng(devices=[]):  # watching must not change what is drawn later
        watched = {name: build(name, num_classes, dim) for name in names}
    if "pce" in watched:
        watched["pce"].warn = False  # its note is passed on instead
    return Monitors(watched, head)


def with_head() -> list[str]:
    ours = {entry.name: build(entry.name, 2, 2) for entry in LOSSES if entry.path != PML}
    return [name for name, loss in ours.items() if isinstance(getattr(loss, "head", 0), nn.Linear)]
