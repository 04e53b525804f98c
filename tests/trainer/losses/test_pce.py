"""Pairwise cross-entropy: Proposition 1, its lambda, and when it is a bound."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.errors import DmlError
from tests.trainer.losses.batches import CLASSES, DIM, batch
from tests.trainer.losses.references import LABELS, dot, head_logits, made, softmax
from trainer.losses import build


@pytest.mark.usefixtures("quiet")
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(1, 80),
    st.floats(1e-3, 10),
    st.integers(0, 9999),
)
def test_cross_entropy_is_at_least_pce_for_random_networks_with_a_head_of_zeros(
    dim, classes, n, scale, seed
):
    z, labels, pce = network(dim, classes, n, seed)
    pce.head.weight.data.zero_()
    entropy = torch.nn.functional.cross_entropy(pce.head(scale * z), labels)
    parts = pce.parts(scale * z, labels)
    rounding = 1e-12 * sum(abs(part) for part in parts.values())
    assert entropy >= sum(parts.values()) - rounding


def test_cross_entropy_is_mostly_at_least_pce_for_small_heads_and_mostly_not_for_large_ones():
    """Proposition 1 is no bound in general: the docstring says so, and this is why."""
    holds = dict.fromkeys([0.01, 3.0], 0)
    for seed in range(20):
        z, labels, pce = network(5, 5, 50, seed)
        weight = pce.head.weight.data.clone()
        for scale in holds:
            pce.head.weight.data = scale * weight
            entropy = torch.nn.functional.cross_entropy(pce.head(z), labels)
            holds[scale] += int(entropy >= pce(z, labels))
    assert holds[0.01] >= 18
    assert holds[3.0] <= 2


def network(dim, classes, n, seed):
    """Embeddings of a random network, random labels, pce with a random head."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, dim)
    ).double()
    pce = build("pce", classes, dim, floor=1e-9).double()
    torch.nn.init.normal_(pce.head.weight, std=dim**-0.5)
    with torch.no_grad():
        z = layers(torch.randn(n, 10, dtype=torch.float64))
    return z, torch.randint(0, classes, (n,)), pce


def test_pce_warns_once_when_its_floor_is_used():
    loss = build("pce", CLASSES, DIM, floor=0.02)
    z, labels = batch(n=3)
    with pytest.warns(UserWarning, match=r"batch of 3 in 4 dimensions has no full rank; 0\.02"):
        loss(z, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(z, labels)


@pytest.mark.parametrize("n", [3, 4, 12])
def test_pce_without_a_floor_says_why_it_cannot_be_computed(n):
    loss = build("pce", CLASSES, DIM, floor=0.0)
    z, labels = batch(n=n)
    z[:, 3] = z[:, 0]  # never of full rank
    with pytest.raises(DmlError) as caught:
        loss(z, labels)
    assert "lambda" in caught.value.what
    assert "floor" in caught.value.fix


def loop_pce(z, labels, p, smallest):
    n, classes = len(z), len(p[0])
    tight = contrast = 0.0
    for i in range(n):
        for j in range(n):
            if labels[j] == labels[i]:
                tight -= dot(z[i], z[j]) / (2 * smallest * n**2)
        inner = (
            sum(p[j][k] * dot(z[i], z[j]) for j in range(n)) / (smallest * n)
            for k in range(classes)
        )
        contrast += math.log(sum(math.exp(v) for v in inner)) / n
    for k in range(classes):
        mean = [sum(p[i][k] * z[i][m] for i in range(n)) / n for m in range(len(z[0]))]
        contrast -= dot(mean, mean) / (2 * smallest)
    return tight, contrast


def loop_lambda(z, p):
    """Eq. 25 with the eigenvalues of a general solver."""
    n, d = len(z), len(z[0])
    lowest = math.inf
    for k in range(len(p[0])):
        a = [
            [
                sum((q[k] - q[k] ** 2) * r[s] * r[t] for q, r in zip(p, z, strict=True)) / n
                for t in range(d)
            ]
            for s in range(d)
        ]
        lowest = min(
            lowest, torch.linalg.eigvals(torch.tensor(a, dtype=torch.float64)).real.min().item()
        )
    return lowest


def test_pce_is_proposition_1_with_the_lambda_of_equation_25(exact):
    z, labels = exact
    loss = made("pce", floor=0.0)
    p = [softmax(row) for row in head_logits(loss, z)]
    tight, contrast = loop_pce(z.tolist(), LABELS, p, loop_lambda(z.tolist(), p))
    parts = loss.parts(z, labels)
    assert parts["tightness"].item() == pytest.approx(tight, rel=1e-9)
    assert parts["contrastive"].item() == pytest.approx(contrast, rel=1e-9)


def test_pce_of_another_head_counts_its_bias_as_a_dimension(exact):
    z, labels = exact
    ce = made("ce")
    p = [softmax(row) for row in head_logits(ce, z)]
    longer = [[*row, 1.0] for row in z.tolist()]
    expected = sum(loop_pce(longer, LABELS, p, loop_lambda(longer, p)))
    pce = made("pce", floor=0.0)
    pce.head = ce.head
    parts = pce.parts(z, labels)
    assert sum(parts.values()).item() == pytest.approx(expected, rel=1e-9)
