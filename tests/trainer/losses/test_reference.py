"""Each loss of ours against loops over float64 numbers, written from the papers' formulas."""

import math
import warnings

import pytest
import torch
from torch.autograd import gradcheck

from trainer.losses import build
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


def loop_spce(z, labels):
    n = len(z)
    tight = contrast = 0.0
    for i in range(n):
        tight -= sum(dot(z[i], z[j]) for j in range(n) if labels[j] == labels[i]) / n**2
        inner = (
            sum(dot(z[i], z[j]) for j in range(n) if labels[j] == k) / n for k in range(CLASSES)
        )
        contrast += math.log(sum(math.exp(v) for v in inner)) / n
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


def loop_group(z, labels, logits, anchors, *, temperature, iterations, negatives, classes):
    """X(T) over the given classes, eqs. 1 to 4."""
    n = len(z)
    w = [[0.0 if i == j else pearson(z[i], z[j]) for j in range(n)] for i in range(n)]
    if negatives == "clamp":
        w = [[max(v, 0.0) for v in row] for row in w]
    else:
        low = min(0.0, *(w[i][j] for i in range(n) for j in range(n) if i != j))
        w = [[0.0 if i == j else w[i][j] - low for j in range(n)] for i in range(n)]
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
        x = [[v / sum(row) for v in row] if sum(row) > 0 else x[i] for i, row in enumerate(new)]
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
    parts = made("pce", floor=0.0).parts(z, labels, head=ce.head)
    assert sum(parts.values()).item() == pytest.approx(expected, rel=1e-9)


def test_center_is_half_the_squares_to_the_class_means_plus_cross_entropy(batch):
    z, labels = batch
    loss = made("center", weight=0.7)
    rows, tight = z.tolist(), 0.0
    for i, y in enumerate(LABELS):
        own = [rows[j] for j in range(len(rows)) if LABELS[j] == y]
        mean = [sum(column) / len(own) for column in zip(*own, strict=True)]
        tight += 0.35 * sum((a - b) ** 2 for a, b in zip(rows[i], mean, strict=True))
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


VARIANTS = [
    ("ce", {"dropout": 0.0}),
    ("spce", {}),
    ("pce", {"floor": 0.0}),
    ("pce", {"floor": 100.0}),
    ("center", {"weight": 0.7}),
    ("group", {"temperature": 2.0}),
    ("group", {"temperature": 2.0, "iterations": 3, "anchors": 1}),
    ("group", {"temperature": 2.0, "iterations": 3, "anchors": 0, "negatives": "shift"}),
    ("group", {"batch_classes": True, "temperature": 1.0, "ce_weight": 0.0}),
    ("group", {"objective": "kl", "temperature": 1.0, "iterations": 2, "anchors": 1}),
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
