"""The table of losses, and what holds for each of them."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch.autograd import gradcheck
from torch.profiler import ProfilerActivity, profile

from retrieval.errors import DmlError
from tests.trainer.losses.batches import CLASSES, DIM, batch, fixed, step
from tests.trainer.losses.references import made
from trainer.losses import LOSSES, build
from trainer.losses.base import Loss

pytestmark = pytest.mark.usefixtures("quiet")
OURS = ["ce", "spce", "pce", "group", "center"]
NAMES = [entry.name for entry in LOSSES]


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
    loss = build(name, CLASSES, DIM)
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
    assert caught.value.fix == (
        "Choose one of these: --loss NAME\nTo see what each is: dmltool list losses"
    )
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


def test_a_module_with_a_mistake_in_its_syntax_is_named(tmp_path, monkeypatch):
    (tmp_path / "mistaken.py").write_text("class Loss(:")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DmlError, match="cannot be imported") as caught:
        build("mistaken:Loss", CLASSES, DIM)
    assert "mistaken.py, line 1" in caught.value.why


class Unfinished(Loss):
    """A loss that does not define `split`."""


def test_a_loss_of_ones_own_that_cannot_be_built_is_not_a_bug_of_dmltool():
    with pytest.raises(DmlError) as caught:
        build(f"{__name__}:Unfinished", CLASSES, DIM)
    assert caught.value.what.endswith("cannot be built.")
    assert "split" in caught.value.why


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
def test_gradients_are_those_of_finite_differences(exact, name, options):
    z, labels = exact
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


@pytest.mark.parametrize("entry", LOSSES, ids=lambda entry: entry.name)
def test_the_table_knows_which_losses_have_weights_of_their_own(entry):
    loss = build(entry.name, 4, 8)
    assert entry.own_weights == any(not n.startswith("head.") for n, _ in loss.named_parameters())
