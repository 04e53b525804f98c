"""SNCA and multi-similarity in the two parts of Table 2 of Boudiaf et al., ECCV 2020."""

import math

import pytest
import pytorch_metric_learning.losses
import torch

from tests.trainer.losses.batches import CLASSES, DIM, batch, step
from tests.trainer.losses.references import LABELS, dot, loop_multi_similarity, made, unit
from trainer.losses import build


def test_snca_is_the_softmax_over_cosines_to_the_others():
    z, labels = batch()
    cosines = torch.nn.functional.normalize(z) @ torch.nn.functional.normalize(z).T / 0.05
    cosines.fill_diagonal_(-torch.inf)
    same = labels[:, None] == labels
    expected = -(
        torch.logsumexp(cosines.masked_fill(~same, -torch.inf), 1) - torch.logsumexp(cosines, 1)
    ).mean()
    assert torch.allclose(build("snca", CLASSES, DIM)(z, labels), expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["NCALoss", "MultiSimilarityLoss"])
@pytest.mark.parametrize("labels", [[0, 1, 2, 0, 1, 2, 5, 5], [0, 1, 1, 2, 3, 4, 5, 5]])
def test_losses_split_in_parts_have_the_value_of_the_library(name, labels):
    z, labels = torch.randn(8, DIM, requires_grad=True), torch.tensor(labels)
    library = getattr(pytorch_metric_learning.losses, name)()(z, labels)
    ours = build(f"pml:{name}", CLASSES, DIM)(z, labels)
    assert torch.allclose(ours, library)
    by_ours, by_library = (torch.autograd.grad(value, z)[0] for value in (ours, library))
    assert torch.allclose(by_ours, by_library, atol=1e-6)


@pytest.mark.parametrize("name", ["contrastive", "snca", "multi_similarity"])
@pytest.mark.parametrize("labels", [[0], [2, 2, 2], [5, 0, 1]])
def test_batches_without_positives_or_negatives_train(name, labels):
    value, by_embedding, _ = step(
        build(name, CLASSES, DIM), torch.randn(len(labels), DIM), torch.tensor(labels)
    )
    assert value.isfinite()
    assert by_embedding.isfinite().all()


def loop_snca(z, labels, sigma):
    """Table 2; an image that is alone in its class is left out."""
    z = [unit(row) for row in z]
    tight = contrast = 0.0
    members = [i for i in range(len(z)) if labels.count(labels[i]) > 1]
    for i in members:
        others = [j for j in range(len(z)) if j != i]
        same = [j for j in others if labels[j] == labels[i]]
        tight -= math.log(sum(math.exp(dot(z[i], z[j]) / sigma) for j in same)) / len(members)
        every = sum(math.exp(dot(z[i], z[k]) / sigma) for k in others)
        contrast += math.log(every) / len(members)
    return tight, contrast


@pytest.mark.parametrize("labels", [LABELS, [0, 1, 2, 2, 1, 4, 3, 3, 3]])
def test_snca_has_the_two_parts_of_table_2(exact, labels):
    parts = made("snca").parts(exact[0], torch.tensor(labels))
    found = parts["tightness"].item(), parts["contrastive"].item()
    assert found == pytest.approx(loop_snca(exact[0].tolist(), labels, 0.05), rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"alpha": 3.0, "beta": 10.0, "base": 1.0}])
def test_multi_similarity_has_the_two_parts_of_table_2(exact, options):
    z, labels = exact
    alpha, beta, m = ({"alpha": 2.0, "beta": 50.0, "base": 0.5} | options).values()
    parts = made("multi_similarity", **options).parts(z, labels)
    found = parts["tightness"].item(), parts["contrastive"].item()
    expected = loop_multi_similarity(z.tolist(), LABELS, alpha, beta, m)
    assert found == pytest.approx(expected, rel=1e-12)
