"""Batches for tests of losses, losses without chance, and one training step."""

import torch

from trainer.losses import build

CLASSES, DIM = 6, 4


def batch(n=12, classes=3):
    return torch.randn(n, DIM), torch.arange(n) % classes


def fixed(name):
    """Without chance: no dropout, no anchors, a head that is not zero."""
    options = {"ce": {"dropout": 0.0}, "group": {"anchors": 0}}.get(name, {})
    loss = build(name, CLASSES, DIM, **options)
    generator = torch.Generator().manual_seed(5)
    for parameter in loss.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return loss


def step(loss, z, labels):
    """Value and gradients, after one step of an optimiser that must reach all parameters."""
    z = z.clone().requires_grad_()
    value = loss(z, labels)
    value.backward()
    return value, z.grad, [parameter.grad for parameter in loss.parameters()]
