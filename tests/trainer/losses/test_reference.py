"""Each loss of ours against loops over float64 numbers, written from the papers' formulas."""

import math
import warnings

import pytest
import torch
from torch.autograd import gradcheck

from trainer.losses import build
from trainer.losses.base import with_length
from trainer.losses.softmax import log_sum_exp_, softmax_

CLASSES, DIM = 5, 3
LABELS = [0, 3, 0, 1, 3, 3, 1, 0, 0]  # classes 2 and 4 are absent


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(len(LABELS), DIM, dtype=torch.float64, generator=generator)
    return z, torch.tensor(LABELS)


def made(name, **options):
    """In float64, with a head that is not zero."""
    loss = build(name, CLASSES, DIM, **options).double()
    generator = torch.Generator().manual_seed(5)
    for parameter in loss.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return loss


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def head_logits(loss, z):
    weight = loss.head.weight.tolist()
    bias = [0.0] * CLASSES if loss.head.bias is None else loss.head.bias.tolist()
    return [[dot(w, row) + b for w, b in zip(weight, bias, strict=True)] for row in z.tolist()]


def softmax(row):
    total = sum(math.exp(v) for v in row)
    return [math.exp(v) / total for v in row]


def loop_cross_entropy(logits, labels, smoothing=0.0):
    total = 0.0
    for row, y in zip(logits, labels, strict=True):
        for k, p in enumerate(softmax(row)):
            target = 1 - smoothing if k == y else smoothing / (CLASSES - 1)
            total -= target * math.log(p)
    return total / len(labels)


def loop_spce(z, labels, *, self_pairs=True, classes=range(CLASSES), scale=1.0):
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


def distance(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def unit(row):
    length = math.sqrt(dot(row, row))
    return [x / length for x in row]


def loop_contrastive(z, labels, margin):
    """Eq. 2."""
    n = len(z)
    tight = contrast = 0.0
    for i in range(n):
        for j in range(n):
            if labels[j] == labels[i]:
                tight += distance(z[i], z[j]) ** 2 / n
            else:
                contrast += max(0.0, margin - distance(z[i], z[j])) ** 2 / n
    return tight, contrast


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


def loop_multi_similarity(z, labels, alpha, beta, m, pairs=None):
    """Table 2; pairs: those that a miner left, as (i, j)."""
    z = [unit(row) for row in z]
    n = len(z)
    tight = contrast = 0.0
    for i in range(n):
        others = [j for j in range(n) if j != i and (pairs is None or (i, j) in pairs)]
        near = [math.exp(-alpha * (dot(z[i], z[j]) - m)) for j in others if labels[j] == labels[i]]
        far = [math.exp(beta * (dot(z[i], z[j]) - m)) for j in others if labels[j] != labels[i]]
        tight += math.log(1 + sum(near)) / alpha / n
        contrast += math.log(1 + sum(far)) / beta / n
    return tight, contrast


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


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_is_that_of_smoothed_targets(batch, smoothing):
    z, labels = batch
    loss = made("ce", smoothing=smoothing, dropout=0.0)
    expected = loop_cross_entropy(head_logits(loss, z), LABELS, smoothing)
    assert loss(z, labels).item() == pytest.approx(expected, rel=1e-12)


def test_cross_entropy_smoothing_is_torchs_after_rescaling(batch):
    z, labels = batch
    loss = made("ce", smoothing=0.1, dropout=0.0)
    rescaled = 0.1 * CLASSES / (CLASSES - 1)
    expected = torch.nn.functional.cross_entropy(loss.head(z), labels, label_smoothing=rescaled)
    assert torch.allclose(loss(z, labels), expected, rtol=1e-12)


def test_cross_entropy_drops_out_before_the_head_in_training_only(batch):
    z, labels = batch
    loss = made("ce", dropout=0.5)
    assert loss(z, labels) != loss(z, labels)
    loss.eval()
    assert loss(z, labels) == loss(z, labels)


def test_spce_is_equation_15_over_all_classes(batch):
    z, labels = batch
    tight, contrast = loop_spce(z.tolist(), LABELS)
    parts = made("spce").parts(z, labels)
    assert parts["tightness"].item() == pytest.approx(tight, rel=1e-12)
    assert parts["contrastive"].item() == pytest.approx(contrast, rel=1e-12)


@pytest.mark.parametrize("self_pairs", [True, False])
@pytest.mark.parametrize("batch_classes", [True, False])
@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_options_of_spce_change_pairs_classes_and_scale(batch, self_pairs, batch_classes, scale):
    z, labels = batch
    classes = sorted(set(LABELS)) if batch_classes else range(CLASSES)
    expected = loop_spce(z.tolist(), LABELS, self_pairs=self_pairs, classes=classes, scale=scale)
    loss = made("spce", self_pairs=self_pairs, batch_classes=batch_classes, scale=scale)
    parts = loss.parts(z, labels)
    found = parts["tightness"].item(), parts["contrastive"].item()
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("margin", [0.5, 1.0, 2.5])
def test_contrastive_is_equation_2(batch, normalize, margin):
    z, labels = batch
    rows = [unit(row) for row in z.tolist()] if normalize else z.tolist()
    parts = made("contrastive", margin=margin, normalize=normalize).parts(z, labels)
    found = parts["tightness"].item(), parts["contrastive"].item()
    assert found == pytest.approx(loop_contrastive(rows, LABELS, margin), rel=1e-12)


@pytest.mark.parametrize("labels", [LABELS, [0, 1, 2, 2, 1, 4, 3, 3, 3]])
def test_snca_has_the_two_parts_of_table_2(batch, labels):
    parts = made("snca").parts(batch[0], torch.tensor(labels))
    found = parts["tightness"].item(), parts["contrastive"].item()
    assert found == pytest.approx(loop_snca(batch[0].tolist(), labels, 0.05), rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"alpha": 3.0, "beta": 10.0, "base": 1.0}])
