"""The state of a run: the parts that training changes, and what a checkpoint keeps of them."""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from retrieval.distributed.world import World
from retrieval.errors import DmlError
from retrieval.run_files import LAST
from trainer.config import Config
from trainer.data.datasets import DataSet
from trainer.data.images import WHITE
from trainer.data.loading import Loader
from trainer.data.source import Source
from trainer.losses.base import Loss
from trainer.losses.monitor import Monitors
from trainer.networks.embedder import Embedder
from trainer.results import Best, EpochRecord
from trainer.run import metrics_log
from trainer.run.optimizers import saved_state
from trainer.run.watch import Watch
from trainer.trackers import Trackers

Embedded = tuple[np.ndarray, np.ndarray, int | None]
"""Embeddings, labels and, where queries follow the gallery, its number of rows."""


@dataclass
class Job:
    """What to train, in which folder, on which device, and the interface that reports it."""

    config: Config
    folder: Path
    world: World
    device: torch.device
    watch: Watch


@dataclass
class Training(Job):
    """A run that has been prepared: everything that its steps need and change."""

    source: Source
    targets: np.ndarray  # (n,) of the training rows, 0 .. C-1
    embedder: Embedder
    model: nn.Module  # the embedder, maybe compiled and wrapped for several processes
    loss: Loss
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loader: Loader
    monitors: Monitors | None = None
    trackers: Trackers | None = None  # of the first process
    epoch: int = 0  # finished so far
    best: Best | None = None
    best_vectors: Embedded | None = None  # of the best epoch's validation, if of this process
    records: list[EpochRecord] = field(default_factory=list)

    def diverged(self, what: str) -> DmlError:
        """The error for an epoch that has ruined the network, before a checkpoint keeps it."""
        return DmlError(
            what,
            f"Training has diverged. {self.folder / LAST} holds the end of epoch {self.epoch}, "
            "which was sound.",
            "Start again with a smaller --lr, or with --set optimizer.clip=1.",
        )

    def close(self) -> None:
        """End worker processes and draw the curves."""
        self.loader.close()
        if self.trackers:
            self.trackers.close(finished=self.epoch >= self.config.schedule.epochs)
        if self.world.rank == 0:
            with suppress(DmlError, OSError):  # a full disk has been reported already
                metrics_log.draw_curves(self.folder, self.records)


def saved(training: Training) -> dict[str, Any]:
    """The content of a checkpoint: what a run needs to continue and an export needs to start."""
    data = training.source.data
    return {
        "epoch": training.epoch,
        "config": training.config.to_dict(),
        "embedder": training.embedder.state_dict(),
        "loss": training.loss.state_dict(),
        "optimizer": saved_state(training.optimizer),
        "scaler": training.scaler.state_dict(),
        "threads": torch.get_num_threads(),
        "processes": training.world.size,
        "label_names": [data.label_names[c] for c in data.classes("train")],
        "data_sha256": fingerprint(data),
        "preprocessing": training.embedder.preprocessing | preprocessing(training.config),
        "versions": metrics_log.versions(),
        "best": training.best or {},
    }


def preprocessing(config: Config) -> dict[str, Any]:
    """What turns an image file into what the network sees, apart from mean and std."""
    names = ("resize", "keep_ratio", "crop", "interpolation", "draft")
    fixed = {"antialias": True, "background": list(WHITE)}
    return {name: getattr(config.input, name) for name in names} | fixed


def fingerprint(data: DataSet) -> str:
    """A hash of paths, labels and splits; not of pixels, nor of where the data set lies."""
    digest = hashlib.sha256()
    for text in (*data.paths, "", *data.label_names):
        digest.update(os.fsencode(text) + b"\0")
    digest.update(data.labels.tobytes() + data.splits.tobytes())
    return digest.hexdigest()
