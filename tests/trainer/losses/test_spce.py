"""Simplified pairwise cross-entropy against loops over eq. 15."""

import math

import pytest
import torch

from tests.trainer.losses.batches import DIM, batch
from tests.trainer.losses.references import LABELS, C, dot, made
from trainer.losses import build


def test_absent_classes_cost_spce_as_logit_zero():
    z, labels = batch(classes=2)
    few, many = build("spce", 2, DIM)(z, labels), build("spce", 5, DIM)(z, labels)
    assert many > few
    assert torch.allclose(build("spce", 5, DIM)(0 * z, labels), torch.log(torch.tensor(5.0)))


def loop_spce(z, labels, *, self_pairs=True, classes=range(C), scale=1.0):
    n = len(z)
    tight = contrast = 0.0
    for i in range(n):
        others = [j for j in range(n) if self_pairs or j != i]
        tight -= scale * sum(dot(z[i], z[j]) for j in others if labels[j] == labels[i]) / n**2
        inner = (
            scale * sum(dot(z[i], z[j]) for j in others if labels[j] == k) / n for k in classes
        )
        contrast += math.log(sum(math.exp(v) for v in inner)) / n
    return tight, contrast


def test_spce_is_equation_15_over_all_classes(exact):
    z, labels = exact
    tight, contrast = loop_spce(z.tolist(), LABELS)
    parts = made("spce").parts(z, labels)
    assert parts["tightness"].item() == pytest.approx(tight, rel=1e-12)
    assert parts["contrastive"].item() == pytest.approx(contrast, rel=1e-12)


@pytest.mark.parametrize("self_pairs", [True, False])
@pytest.mark.parametrize("batch_classes", [True, False])
@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_options_of_spce_change_pairs_classes_and_scale(exact, self_pairs, batch_classes, scale):
    z, labels = exact
    classes = sorted(set(LABELS)) if batch_classes else range(C)
    expected = loop_spce(z.tolist(), LABELS, self_pairs=self_pairs, classes=classes, scale=scale)
    loss = made("spce", self_pairs=self_pairs, batch_classes=batch_classes, scale=scale)
    parts = loss.parts(z, labels)
    found = parts["tightness"].item(), parts["contrastive"].item()
    assert found == pytest.approx(expected, rel=1e-12)
