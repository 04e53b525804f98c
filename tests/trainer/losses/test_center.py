"""Center loss: half the squared distances to the class means, and cross-entropy."""

import pytest

from tests.trainer.losses.references import LABELS, head_logits, loop_cross_entropy, made


def test_center_is_the_mean_of_half_the_squares_to_the_class_means_plus_cross_entropy(exact):
    z, labels = exact
    loss = made("center", weight=0.7)
    rows, tight = z.tolist(), 0.0
    for i, y in enumerate(LABELS):
        own = [rows[j] for j in range(len(rows)) if LABELS[j] == y]
        mean = [sum(column) / len(own) for column in zip(*own, strict=True)]
        tight += 0.35 * sum((a - b) ** 2 for a, b in zip(rows[i], mean, strict=True)) / len(rows)
    parts = loss.parts(z, labels)
    assert parts["tightness"].item() == pytest.approx(tight, rel=1e-12)
    entropy = loop_cross_entropy(head_logits(loss, z), LABELS)
    assert parts["contrastive"].item() == pytest.approx(entropy, rel=1e-12)
