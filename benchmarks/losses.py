"""python -m benchmarks.losses [step | alone ...]: what the losses cost, into RESULTS.md.

step: a training step of resnet18 with ce, group and spce. alone: the losses by themselves.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.measure import machine, record, table
from trainer.config import Optimizer
from trainer.losses import build
from trainer.optimizers import build as build_optimizer
from trainer.vision import torchvision

PACKAGES = ("torch", "torchvision")
NAMES = ("ce", "group", "spce")
D = 512


class Plain(nn.Module):
    """What one would write without dmltool: a linear layer and torch's cross-entropy."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(D, num_classes)

    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(embeddings), labels, label_smoothing=0.1)


@dataclass
class Times:
    """Seconds of each round: by the clock, and of this process on all cores."""

    clock: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)


def rounds(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
    """Every round starts with another contender."""
    names = list(contenders)
    times = {name: Times() for name in names}
    for n in range(-1, repeats):  # the first warms up
        turn = n % len(names)
        for name in names[turn:] + names[:turn]:
            clock, cores = time.perf_counter(), time.process_time()
            contenders[name]()
            if n >= 0:
                times[name].clock.append(time.perf_counter() - clock)
                times[name].cores.append(time.process_time() - cores)
    return times


def paired(seconds: list[float], base: list[float]) -> str:
    """Median of the ratio within a round: what else runs disturbs both alike."""
    return f"{statistics.median(a / b for a, b in zip(seconds, base, strict=True)):.3f}"


def balanced(size: int, classes: int) -> torch.Tensor:
    return torch.arange(size) % classes


def training_step(name: str, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
    network = torchvision.models.resnet18().to(memory_format=torch.channels_last)
    network.fc = nn.Identity()
    loss = build(name, num_classes=100, dim=D)
    settings = Optimizer(name="sgd", lr=1e-3, momentum=0.9, weight_decay=5e-4)
    optimizer = build_optimizer(settings, network, loss)

    def run() -> None:
        optimizer.zero_grad()
        loss(network(images), labels).backward()
        optimizer.step()

    return run


def loss_step(loss: nn.Module, embeddings: torch.Tensor, labels: torch.Tensor) -> Callable:
    def run() -> None:
        loss.zero_grad()
        loss(embeddings.detach().requires_grad_(), labels).backward()

    return run


def step(repeats: int = 9) -> None:
    labels = balanced(64, 8)
    side, steps = fitting(labels)
    times = rounds(steps, repeats)
    z = torch.randn(64, D)
    own = rounds({name: loss_step(build(name, 100, D), z, labels) for name in NAMES}, 101)
    base = statistics.median(times["ce"].clock)
    least = statistics.median(own["ce"].clock)
    rows = []
    for name in NAMES:
        alone = statistics.median(own[name].clock)
        rows.append(
            [
                name,
                f"{statistics.median(times[name].clock):.2f}",
                paired(times[name].clock, times["ce"].clock),
                f"{statistics.median(times[name].cores):.2f}",
                paired(times[name].cores, times["ce"].cores),
                f"{1000 * alone:.1f}",
                f"{100 * (alone - least) / base:+.2f} %",
            ]
        )
    header = ["", "step, s", "ratio", "step, CPU s", "ratio", "loss alone, ms", "beyond ce"]
    spread = ", ".join(f"{n} {min(t.clock):.2f} to {max(t.clock):.2f}" for n, t in times.items())
    record(
        "Cost of the losses",
        f"{machine(*PACKAGES)}, {torch.get_num_threads()} threads. A step of resnet18 at "
        f"{side}x{side}, batch 64 (8 classes x 8), 100 classes, 512 dimensions: forward, backward "
        f"and SGD. The losses take turns in one run, {repeats} rounds; medians, and medians of the "
        "ratios within a round. The loss alone is its forward and backward on given embeddings; "
        "the last column is its time beyond that of ce as a share of a step with ce. Goal: at most "
        f"10 %.\n\n{table(header, rows)}\nSteps from the fastest to the slowest: {spread} s.",
    )


def fitting(labels: torch.Tensor) -> tuple[int, dict[str, Callable[[], object]]]:
    """Steps on images of 224x224 where one takes less than 15 s, else of 112x112."""
    for side in (224, 112):
        torch.manual_seed(0)
        images = torch.rand(len(labels), 3, side, side).to(memory_format=torch.channels_last)
        steps = {name: training_step(name, images, labels) for name in NAMES}
        start = time.perf_counter()
        steps["ce"]()
        if time.perf_counter() - start < 15:
            break
    return side, steps


def alone(repeats: int = 41) -> None:
    rows = []
    for classes, size in ((100, 64), (11_318, 60), (11_318, 128)):
        torch.manual_seed(0)
        z, labels = torch.randn(size, D), balanced(size, size // 6)
        losses = {"torch: Linear, cross_entropy": Plain(classes)}
        losses |= {name: build(name, classes, D) for name in NAMES}
        times = rounds({n: loss_step(loss, z, labels) for n, loss in losses.items()}, repeats)
        for name, t in times.items():
            middle = f"{1000 * statistics.median(t.clock):.1f}"
            cores = f"{1000 * statistics.median(t.cores):.1f}"
            rows.append(
                [f"{classes:,}", size, name, middle, paired(t.clock, times["ce"].clock), cores]
            )
    record(
        "The losses alone",
        f"{machine(*PACKAGES)}, {torch.get_num_threads()} threads. Forward and backward on given "
        f"embeddings of 512 dimensions, in turns, medians of {repeats}; 11,318 is the number of "
        "classes of Stanford Online Products. ce draws dropout and smooths labels; group adds ce "
        "to the refined probabilities; spce has no head.\n\n"
        + table(["classes", "batch", "", "ms", "ratio to ce", "CPU ms"], rows),
    )


SECTIONS = {"step": step, "alone": alone}

if __name__ == "__main__":
    for section in sys.argv[1:] or SECTIONS:
        SECTIONS[section]()
