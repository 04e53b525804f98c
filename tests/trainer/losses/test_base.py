"""What all losses share: their sizes, and the length of embeddings."""

import pytest
import torch
from torch.autograd import gradcheck

from retrieval.errors import DmlError
from tests.trainer.losses.batches import DIM
from tests.trainer.losses.references import LABELS, head_logits, loop_cross_entropy, made, unit
from trainer.losses import build
from trainer.losses.base import with_length


def test_no_classes_is_an_error():
    with pytest.raises(DmlError):
        build("ce", 0, DIM)


@pytest.mark.parametrize("length", [1.0, 16.0])
def test_a_length_is_that_of_every_row_and_its_gradient_that_of_finite_differences(exact, length):
    z, labels = exact
    loss = made("ce", dropout=0.0)
    rows = [[length * x for x in unit(row)] for row in z.tolist()]
    scaled = with_length(z, length)
    for row, expected in zip(scaled.tolist(), rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-12)
    logits = head_logits(loss, torch.tensor(rows, dtype=torch.float64))
    expected = loop_cross_entropy(logits, LABELS, 0.1)
    assert loss(scaled, labels).item() == pytest.approx(expected, rel=1e-12)
    assert gradcheck(lambda x: loss(with_length(x, length), labels), [z.clone().requires_grad_()])
    assert with_length(z, 0) is z
