"""Train one epoch, and record the means of its losses."""

import time

import numpy as np
import torch
from torch import Tensor, nn

from retrieval.distributed.world import World
from retrieval.errors import DmlError
from trainer.config import Config
from trainer.data import sampling
from trainer.losses.base import Loss, total, with_length
from trainer.results import EpochMeans
from trainer.run import distributed, optimizers
from trainer.run.device import precision, to_input
from trainer.run.state import Training

MONITORED_STEPS = 20  # an epoch


def train_epoch(training: Training, epoch: int) -> EpochMeans:
    """Pass once over the training images; return the means for metrics.jsonl."""
    config, world = training.config, training.world
    start_phase(training, epoch)
    plan = epoch_plan(config, training.targets, epoch)
    keys = sampling.keys(config.run.seed, epoch, *plan.shape)
    augmented = config.phase.augment or epoch >= config.phase.epochs
    own_keys = own_columns(keys, world) if augmented else None
    torch.manual_seed(sampling.mix(config.run.seed, epoch))  # dropout and anchors; on every rank
    training.model.train()
    training.loss.train()
    meter = Meter(training, epoch, *plan.shape)
    others = steps_of_phase(config, training.targets, epoch)
    for step, (images, targets) in enumerate(
        training.loader.epoch(own_columns(plan, world), own_keys)
    ):
        factor = optimizers.rate(config.schedule, epoch * len(plan) + step, len(plan), others)
        optimizers.set_rate(training.optimizer, factor)
        meter.add(step, *train_step(training, images, targets, epoch))
    return meter.means()