def test_multi_similarity_has_the_two_parts_of_table_2(batch, options):
    z, labels = batch
    alpha, beta, m = ({"alpha": 2.0, "beta": 50.0, "base": 0.5} | options).values()
    parts = made("multi_similarity", **options).parts(z, labels)
    found = parts["tightness"].item(), parts["contrastive"].item()
    expected = loop_multi_similarity(z.tolist(), LABELS, alpha, beta, m)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("length", [1.0, 16.0])
def test_a_length_is_that_of_every_row_and_its_gradient_that_of_finite_differences(batch, length):
    z, labels = batch
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


def test_pce_is_proposition_1_with_the_lambda_of_equation_25(batch):
    z, labels = batch
    loss = made("pce", floor=0.0)
    p = [softmax(row) for row in head_logits(loss, z)]
    tight, contrast = loop_pce(z.tolist(), LABELS, p, loop_lambda(z.tolist(), p))
    parts = loss.parts(z, labels)
    assert parts["tightness"].item() == pytest.approx(tight, rel=1e-9)
    assert parts["contrastive"].item() == pytest.approx(contrast, rel=1e-9)


def test_pce_of_another_head_counts_its_bias_as_a_dimension(batch):
    z, labels = batch
    ce = made("ce")
    p = [softmax(row) for row in head_logits(ce, z)]
    longer = [[*row, 1.0] for row in z.tolist()]
    expected = sum(loop_pce(longer, LABELS, p, loop_lambda(longer, p)))
    pce = made("pce", floor=0.0)
    pce.head = ce.head
    parts = pce.parts(z, labels)
    assert sum(parts.values()).item() == pytest.approx(expected, rel=1e-9)


def test_center_is_the_mean_of_half_the_squares_to_the_class_means_plus_cross_entropy(batch):
    z, labels = batch
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


@pytest.mark.parametrize("anchors", [[], [1, 3, 7], [0, 1, 2, 3]])
@pytest.mark.parametrize("iterations", [0, 1, 4])
@pytest.mark.parametrize("negatives", ["clamp", "shift"])
@pytest.mark.parametrize("batch_classes", [False, True])
@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_group_is_algorithm_1(batch, anchors, iterations, negatives, batch_classes, objective):
    z, labels = batch
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
    classes = sorted(set(LABELS)) if batch_classes else list(range(CLASSES))
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
def test_options_of_group_are_those_of_loops(batch, options, bias):
    z, labels = batch
    iterations = 50 if "tolerance" in options else 3
    settings = {"temperature": 2.5, "iterations": iterations, **options}
    loss = made("group", ce_weight=0.0, bias=bias, **settings)
    mask = [i in (1, 3) for i in range(len(LABELS))]
    x = loop_group(
        z.tolist(), LABELS, head_logits(loss, z), mask, classes=range(CLASSES), **settings
    )
    found, _ = loss.refined(z, labels, torch.tensor(mask))
    for row, expected in zip(found.tolist(), x, strict=True):
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-15)
    expected = -sum(math.log(max(x[i][y], 1e-30)) for i, y in enumerate(LABELS)) / len(x)
    parts = loss.parts(z, labels, anchors=torch.tensor(mask))
    assert parts["refined"].item() == pytest.approx(expected, rel=1e-9)


VARIANTS = [
    ("ce", {"dropout": 0.0}),
    ("spce", {}),
    ("spce", {"self_pairs": False, "batch_classes": True, "scale": 3.0}),
    ("contrastive", {"margin": 1.7}),
    ("contrastive", {"margin": 1.7, "normalize": False}),
    ("snca", {}),
    ("multi_similarity", {}),
    ("pce", {"floor": 0.0}),
    ("pce", {"floor": 100.0}),
    ("center", {"weight": 0.7}),
    ("group", {"temperature": 2.0}),
    ("group", {"temperature": 2.0, "iterations": 3, "anchors": 1}),
    ("group", {"temperature": 2.0, "iterations": 3, "anchors": 0, "negatives": "shift"}),
    ("group", {"batch_classes": True, "temperature": 1.0, "ce_weight": 0.0}),
    ("group", {"objective": "kl", "temperature": 1.0, "iterations": 2, "anchors": 1}),
    ("group", {"temperature": 2.0, "diagonal": 1.0, "bias": False, "similarity": "cosine"}),
    ("group", {"temperature": 2.0, "diagonal": 0.5, "negatives": "shift", "iterations": 2}),
    ("group", {"temperature": 2.0, "similarity": "gaussian", "bandwidth": 0.7}),
    ("group", {"temperature": 2.0, "iterations": 9, "tolerance": 0.05}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_gradients_are_those_of_finite_differences(batch, name, options):
    z, labels = batch
    loss = made(name, **options)
    loss.train()
    names = [key for key, _ in loss.named_parameters()]

    def value(embeddings, *parameters):
        torch.manual_seed(11)  # the same anchors each time
        changed = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(loss, changed, (embeddings, labels))

    inputs = [z, *(parameter.detach().clone() for parameter in loss.parameters())]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the lambda of", UserWarning)  # the floor is wanted here
        assert gradcheck(value, [tensor.requires_grad_() for tensor in inputs])


def test_gradients_of_the_softmax_in_place_are_those_of_finite_differences():
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: softmax_(x.clone()), [logits])
    assert gradcheck(lambda x: log_sum_exp_(x.clone()), [logits])


def test_softmax_in_place_equals_torchs_for_huge_logits():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4]])
    assert torch.equal(log_sum_exp_(logits.clone()), torch.logsumexp(logits, 1))
    assert torch.allclose(softmax_(logits.clone()), logits.softmax(1))
