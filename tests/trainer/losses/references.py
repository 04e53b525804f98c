"""Loops over float64 numbers, written from the formulas of the papers."""

import math

import torch

from trainer.losses import build

C, D = 5, 3
LABELS = [0, 3, 0, 1, 3, 3, 1, 0, 0]  # classes 2 and 4 are absent


def made(name, **options):
    """In float64, with a head that is not zero."""
    loss = build(name, C, D, **options).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in loss.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return loss


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def head_logits(loss, z):
    weight = loss.head.weight.tolist()
    bias = [0.0] * C if loss.head.bias is None else loss.head.bias.tolist()
    return [[dot(w, row) + b for w, b in zip(weight, bias, strict=True)] for row in z.tolist()]


def softmax(row):
    total = sum(math.exp(v) for v in row)
    return [math.exp(v) / total for v in row]


def distance(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def unit(row):
    length = math.sqrt(dot(row, row))
    return [x / length for x in row]


def loop_cross_entropy(logits, labels, smoothing=0.0):
    total = 0.0
    for row, y in zip(logits, labels, strict=True):
        for k, p in enumerate(softmax(row)):
            target = 1 - smoothing if k == y else smoothing / (C - 1)
            total -= target * math.log(p)
    return total / len(labels)


def loop_multi_similarity(z, labels, alpha, beta, m, pairs=None):
    """Table 2; pairs: those that a miner left, as (i, j)."""
    z = [unit(row) for row in z]
    n = len(z)
    tight = contrast = 0.0
    for i in range(n):
        others = [j for j in range(n) if j != i and (pairs is None or (i, j) in pairs)]
        near = [math.exp(-alpha * (dot(z[i], z[j]) - m)) for j in others if labels[j] == labels[i]]
        far = [math.exp(beta * (dot(z[i], z[j]) - m)) for j in others if labels[j] != labels[i]]
        tight += math.log(1 + sum(near)) / alpha / n
        contrast += math.log(1 + sum(far)) / beta / n
    return tight, contrast
