"""Losses that are logged in addition to the training loss, such as PCE with cross-entropy.

They see the embeddings of a training step and change nothing: no gradient, no random numbers.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainer.losses import build
from trainer.losses.base import Loss


class Monitors:
    """Losses to compute on training batches; `notes` gets at most one for each of them."""

    def __init__(self, watched: dict[str, Loss]) -> None:
        self.watched = watched
        self.notes: list[str] = []
        self.noted: set[str] = set()

    @torch.no_grad()
    def measure(self, embeddings: Tensor, labels: Tensor) -> dict[str, float]:
        """Values by name, the whole of a loss and its parts: spce, spce/tightness, ...

        What cannot be computed is NaN: monitors never abort training.
        """
        embeddings = embeddings.detach().float()
        sound = bool(embeddings.isfinite().all())
        gpu = [embeddings.device] if embeddings.device.type == "cuda" else []
        values: dict[str, float] = {}
        for name, loss in self.watched.items():
            parts, note = {"": math.nan}, ""
            with torch.random.fork_rng(gpu):  # some draw random numbers, such as anchors
                try:
                    found = loss.parts(embeddings, labels)
                    parts, note = {k: v.item() for k, v in found.items()}, loss.note
                except Exception as error:  # of a library, for a batch that it does not expect
                    note = f"the monitor {name} cannot be computed: {error}"
            values[name] = total = sum(parts.values())
            further = loss.further_values()
            if not math.isfinite(total):
                further = dict.fromkeys(further, math.nan)
            if sound and note and name not in self.noted:
                self.notes.append(note)
                self.noted.add(name)
            named = (parts if len(parts) > 1 else {}) | further
            values |= {f"{name}/{part}": value for part, value in named.items()}
        return values


def build_monitors(names: Iterable[str], num_classes: int, dim: int, loss: Loss) -> Monitors:
    """Build the named losses; those with a head take that of `loss`, the one that trains."""
    with torch.random.fork_rng(devices=[]):  # a monitor must not change what is drawn later
        watched = {name: build(name, num_classes, dim) for name in names}
    for monitor in watched.values():
        if isinstance(getattr(monitor, "head", None), nn.Linear):
            monitor.head = loss.head
        monitor.eval()  # no dropout
        monitor.warn = False  # its note is passed on instead
    return Monitors(watched)
