"""Cross-entropy: smoothed targets, dropout, and how its head starts."""

import pytest
import torch

from tests.trainer.losses.batches import CLASSES, DIM, batch
from tests.trainer.losses.references import LABELS, C, head_logits, loop_cross_entropy, made
from trainer.losses import build


def test_untrained_cross_entropy_is_the_log_of_the_number_of_classes():
    assert build("ce", CLASSES, DIM)(*batch()).item() == pytest.approx(1.791759, abs=1e-6)


@pytest.mark.parametrize("zero_init", [True, False])
def test_the_head_of_cross_entropy_starts_at_zero_unless_asked(zero_init):
    head = build("ce", 5, DIM, zero_init=zero_init).head
    started_at_zero = not head.weight.any() and not head.bias.any()
    assert started_at_zero == zero_init


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_is_that_of_smoothed_targets(exact, smoothing):
    z, labels = exact
    loss = made("ce", smoothing=smoothing, dropout=0.0)
    expected = loop_cross_entropy(head_logits(loss, z), LABELS, smoothing)
    assert loss(z, labels).item() == pytest.approx(expected, rel=1e-12)


def test_cross_entropy_smoothing_is_torchs_after_rescaling(exact):
    z, labels = exact
    loss = made("ce", smoothing=0.1, dropout=0.0)
    rescaled = 0.1 * C / (C - 1)
    expected = torch.nn.functional.cross_entropy(loss.head(z), labels, label_smoothing=rescaled)
    assert torch.allclose(loss(z, labels), expected, rtol=1e-12)


def test_cross_entropy_drops_out_before_the_head_in_training_only(exact):
    z, labels = exact
    loss = made("ce", dropout=0.5)
    assert loss(z, labels) != loss(z, labels)
    loss.eval()
    assert loss(z, labels) == loss(z, labels)
