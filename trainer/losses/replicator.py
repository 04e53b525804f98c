"""The refinement of the Group Loss, eq. 4: X <- X * (W X), rows normalised.

Forward works in place, a block of columns at a time. Backward carries d loss / d log x, which is
bounded where d loss / d x is not: probabilities of 1e-30 give gradients, not NaN.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trainer.losses.softmax import overwrite_with_softmax

SMALLEST = 1e-30
"""Less support or probability than this counts as none; far from float32's 1e-38."""
COLUMNS = 512


def refine_(
    logits: Tensor, similarity: Tensor, labels: Tensor, anchors: Tensor, iterations: int
) -> Tensor:
    """Overwrites the logits (B, C) with X(T). An anchor starts as the one-hot of its label."""
    return _Refinement.apply(logits, similarity, labels, anchors, iterations)


def step_(x: Tensor, similarity: Tensor) -> None:
    """One iteration in place. A row that has no support keeps what it has."""
    blocks = x.split(COLUMNS, dim=1)
    total = x.new_zeros(len(x), 1)  # the diagonal of Q in eq. 6
    for block in blocks:
        total += (similarity @ block).mul_(block).sum(1, keepdim=True)
    alone = total <= SMALLEST
    for block in blocks:
        block *= (similarity @ block).div_(total).masked_fill_(alone, 1)


class _Refinement(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        similarity: Tensor,
        labels: Tensor,
        anchors: Tensor,
        iterations: int,
    ) -> Tensor:
        overwrite_with_softmax(logits)
        x = logits
        true = x.gather(1, labels[:, None]).masked_fill_(anchors[:, None], 1)
        x.masked_fill_(anchors[:, None], 0).scatter_(1, labels[:, None], true)
        states = []
        for _ in range(iterations):
            if any(ctx.needs_input_grad):
                states.append(x.clone())
            step_(x, similarity)
        ctx.mark_dirty(logits)
        ctx.save_for_backward(similarity, *states, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        similarity, *states = ctx.saved_tensors
        by_log = gradient * states[-1]  # d loss / d log x
        by_similarity = torch.zeros_like(similarity)
        for before, after in zip(states[-2::-1], states[:0:-1], strict=True):
            support = similarity @ before
            alone = (before * support).sum(1, keepdim=True) <= SMALLEST
            moved = by_log - after * by_log.sum(1, keepdim=True)
            by_support = (moved / support.clamp_(min=SMALLEST)).masked_fill_(alone, 0)
            by_similarity += by_support @ before.T
            by_log = moved + before * (similarity.T @ by_support)
        # For an anchor, whose x is one-hot, this is 0; for a row without support the subtraction
        # above changes nothing here.
        by_logits = by_log - states[0] * by_log.sum(1, keepdim=True)
        return by_logits, by_similarity, None, None, None
