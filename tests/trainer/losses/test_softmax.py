"""Softmax and log-sum-exp in place: values and gradients."""

import torch
from torch.autograd import gradcheck

from trainer.losses.softmax import log_sum_exp_, softmax_


def test_gradients_of_the_softmax_in_place_are_those_of_finite_differences():
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: softmax_(x.clone()), [logits])
    assert gradcheck(lambda x: log_sum_exp_(x.clone()), [logits])


def test_softmax_in_place_equals_torchs_for_huge_logits():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4]])
    assert torch.equal(log_sum_exp_(logits.clone()), torch.logsumexp(logits, 1))
    assert torch.allclose(softmax_(logits.clone()), logits.softmax(1))
