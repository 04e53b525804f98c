"""Pictures for the tests of how images are read, kept and batched."""

from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from trainer.config import Input
from trainer.data import images, sampling
from trainer.data.loading import Loader

SPEC = Input(resize=40, crop=32, jitter=(0.2, 0.2, 0.2, 0.1), rotate=8.0, shift=0.05)
STILL = Input(resize=40, crop=32, train_crop="center", flip=False)


@dataclass(frozen=True)
class Squares:
    """Pictures that are not files, of one size."""

    side: int = 36

    def __call__(self, path, short_side=None):
        return np.random.default_rng(int(path)).integers(
            0, 256, (self.side, self.side, 3), dtype=np.uint8
        )


def epochs(source, workers=0, count=2, size=4):
    """All images and targets of some epochs, and the worker processes."""
    rows, targets = source.data.rows("train"), source.data.targets("train")
    out = []
    with closing(Loader(source, rows, targets, workers)) as loader:
        for epoch in range(count):
            plan = sampling.random_batches(len(rows), size, 0, epoch)
            out += list(loader.epoch(plan, sampling.keys(0, epoch, *plan.shape)))
    return torch.cat([batch for batch, _ in out]), torch.cat([labels for _, labels in out])


def spoil(data, *rows):
    for row in rows:
        file = data.root / data.paths[row]
        file.write_bytes(file.read_bytes()[:60])


def forbid_reading(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("an image was read")

    monkeypatch.setattr(images, "read_rgb", forbidden)
