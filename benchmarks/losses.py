"""python -m benchmarks.losses [step | step112 | alone ...]: what losses cost, into RESULTS.md.

step: a training step of resnet18 with ce, group and spce, on images of 224x224 unless the number
says otherwise. alone: the losses by themselves. By the clock, on all cores: nothing else may run.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from operator import truediv

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.measure import machine, record, table
from trainer.config import Optimizer
from trainer.losses import build
from trainer.networks.vision import torchvision
from trainer.run.optimizers import build as build_optimizer

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


def rounds(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, list]:
    """What each contender gives in each round; every round starts with another one."""
    names = list(contenders)
    found: dict[str, list] = {name: [] for name in names}
    for n in range(-1, repeats):  # the first warms up
        turn = n % len(names)
        for name in names[turn:] + names[:turn]:
            result = contenders[name]()
            if n >= 0:
                found[name].append(result)
    return found


def balanced(size: int, classes: int) -> torch.Tensor:
    return torch.arange(size) % classes


def training_step(name: str, images: torch.Tensor, labels: torch.Tensor) -> Callable:
    """A step that gives its seconds, and those of the loss and its gradient in it."""
    network = torchvision.models.resnet18().to(memory_format=torch.channels_last)
    network.fc = nn.Identity()
    loss = build(name, 100, D)
    settings = Optimizer(name="sgd", lr=1e-3, momentum=0.9, weight_decay=5e-4)
    optimizer = build_optimizer(settings, network, loss)

    def run() -> tuple[float, float]:
        start = time.perf_counter()
        optimizer.zero_grad()
        embeddings = network(images)
        before = time.perf_counter()
        given = embeddings.detach().requires_grad_()
        loss(given, labels).backward()
        after = time.perf_counter()
        embeddings.backward(given.grad)
        optimizer.step()
        return time.perf_counter() - start, after - before

    return run


def loss_step(loss: nn.Module, embeddings: torch.Tensor, labels: torch.Tensor) -> Callable:
    def run() -> float:
        start = time.perf_counter()
        loss.zero_grad()
        loss(embeddings.detach().requires_grad_(), labels).backward()
        return time.perf_counter() - start

    return run


def step(side: int, repeats: int = 7) -> None:
    torch.manual_seed(0)
    images = torch.rand(64, 3, side, side).to(memory_format=torch.channels_last)
    labels = balanced(64, 8)
    found = rounds({name: training_step(name, images, labels) for name in NAMES}, repeats)
    whole = {name: [seconds for seconds, _ in found[name]] for name in NAMES}
    own = {name: statistics.median(seconds for _, seconds in found[name]) for name in NAMES}
    base = statistics.median(whole["ce"])
    rows = [
        [
            name,
            f"{statistics.median(whole[name]):.2f}",
            f"{min(whole[name]):.2f} to {max(whole[name]):.2f}",
            f"{statistics.median(map(truediv, whole[name], whole['ce'])):.3f}",
            f"{1000 * own[name]:.1f}",
            f"{100 * (own[name] - own['ce']) / base:+.2f} %",
        ]
        for name in NAMES
    ]
    header = ["", "step, s", "range, s", "relative to ce", "loss alone, ms", "added to the step"]
    record(
        "Cost of the losses",
        f"{machine(*PACKAGES)}. One training step of resnet18 at {side}x{side}, batch 64 (8 "
        "classes x 8 images), 100 classes, 512 dimensions: forward, backward and SGD. The losses "
        f"take turns for {repeats} rounds; the table shows medians, and the median over the rounds "
        "of the ratio to ce. The last column is the additional time of the loss and its gradient, "
        "compared with ce, as a percentage of the step. "
        f"Goal: at most 10 %.\n\n{table(header, rows)}",
    )


def alone(repeats: int = 41) -> None:
    rows = []
    for classes, size in ((100, 64), (11_318, 60), (11_318, 128)):
        torch.manual_seed(0)
        z, labels = torch.randn(size, D), balanced(size, size // 6)
        losses = {"torch: Linear, cross_entropy": Plain(classes)}
        losses |= {name: build(name, classes, D) for name in NAMES}
        found = rounds({n: loss_step(loss, z, labels) for n, loss in losses.items()}, repeats)
        for name, seconds in found.items():
            ratio = statistics.median(map(truediv, seconds, found["ce"]))
            middle = 1000 * statistics.median(seconds)
            rows.append([f"{classes:,}", size, name, f"{middle:.1f}", f"{ratio:.2f}"])
    record(
        "The losses alone",
        f"{machine(*PACKAGES)}. Forward and backward of the loss alone, on given embeddings "
        f"of 512 dimensions. The losses take turns; medians of {repeats}. 11,318 is the number of "
        "classes of Stanford Online Products. ce includes dropout and label smoothing; group "
        "computes the logits twice, for the refinement and for the added cross-entropy; spce has "
        "no head.\n\n" + table(["classes", "batch", "", "ms", "relative to ce"], rows),
    )


def main(sections: list[str]) -> None:
    for section in sections or ["step", "alone"]:
        if section == "alone":
            alone()
        else:
            step(int(section.removeprefix("step") or 224))


if __name__ == "__main__":
    main(sys.argv[1:])