def train_step(
    training: Training, images: Tensor, targets: Tensor, epoch: int
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Update the weights by one batch; return the loss and its parts, the embeddings and labels."""
    config, device, scaler = training.config, training.device, training.scaler
    half = precision(config, device)
    with torch.autocast(device.type, half or torch.bfloat16, enabled=half is not None):
        embeddings = training.model(to_input(images, device))
    targets = targets.to(device, non_blocking=True)
    embeddings = with_length(embeddings.float(), config.loss.length)
    batch = distributed.gather_batch(embeddings, targets, training.world)
    if epoch < config.phase.epochs:
        parts = {"ce": classification(training.loss, *batch)}
    else:
        parts = training.loss.parts(*batch)
    loss = total(parts)
    training.optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    distributed.average_gradients(training.loss, training.world)
    clip = config.optimizer_in(epoch).clip
    if clip:
        scaler.unscale_(training.optimizer)
        everything = [p for g in training.optimizer.param_groups for p in g["params"]]
        nn.utils.clip_grad_norm_(everything, clip)
    scaler.step(training.optimizer)
    scaler.update()
    return {k: v.detach() for k, v in {"loss": loss, **parts}.items()}, batch


def start_phase(training: Training, epoch: int) -> None:
    """Change to a new optimiser where the first phase ends, if that had settings of its own."""
    phase = training.config.phase
    if phase.optimizer and 0 < phase.epochs == epoch:
        spec = training.config.optimizer
        training.optimizer = optimizers.build(spec, training.embedder, training.loss)


def epoch_plan(config: Config, targets: np.ndarray, epoch: int) -> np.ndarray:
    """The batches of an epoch: (steps, B) positions among the training rows."""
    batches, seed = config.batches, config.run.seed
    first = phase_batches(config, epoch)
    if batches.classes and not first:
        return sampling.balanced_batches(
            targets,
            batches.classes,
            batches.images,
            seed,
            epoch,
            equally=batches.sampling == "classes",
        )
    size = config.phase.batch if first else batches.size
    return sampling.random_batches(len(targets), size, seed, epoch)


def steps_of_phase(config: Config, targets: np.ndarray, epoch: int) -> tuple[int, int]:
    """Steps that a first phase with batches of another size adds: before an epoch, and in the run.

    They are counted relative to a run in which all epochs have the batches of this epoch.
    """
    epochs, first = config.schedule.epochs, config.phase.epochs
    if not (first and config.phase.batch) or first >= epochs:
        return 0, 0
    short, long = (len(epoch_plan(config, targets, each)) for each in (0, first))
    if epoch < first:
        return 0, (epochs - first) * (long - short)
    return first * (short - long), first * (short - long)


def phase_batches(config: Config, epoch: int) -> bool:
    """Whether the batches of an epoch are those of the first phase, of phase.batch images."""
    return bool(config.phase.batch) and epoch < config.phase.epochs


def check_shares(config: Config, targets: np.ndarray, epoch: int, world: World) -> None:
    """Raise if the processes cannot take equal parts of the batches of an epoch."""
    size = epoch_plan(config, targets, epoch).shape[1]
    if size % world.size == 0:
        return
    setting = " (of CxM, one of C and M): --batch N|CxM"
    if phase_batches(config, epoch):
        setting = ": --set phase.batch=N"
    raise DmlError(
        f"A batch of {size} images cannot be shared by {world.size} processes.",
        "Each takes the same number.",
        f"Use a number that {world.size} divides{setting}.",
    )


def own_columns(plan: np.ndarray, world: World) -> np.ndarray:
    """The columns of each batch that this process takes."""
    own = plan.shape[1] // world.size
    return plan[:, world.rank * own : (world.rank + 1) * own]


def classification(loss: Loss, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Plain cross-entropy on the head of another loss."""
    with torch.autocast(embeddings.device.type, enabled=False):
        return nn.functional.cross_entropy(loss.get_submodule("head")(embeddings), labels)


class Meter:
    """Means over an epoch. Values are fetched from a GPU every 20 steps, since fetching waits."""

    def __init__(self, training: Training, epoch: int, steps: int, batch: int) -> None:
        self.training, self.epoch, self.steps, self.batch = training, epoch, steps, batch
        self.every = 1 if training.device.type == "cpu" else 20
        self.monitor_every = max(1, steps // MONITORED_STEPS)
        self.pending: list[dict[str, Tensor]] = []
        self.sums: dict[str, float] = {}
        self.monitored: dict[str, list[float]] = {}
        self.done = 0
        self.began = time.perf_counter()

    def add(self, step: int, values: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> None:
        """Note the values of a step; measure the monitors every so many steps."""
        self.pending.append(values)
        if self.training.monitors and step % self.monitor_every == 0:
            for name, value in self.training.monitors.measure(*batch).items():
                self.monitored.setdefault(name, []).append(value)
            while self.training.monitors.notes:
                self.training.watch.note(self.training.monitors.notes.pop(0))
        if len(self.pending) == self.every or step == self.steps - 1:
            self.flush()

    def flush(self) -> None:
        """Fetch the pending values, add them up and report the last of them."""
        names = list(self.pending[0])
        values = torch.stack([torch.stack([p[n].float() for n in names]) for p in self.pending])
        for row in values.tolist():
            self.done += 1
            if not np.isfinite(row[0]):
                raise self.training.diverged(
                    f"The loss is {row[0]} at step {self.done:,} of {self.steps:,} in epoch "
                    f"{self.epoch + 1}."
                )
            for name, value in zip(names, row, strict=True):
                self.sums[name] = self.sums.get(name, 0.0) + value
        self.pending.clear()
        shown = dict(zip(names, row, strict=True))
        shown["images_per_second"] = self.images_per_second()
        self.training.watch.step(self.epoch + 1, self.done, self.steps, shown)

    def images_per_second(self) -> float:
        """The speed of the epoch so far."""
        images = self.done * self.batch
        return images / max(time.perf_counter() - self.began, 1e-9)

    def means(self) -> EpochMeans:
        """The means of the epoch, as metrics.jsonl keeps them."""
        means = {name: total / self.done for name, total in self.sums.items()}
        return {
            "epoch": self.epoch + 1,
            "loss": means.pop("loss"),
            "parts": means,
            "monitor": {name: float(np.mean(v)) for name, v in self.monitored.items()},
            "seconds": time.perf_counter() - self.began,
            "images_per_second": self.images_per_second(),
            "lr": self.training.optimizer.param_groups[0]["lr"],
        }
