"""The Group Loss: Algorithm 1 by loops, its anchors and dynamics, and that nothing makes it NaN."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import cosine_similarity, euclidean_distances, rbf_kernel

from retrieval.errors import DmlError
from tests.trainer.losses.references import (
    LABELS,
    C,
    distance,
    dot,
    head_logits,
    loop_cross_entropy,
    made,
    softmax,
)
from trainer.losses import build
from trainer.losses.group import SIMILARITIES, draw_anchors, non_negative_, similarities, step_


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


def pearson(a, b):
    ma, mb = sum(a) / len(a), sum(b) / len(b)
    cov = sum((x - ma) * (y - mb) for x, y in zip(a, b, strict=True))
    va, vb = sum((x - ma) ** 2 for x in a), sum((y - mb) ** 2 for y in b)
    return cov / math.sqrt(va * vb)


def cosine(a, b):
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def loop_similarity(z, kind, bandwidth):
    n = len(z)
    if kind == "gaussian":
        squares = [distance(z[i], z[j]) ** 2 for i in range(n) for j in range(n) if i != j]
        scale = bandwidth**2 if bandwidth else sum(squares) / len(squares)
        return [[math.exp(-(distance(a, b) ** 2) / (2 * scale)) for b in z] for a in z]
    return [[{"pearson": pearson, "cosine": cosine}[kind](a, b) for b in z] for a in z]


def loop_group(
    z,
    labels,
    logits,
    anchors,
    *,
    temperature,
    iterations,
    classes,
    negatives="clamp",
    similarity="pearson",
    bandwidth=0.0,
    diagonal=0.0,
    tolerance=0.0,
):
    """X(T) over the given classes, eqs. 1 to 4."""
    n = len(z)
    w = loop_similarity(z, similarity, bandwidth)
    low = 0.0
    if negatives == "shift":
        low = min(0.0, *(w[i][j] for i in range(n) for j in range(n) if i != j))
    w = [[diagonal if i == j else max(w[i][j] - low, 0.0) for j in range(n)] for i in range(n)]
    x = [softmax([row[k] / temperature for k in classes]) for row in logits]
    for i in range(n):
        if anchors[i]:
            x[i] = [1.0 if k == labels[i] else 0.0 for k in classes]
    for _ in range(iterations):
        support = [
            [sum(w[i][j] * x[j][c] for j in range(n)) for c in range(len(classes))]
            for i in range(n)
        ]
        new = [[a * b for a, b in zip(x[i], support[i], strict=True)] for i in range(n)]
        before = x
        x = [[v / sum(row) for v in row] if sum(row) > 0 else x[i] for i, row in enumerate(new)]
        pairs = zip(before, x, strict=True)
        change = max(abs(a - b) for p, q in pairs for a, b in zip(p, q, strict=True))
        if tolerance and change <= tolerance:
            break
    return x


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


@pytest.mark.parametrize("anchors", [[], [1, 3, 7], [0, 1, 2, 3]])
@pytest.mark.parametrize("iterations", [0, 1, 4])
@pytest.mark.parametrize("negatives", ["clamp", "shift"])
@pytest.mark.parametrize("batch_classes", [False, True])
@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_group_is_algorithm_1(exact, anchors, iterations, negatives, batch_classes, objective):
    z, labels = exact
    loss = made(
        "group",
        temperature=2.5,
        iterations=iterations,
        negatives=negatives,
        batch_classes=batch_classes,
        objective=objective,
        ce_weight=0.25,
    )
    mask = [i in anchors for i in range(len(LABELS))]
    logits = head_logits(loss, z)
    classes = sorted(set(LABELS)) if batch_classes else list(range(C))
    x = loop_group(
        z.tolist(),
        LABELS,
        logits,
        mask,
        temperature=2.5,
        iterations=iterations,
        negatives=negatives,
        classes=classes,
    )
    if objective == "ce":
        expected = -sum(math.log(x[i][classes.index(y)]) for i, y in enumerate(LABELS)) / len(x)
    else:
        pairs = [
            kl(x[i], x[j])
            for i, y in enumerate(LABELS)
            for j in range(len(x))
            if i != j and LABELS[j] == y and not mask[j]
        ]
        expected = sum(pairs) / len(pairs)
    parts = loss.parts(z, labels, anchors=torch.tensor(mask))
    assert parts["refined"].item() == pytest.approx(expected, rel=1e-9)
    entropy = loop_cross_entropy(logits, LABELS)
    assert parts["ce"].item() == pytest.approx(0.25 * entropy, rel=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"diagonal": 1.0},
        {"diagonal": 0.3, "negatives": "shift"},
        {"similarity": "cosine"},
        {"similarity": "cosine", "negatives": "shift", "diagonal": 1.0},
        {"similarity": "gaussian"},
        {"similarity": "gaussian", "bandwidth": 0.7, "diagonal": 1.0},
        {"tolerance": 0.05},
        {"tolerance": 0.01, "similarity": "gaussian"},
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [True, False])
def test_options_of_group_are_those_of_loops(exact, options, bias):
    z, labels = exact
    iterations = 50 if "tolerance" in options else 3
    settings = {"temperature": 2.5, "iterations": iterations, **options}
    loss = made("group", ce_weight=0.0, bias=bias, **settings)
    mask = [i in (1, 3) for i in range(len(LABELS))]
    x = loop_group(z.tolist(), LABELS, head_logits(loss, z), mask, classes=range(C), **settings)
    found, _ = loss.refined(z, labels, torch.tensor(mask))
    for row, expected in zip(found.tolist(), x, strict=True):
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-15)
    expected = -sum(math.log(max(x[i][y], 1e-30)) for i, y in enumerate(LABELS)) / len(x)
    parts = loss.parts(z, labels, anchors=torch.tensor(mask))
    assert parts["refined"].item() == pytest.approx(expected, rel=1e-9)
