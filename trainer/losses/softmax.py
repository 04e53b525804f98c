"""Softmax and log-sum-exp that overwrite the logits: one (B, C) matrix instead of three.

With ten thousand classes the logits are the largest thing that a loss holds. Their softmax is all
that the gradient needs of them, so it takes their place.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def log_sum_exp_(logits: Tensor) -> Tensor:
    """(B, C) -> (B,). The logits are overwritten: read what else you need of them before."""
    return _Softmax.apply(logits)[1]


def softmax_(logits: Tensor) -> Tensor:
    """(B, C) -> (B, C), in place."""
    return _Softmax.apply(logits)[0]


def at_labels(matrix: Tensor, labels: Tensor) -> Tensor:
    """The entry of each row's label, (B, C) -> (B,).

    Unlike gather it keeps no hold on the matrix, which may be overwritten next.
    """
    return matrix[torch.arange(len(labels), device=labels.device), labels]


def overwrite_with_softmax(logits: Tensor) -> Tensor:
    """Without autograd; gives the log-sum-exp of each row, (B, 1)."""
    top = logits.amax(1, keepdim=True)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)
    logits.div_(total)
    return total.log_().add_(top)


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        lse = overwrite_with_softmax(logits).squeeze(1)
        ctx.mark_dirty(logits)
        ctx.save_for_backward(logits)
        ctx.set_materialize_grads(False)
        return logits, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_softmax: Tensor | None, by_lse: Tensor | None) -> Tensor | None:
        (softmax,) = ctx.saved_tensors
        if by_softmax is None:
            return None if by_lse is None else softmax * by_lse[:, None]
        gradient = by_softmax * softmax
        row = gradient.sum(1, keepdim=True)
        if by_lse is not None:
            row = row - by_lse[:, None]
        return gradient.sub_(softmax * row)
