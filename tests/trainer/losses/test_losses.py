"""The table of losses, and what holds for each of them."""

import subprocess
import sys
import warnings

import pytest
import pytorch_metric_learning.losses
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from retrieval.errors import DmlError
from trainer.losses import LOSSES, build
from trainer.losses.pml import classes

OURS = ["ce", "spce", "pce", "group", "center"]
NAMES = [entry.name for entry in LOSSES]
CLASSES, DIM = 6, 4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _quiet():
    """Small batches need pce's floor, and its warning has a test of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the lambda of the loss 'pce'", UserWarning)
        yield


def batch(n=12, classes=3):
    return torch.randn(n, DIM), torch.arange(n) % classes


def fixed(name):
    """Without chance: no dropout, no anchors, a head that is not zero."""
    options = {"ce": {"dropout": 0.0}, "group": {"anchors": 0}}.get(name, {})
    loss = build(name, CLASSES, DIM, **options)
    generator = torch.Generator().manual_seed(5)
    for parameter in loss.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return loss


def step(loss, z, labels):
    """Value and gradients, after one step of an optimiser that must reach all parameters."""
    z = z.clone().requires_grad_()
    value = loss(z, labels)
    value.backward()
    return value, z.grad, [parameter.grad for parameter in loss.parameters()]


# the table


def test_names_are_unique_and_every_entry_has_a_summary_of_one_line():
    assert len(set(NAMES)) == len(NAMES)
    for entry in LOSSES:
        assert entry.summary
        assert "\n" not in entry.summary
        assert len(entry.summary) < 90


def test_importing_the_table_loads_no_torch():
    code = "import sys, trainer.losses; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_builds_and_trains(name):
    loss = build(name, num_classes=CLASSES, dim=DIM)
    z, labels = batch()
    for _ in range(2):  # the second step shows what the first left behind
        value, by_embedding, by_parameters = step(loss, z, labels)
        assert value.shape == ()
        assert value.dtype == torch.float32
        assert value.isfinite()
        assert by_embedding.isfinite().all()
        assert all(gradient is not None and gradient.isfinite().all() for gradient in by_parameters)
        for parameter in loss.parameters():
            parameter.data -= 0.1 * parameter.grad


@pytest.mark.parametrize("name", NAMES)
def test_parts_add_up_to_the_loss(name):
    loss, (z, labels) = build(name, CLASSES, DIM), batch()
    torch.manual_seed(1)
    parts = loss.parts(z, labels)
    torch.manual_seed(1)
    assert torch.allclose(sum(parts.values()), loss(z, labels))


@pytest.mark.parametrize(
    "name", ["ce", "spce", "pce", "center", "contrastive", "snca", "nca", "multi_similarity"]
)
def test_losses_that_the_paper_splits_have_its_two_parts(name):
    assert set(build(name, CLASSES, DIM).parts(*batch())) == {"tightness", "contrastive"}


@pytest.mark.parametrize("name", NAMES)
def test_state_of_a_loss_restores_its_value(name):
    z, labels = batch()
    loss, other = fixed(name), fixed(name)
    for parameter in other.parameters():
        parameter.data.zero_().add_(0.5)
    other.load_state_dict(loss.state_dict())
    assert torch.equal(loss(z, labels), other(z, labels))


def test_unknown_loss_names_the_nearest():
    with pytest.raises(DmlError) as caught:
        build("gruop", CLASSES, DIM)
    assert "'gruop'" in caught.value.what
    assert "'group'" in caught.value.fix
    assert all(name in caught.value.why for name in NAMES)


@pytest.mark.parametrize("name", ["foo", "pml:foo"])
def test_a_loss_like_none_that_exists_gets_no_suggestion(name):
    with pytest.raises(DmlError) as caught:
        build(name, CLASSES, DIM)
    assert caught.value.fix == "Choose one of these: --loss NAME"
    assert "TripletMarginLoss" in caught.value.why or "triplet" in caught.value.why


@pytest.mark.parametrize(
    ("name", "option", "near"),
    [
        ("ce", "smothing", "smoothing"),
        ("group", "temprature", "temperature"),
        ("pce", "flor", "floor"),
        ("center", "wieght", "weight"),
        ("contrastive", "margn", "margin"),
        ("pml:ContrastiveLoss", "neg_margn", "neg_margin"),
        ("spce", "self_pair", "self_pairs"),
        ("arcface", "scal", "scale"),
        ("pml:MarginLoss", "learnbeta", "learn_beta"),
    ],
)
def test_unknown_option_names_the_nearest(name, option, near):
    with pytest.raises(DmlError) as caught:
        build(name, CLASSES, DIM, **{option: 1})
    assert repr(option) in caught.value.what
    assert repr(near) in caught.value.fix


@pytest.mark.parametrize(
    ("name", "option"), [("spce", "floor"), ("triplet", "loss"), ("group", "dropout")]
)
def test_option_that_cannot_be_is_refused(name, option):
    with pytest.raises(DmlError) as caught:
        build(name, CLASSES, DIM, **{option: 1})
    assert option in caught.value.what


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("ce", "smoothing", 1.0),
        ("ce", "dropout", -0.1),
        ("pce", "floor", -1),
        ("center", "weight", -1),
        ("spce", "scale", 0),
        ("contrastive", "margin", -1),
    ],
)
def test_impossible_option_value_is_named(name, option, value):
    with pytest.raises(DmlError) as caught:
        build(name, CLASSES, DIM, **{option: value})
    assert option in caught.value.what


def test_no_classes_is_an_error():
    with pytest.raises(DmlError):
        build("ce", 0, DIM)


# what holds for each of ours


# n_pairs takes the first pair of each class.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "n_pairs"])
def test_row_order_does_not_matter(name):
    loss, (z, labels) = fixed(name), batch()
    order = torch.randperm(len(z))
    value, by_embedding, _ = step(loss, z, labels)
    loss.zero_grad()
    permuted, by_permuted, _ = step(loss, z[order], labels[order])
    assert torch.allclose(value, permuted, rtol=1e-5, atol=1e-6)
    assert torch.allclose(by_embedding[order], by_permuted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("labels", [[0], [5], [2, 2, 2], [5, 0], [1, 1, 4, 4, 4]])
def test_one_sample_one_class_and_absent_classes_give_finite_gradients(name, labels):
    loss = fixed(name)
    value, by_embedding, by_parameters = step(
        loss, torch.randn(len(labels), DIM), torch.tensor(labels)
    )
    assert value.isfinite()
    assert by_embedding.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in by_parameters)


@pytest.mark.parametrize("name", ["ce", "spce", "group", "center"])
def test_a_single_class_to_learn_costs_nothing(name):
    options = {"center": {"weight": 0.0}}.get(name, {})
    loss = build(name, 1, DIM, **options)
    value = loss(torch.randn(5, DIM), torch.zeros(5, dtype=torch.int64))
    assert value.item() == pytest.approx(0, abs=1e-6)


def test_untrained_cross_entropy_is_the_log_of_the_number_of_classes():
    assert build("ce", CLASSES, DIM)(*batch()).item() == pytest.approx(1.791759, abs=1e-6)


@pytest.mark.parametrize("zero_init", [True, False])
def test_the_head_of_cross_entropy_starts_at_zero_unless_asked(zero_init):
    head = build("ce", 5, DIM, zero_init=zero_init).head
    started_at_zero = not head.weight.any() and not head.bias.any()
    assert started_at_zero == zero_init


def test_absent_classes_cost_spce_as_logit_zero():
    z, labels = batch(classes=2)
    few, many = build("spce", 2, DIM)(z, labels), build("spce", 5, DIM)(z, labels)
    assert many > few
    assert torch.allclose(build("spce", 5, DIM)(0 * z, labels), torch.log(torch.tensor(5.0)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_lower_precision(name, dtype):
    loss, (z, labels) = fixed(name), batch()
    z = z.to(dtype)
    expected = loss(z.float(), labels)
    with torch.autocast("cpu", dtype=dtype):
        value = loss(z, labels)
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    assert all(parameter.dtype == torch.float32 for parameter in loss.parameters())


def peak_bytes(run):
    """The most memory that torch held at a time, above what it held before."""
    run()  # whatever is allocated once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 0
    return peak


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ce", {}),
        ("spce", {}),
        ("pce", {}),
        ("center", {}),
        ("group", {"iterations": 3}),
        ("group", {"iterations": 3, "negatives": "shift"}),
        ("group", {"objective": "kl"}),
    ],
)
def test_no_more_memory_than_one_matrix_of_pairs_and_one_of_classes(name, options):
    n, classes = 400, 4096
    loss = build(name, classes, DIM, **options)
    z, labels = torch.randn(n, DIM), torch.arange(n) % 40
    with torch.no_grad():
        peak = peak_bytes(lambda: loss(z, labels))
    matrices = 4 * (n * n + n * classes)
    blocks = 4 * 2 * n * 512 + n * n  # columns that are worked on; a mask
    small = 4 * 40 * (n + classes) * DIM
    assert peak < matrices + blocks + small
    assert blocks + small < 4 * n * classes  # one more matrix would be seen


@pytest.mark.parametrize(("name", "options"), [("ce", {}), ("spce", {}), ("center", {})])
def test_training_keeps_no_second_matrix_of_classes(name, options):
    n, classes = 400, 4096
    loss = build(name, classes, DIM, **options)
    z, labels = torch.randn(n, DIM, requires_grad=True), torch.arange(n) % 40
    matrices = 4 * (n * n + n * classes)
    assert peak_bytes(lambda: loss(z, labels)) < matrices + 4 * 40 * (n + classes) * DIM


# pce, the instrument


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


# the adapter


@pytest.mark.parametrize("name", sorted(classes("loss")))
def test_every_loss_class_of_pytorch_metric_learning_trains(name):
    # the library indexes with a list, and hands tensors to SciPy: both are to change some day
    warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning)
    warnings.filterwarnings("ignore", "__array_wrap__ must accept", DeprecationWarning)
    options = {"RankedListLoss": {"margin": 0.4, "Tn": 5.0}}.get(name, {})
    loss = build(f"pml:{name}", CLASSES, DIM, **options)
    z, labels = batch()
    for _ in range(2):
        value, by_embedding, by_parameters = step(loss, z, labels)
        assert value.isfinite()
        assert by_embedding.isfinite().all()
        assert all(gradient is not None for gradient in by_parameters)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("proxy_nca", (CLASSES, DIM)),
        ("norm_softmax", (DIM, CLASSES)),
        ("soft_triple", (DIM, 10 * CLASSES)),
        ("arcface", (DIM, CLASSES)),
        ("pml:SubCenterArcFaceLoss", (DIM, 3 * CLASSES)),
    ],
)
def test_parameters_of_the_library_are_parameters_of_the_loss(name, shape):
    loss = build(name, CLASSES, DIM)
    assert [tuple(parameter.shape) for parameter in loss.parameters()] == [shape]
    assert list(loss.state_dict())


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


def test_another_reducer_leaves_a_loss_in_one_part():
    parts = build("snca", CLASSES, DIM, reducer="SumReducer").parts(*batch())
    assert set(parts) == {"loss"}


@pytest.mark.parametrize("name", ["contrastive", "snca", "multi_similarity"])
@pytest.mark.parametrize("labels", [[0], [2, 2, 2], [5, 0, 1]])
def test_batches_without_positives_or_negatives_train(name, labels):
    value, by_embedding, _ = step(
        build(name, CLASSES, DIM), torch.randn(len(labels), DIM), torch.tensor(labels)
    )
    assert value.isfinite()
    assert by_embedding.isfinite().all()


def test_options_reach_the_library():
    z, labels = batch()
    losses = [build("pml:ContrastiveLoss", CLASSES, DIM, neg_margin=m) for m in (0.5, 1)]
    assert losses[0](z, labels) != losses[1](z, labels)
    assert build("nca", CLASSES, DIM, distance="CosineSimilarity").loss.distance.is_inverted


@pytest.mark.parametrize(
    ("name", "options", "near"),
    [
        ("pml:TripletLoss", {}, "pml:"),
        ("pml:VICRegLoss", {}, "pml:"),
        ("pml:RankedListLoss", {}, "--set loss.options.margin="),
        ("nca", {"distance": "Cosine"}, "CosineSimilarity"),
        ("fastap", {"distance": "CosineSimilarity"}, "Given"),
    ],
)
def test_what_the_library_cannot_do_is_an_error_with_a_way_out(name, options, near):
    with pytest.raises(DmlError) as caught:
        build(name, CLASSES, DIM, **options)
    assert caught.value.why
    assert near in caught.value.fix


@pytest.mark.parametrize("entry", LOSSES, ids=lambda entry: entry.name)
def test_the_table_says_which_losses_have_a_head(entry):
    head = getattr(build(entry.name, CLASSES, DIM), "head", None)
    assert entry.has_head == isinstance(head, torch.nn.Linear)


def test_a_loss_of_ones_own_is_named_by_its_path():
    loss = build("trainer.losses.center:Center", CLASSES, DIM)
    assert type(loss) is type(build("center", CLASSES, DIM))


@pytest.mark.parametrize("path", ["os:system", "no.such.module:Loss", "trainer.losses.ce:Nothing"])
def test_a_path_that_leads_to_no_loss_is_refused_before_it_is_called(path):
    with pytest.raises(DmlError, match=r"is not a loss|cannot be imported"):
        build(path, CLASSES, DIM)
