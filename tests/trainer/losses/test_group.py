"""The Group Loss: its anchors, its dynamics, and that nothing makes it NaN."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import cosine_similarity, euclidean_distances, rbf_kernel

from retrieval.errors import DmlError
from trainer.losses import build
from trainer.losses.group import (
    SIMILARITIES,
    draw_anchors,
    non_negative_,
    similarities,
    step_,
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def similar(z, negatives="clamp", kind="pearson", diagonal=0.0):
    """W as the loss makes it."""
    return non_negative_(similarities(z, kind, 0.0), negatives, diagonal)


def consistency(w, x):
    """F of eq. 7."""
    return torch.einsum("ij,ik,jk->", w, x, x).item()


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["clamp", "shift"]),
    st.integers(0, 3),
    st.sampled_from(SIMILARITIES),
    st.sampled_from([0.0, 1.0]),
)
def test_consistency_never_decreases(seed, negatives, anchors, kind, diagonal):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(12, 4, dtype=torch.float64, generator=generator)
    x = (3 * torch.randn(12, 5, dtype=torch.float64, generator=generator)).softmax(1)
    x[:anchors] = torch.eye(5, dtype=torch.float64)[:anchors]
    w = similar(z, negatives, kind, diagonal)
    before = consistency(w, x)
    for _ in range(15):
        step_(x, w)
        after = consistency(w, x)
        assert after >= before - 1e-12 * abs(before)
        before = after
    assert torch.allclose(x.sum(1), torch.ones(12, dtype=torch.float64))


def test_a_row_without_support_keeps_its_prior():
    z = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 2.0, 4.0]])  # row 1 against both
    w = similar(z)
    assert (w[1] == 0).all()
    x = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.2, 0.8]])
    step_(x, w)
    assert x[1].tolist() == pytest.approx([0.9, 0.1])
    assert x[0].tolist() == pytest.approx([0.2, 0.8])


def test_more_classes_than_a_block_of_columns_refine_alike():
    x = torch.randn(6, 1300, dtype=torch.float64).softmax(1)
    w = torch.rand(6, 6, dtype=torch.float64)  # every row has support
    expected = x * (w @ x)
    expected /= expected.sum(1, keepdim=True)
    step_(x, w)
    assert torch.allclose(x, expected, rtol=1e-12)


def test_correlation_is_pearsons():
    z = torch.randn(7, 5, dtype=torch.float64)
    expected = torch.corrcoef(z).fill_diagonal_(0)
    assert torch.allclose(similar(z), expected.clamp(min=0))
    shifted = (expected - expected.min()).fill_diagonal_(0)
    assert torch.allclose(similar(z, "shift"), shifted)


def test_cosine_and_gaussian_are_those_of_scikit_learn():
    z = 3 + torch.randn(7, 5, dtype=torch.float64)
    expected = torch.from_numpy(cosine_similarity(z.numpy())).fill_diagonal_(0.5)
    assert torch.allclose(similar(z, kind="cosine", diagonal=0.5), expected.clamp(min=0))
    squares = euclidean_distances(z.numpy(), squared=True)
    for bandwidth, gamma in ((2.0, 1 / 8), (0.0, 42 / (2 * squares.sum()))):
        expected = torch.from_numpy(rbf_kernel(z.numpy(), gamma=gamma))
        assert torch.allclose(similarities(z, "gaussian", bandwidth), expected)


def test_the_refinement_ends_once_nothing_changes():
    z, labels = torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3
    anchors = draw_anchors(labels, 1)

    def refined(**options):
        torch.manual_seed(2)
        loss = build("group", 3, 4, **options).double()
        return loss.refined(z, labels, anchors)[0].detach()

    states = [refined(iterations=n) for n in range(60)]
    changes = [(b - a).abs().max() for a, b in itertools.pairwise(states)]
    tolerance = float(changes[20])
    first = next(n for n, change in enumerate(changes, 1) if change <= tolerance)
    assert 1 < first < 59
    assert torch.equal(refined(iterations=1000, tolerance=tolerance), states[first])
    assert torch.equal(refined(iterations=2, tolerance=tolerance), states[2])


def test_the_head_may_have_no_bias():
    loss = build("group", 5, 4, bias=False, batch_classes=True)
    assert [name for name, _ in loss.named_parameters()] == ["head.weight"]
    loss(torch.randn(6, 4), torch.arange(6) % 3).backward()
    assert loss.head.weight.grad.isfinite().all()


def test_anchors_are_a_fixed_number_of_each_class():
    labels = torch.tensor([7, 1, 7, 7, 1, 3, 7])
    for count in range(5):
        mask = draw_anchors(labels, count)
        drawn = [int(mask[labels == k].sum()) for k in (7, 1, 3)]
        assert drawn == [min(count, 4), min(count, 2), min(count, 1)]


def test_every_image_of_a_class_becomes_an_anchor_equally_often():
    torch.manual_seed(0)
    labels = torch.arange(12) % 3
    often = sum(draw_anchors(labels, 1).float() for _ in range(4000)) / 4000
    assert torch.allclose(often, torch.full((12,), 0.25), atol=0.04)


def test_anchors_follow_torchs_seed():
    z, labels = torch.randn(12, 4), torch.arange(12) % 3
    loss = build("group", 3, 4, anchors=1)
    values = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        values.append(loss(z, labels).item())
    assert values[0] == values[1] != values[2]


def test_anchors_add_nothing_to_the_refined_part():
    z, labels = torch.randn(6, 4), torch.arange(6) % 3
    loss = build("group", 3, 4)
    everyone = torch.ones(6, dtype=torch.bool)
    assert loss.parts(z, labels, anchors=everyone)["refined"] == 0


def test_weight_zero_leaves_out_cross_entropy():
    parts = build("group", 3, 4, ce_weight=0.0).parts(torch.randn(6, 4), torch.arange(6) % 3)
    assert set(parts) == {"refined"}


EMBEDDINGS = {
    "zero": torch.zeros(8, 4),
    "identical": torch.ones(8, 1) * torch.tensor([1.0, -2.0, 0.3, 4.0]),
    "constant": torch.arange(1.0, 9.0)[:, None].expand(8, 4) / 3,
    "some zero": torch.cat([torch.zeros(3, 4), torch.randn(5, 4)]),
    "opposite": torch.tensor([[1.0], [-1.0]]).repeat(4, 1) * torch.tensor([[1.0, 2.0, -3.0, 0.0]]),
    "huge": 1e6 * torch.randn(8, 4),
    "tiny": 1e-20 * torch.randn(8, 4),
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
@pytest.mark.parametrize("negatives", ["clamp", "shift"])
@pytest.mark.parametrize("objective", ["ce", "kl"])
@pytest.mark.parametrize("temperature", [0.01, 24.0])
@pytest.mark.parametrize("labels", ["balanced", "one class", "all different"])
def test_loss_and_gradients_are_finite_for(kind, negatives, objective, temperature, labels):
    y = {"balanced": torch.arange(8) % 4, "one class": torch.zeros(8, dtype=torch.int64)}
    y = y.get(labels, torch.arange(8))
    for anchors in (0, 1, 2):
        z = EMBEDDINGS[kind].clone().requires_grad_()
        loss = build(
            "group",
            8,
            4,
            anchors=anchors,
            iterations=5,
            negatives=negatives,
            objective=objective,
            temperature=temperature,
        )
        value = loss(z, y)
        value.backward()
        assert value.isfinite()
        for gradient in (z.grad, loss.head.weight.grad, loss.head.bias.grad):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", EMBEDDINGS)
@pytest.mark.parametrize("negatives", ["clamp", "shift"])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_other_similarities_are_finite_for(kind, negatives, similarity):
    z, labels = EMBEDDINGS[kind].clone().requires_grad_(), torch.arange(8) % 4
    options = {"iterations": 5, "tolerance": 1e-3, "diagonal": 1.0, "anchors": 1}
    loss = build("group", 8, 4, similarity=similarity, negatives=negatives, **options)
    value = loss(z, labels)
    value.backward()
    assert value.isfinite()
    assert z.grad.isfinite().all()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.floats(1e-3, 1e3),
    st.sampled_from([0.05, 1.0, 79.0]),
    st.integers(0, 8),
    st.integers(0, 2),
    st.integers(0, 10_000),
)
def test_no_batch_makes_it_nan(n, dim, scale, temperature, iterations, anchors, seed):
    torch.manual_seed(seed)
    z = (scale * torch.randn(n, dim)).requires_grad_()
    loss = build("group", 6, dim, anchors=anchors, temperature=temperature, iterations=iterations)
    loss.head.weight.data.mul_(10)
    value = loss(z, torch.randint(0, 6, (n,)))
    value.backward()
    assert value.isfinite()
    assert z.grad.isfinite().all()
    assert loss.head.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("anchors", -1),
        ("temperature", 0),
        ("iterations", -1),
        ("negatives", "drop"),
        ("objective", "mse"),
        ("ce_weight", -1),
        ("tolerance", -1),
        ("similarity", "dot"),
        ("bandwidth", -1),
        ("diagonal", -1),
    ],
)
def test_impossible_option_values_are_named(option, value):
    with pytest.raises(DmlError) as caught:
        build("group", 3, 4, **{option: value})
    assert option in caught.value.what
    assert repr(value) in caught.value.what
