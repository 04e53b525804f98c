"""Build optimisers from settings, and compute the learning rate of each step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from retrieval.errors import DmlError
from trainer import config


def build(spec: config.Optimizer, network: nn.Module, loss: nn.Module) -> Optimizer:
    """Build the optimiser without frozen parameters; the order of the groups is always the same.

    Each group keeps its learning rate before the schedule as `base_lr`, also in the state dict.
    """
    decay = {"weights": spec.weight_decay, "others": spec.weight_decay if spec.decay_all else 0.0}
    groups = [
        {
            "params": parameters,
            "name": f"{owner}/{kind}",
            "base_lr": lr,
            "lr": lr,
            "weight_decay": decay[kind],
        }
        for owner, module, lr in (
            ("network", network, spec.lr),
            ("loss", loss, spec.lr * spec.loss_lr),
        )
        for kind in decay
        if (parameters := trainable(module, kind))
    ]
    if not groups:
        raise DmlError(
            "There is nothing to train.",
            "All parameters of the network are frozen, and the loss has none.",
            "Leave some of them unfrozen.",
        )
    if spec.name == "sgd":
        return optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.momentum > 0)
    if spec.name == "radam":
        decoupled = spec.decoupled
        return optim.RAdam(groups, lr=spec.lr, eps=spec.eps, decoupled_weight_decay=decoupled)
    kind = optim.AdamW if spec.decoupled or spec.name == "adamw" else optim.Adam
    return kind(groups, lr=spec.lr, eps=spec.eps)


def saved_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict for a checkpoint, with the numbers of the parameters that have a state.

    Not all have one: plain SGD keeps nothing, and neither has a parameter without gradients.
    """
    state = optimizer.state_dict()
    return state | {"entries": sorted(state["state"])}


def restore(optimizer: Optimizer, saved: Mapping[str, Any], epoch: int) -> None:
    """Load the state of a checkpoint; ValueError if it does not belong to the parameters.

    epoch: how many were finished. The groups keep their settings, which are those of the config.
    """
    groups = optimizer.state_dict()["param_groups"]
    if _members(saved["param_groups"]) != _members(groups):
        raise ValueError("The groups of parameters are others")
    sizes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    averages = {"exp_avg", "exp_avg_sq"}
    keys = {"momentum_buffer"} if isinstance(optimizer, optim.SGD) else {"step", *averages}
    for number, entry in saved["state"].items():
        shapes = {key: () if key == "step" else sizes[number] for key in keys}
        if {key: tuple(value.shape) for key, value in entry.items()} != shapes:
            raise ValueError(f"Parameter {number} has a state of another kind or size")
    if not _is_complete(optimizer, saved, epoch):
        raise ValueError("Parameters have lost their state")
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


def _members(groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    return [(group["name"], list(group["params"])) for group in groups]


def _is_complete(optimizer: Optimizer, saved: Mapping[str, Any], epoch: int) -> bool:
    """Whether all parameters that had a state still have it.

    An older checkpoint does not say which had one; after an epoch some had, except with plain SGD.
    """
    if "entries" in saved:
        return sorted(saved["state"]) == saved["entries"]
    plain = all(group.get("momentum") == 0 for group in optimizer.param_groups)
    return plain or epoch == 0 or bool(saved["state"])


def trainable(module: nn.Module, kind: str) -> list[nn.Parameter]:
    """The parameters that learn: weights have two or more dimensions, others fewer."""
    wide = kind == "weights"
    return [p for p in module.parameters() if p.requires_grad and (p.ndim >= 2) == wide]


def rate(
    spec: config.Schedule, step: int, steps_per_epoch: int, phase: tuple[int, int] = (0, 0)
) -> float:
    """The factor on the learning rate in `step`, counted from 0 over all epochs.

    `step` and `steps_per_epoch` are counted as if all epochs had the batches of this one. phase:
    how many more steps have been done, and the run has in all, as a first phase has other batches.

    Warm-up ends at the full rate; its first step is not 0, which would be a step for nothing. It
    takes a tenth of the run at most: small data sets have few steps. With cosine the smaller of
    both counts, as in the public code of Boudiaf et al.
    """
    total = spec.epochs * steps_per_epoch
    warmup = min(spec.warmup, (total + phase[1]) // 10)
    warm = min(1.0, (step + phase[0] + 1) / warmup) if warmup else 1.0
    if spec.name == "step":
        passed = sum(step // steps_per_epoch >= epoch for epoch in spec.milestones)
        return warm * spec.factor**passed
    if spec.name == "cosine":
        return min(warm, (1 + math.cos(math.pi * min(1.0, step / total))) / 2)
    return warm


def set_rate(optimizer: Optimizer, factor: float) -> None:
    """Set the learning rate of each group to a multiple of its base."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["base_lr"]
