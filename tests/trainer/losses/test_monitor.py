"""What is watched equals the losses themselves, and watching changes nothing."""

import math
import warnings

import pytest
import torch
from torch import nn

from retrieval.errors import DmlError
from trainer.losses import LOSSES, build, check_monitors
from trainer.losses.monitor import build_monitors

CLASSES, DIM = 5, 3


@pytest.fixture
def batch():
    torch.manual_seed(0)
    return torch.randn(40, DIM, requires_grad=True), torch.arange(40) % CLASSES


@pytest.fixture
def ce():
    torch.manual_seed(1)
    loss = build("ce", CLASSES, DIM)
    nn.init.normal_(loss.head.weight, std=0.3)
    nn.init.normal_(loss.head.bias, std=0.3)
    return loss


def test_spce_and_its_parts_are_those_of_the_loss(batch, ce):
    values = build_monitors(["spce"], CLASSES, DIM, ce).measure(*batch)
    parts = build("spce", CLASSES, DIM).parts(*batch)
    assert values == {
        "spce": pytest.approx(sum(parts.values()).item()),
        "spce/tightness": pytest.approx(parts["tightness"].item()),
        "spce/contrastive": pytest.approx(parts["contrastive"].item()),
    }


def test_pce_is_of_the_head_that_trains(batch, ce):
    monitors = build_monitors(["pce"], CLASSES, DIM, ce)
    values = monitors.measure(*batch)
    pce = build("pce", CLASSES, DIM)
    pce.head = ce.head
    parts = pce.parts(*batch)
    assert values["pce"] == pytest.approx(sum(parts.values()).item())
    assert values["pce/tightness"] == pytest.approx(parts["tightness"].item())
    assert values["pce/contrastive"] == pytest.approx(parts["contrastive"].item())
    assert monitors.notes == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("classes", [1, 2, 40])
def test_lambda_is_the_smallest_eigenvalue_of_all_weighted_scatters(classes, seed):
    torch.manual_seed(seed)
    z, labels = 30 * torch.randn(60, DIM), torch.arange(60) % classes
    loss = build("ce", classes, DIM)
    nn.init.normal_(loss.head.weight, std=0.02)
    values = build_monitors(["pce"], classes, DIM, loss).measure(z, labels)
    p = loss.head(z).softmax(1)
    z1 = torch.cat([z, torch.ones(len(z), 1)], 1)
    scatters = torch.einsum("ik,id,ie->kde", p - p * p, z1, z1).double() / len(z)
    smallest = torch.linalg.eigvals(scatters).real.min().item()
    assert classes == 1 or smallest > 2e-3  # not the floor
    assert values["pce/lambda"] == pytest.approx(max(smallest, 1e-3), rel=1e-3)


def test_a_floored_lambda_is_a_note_and_not_a_warning(batch, ce):
    z, labels = batch
    monitors = build_monitors(["spce", "pce"], CLASSES, DIM, ce)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            values = monitors.measure(z[:3], labels[:3])
    assert values["pce/lambda"] == 1e-3
    assert len(monitors.notes) == 1
    assert "3 in 4 dimensions" in monitors.notes[0]
    assert "0.001 is used" in monitors.notes[0]


def test_watching_follows_the_head_as_it_learns(batch, ce):
    monitors = build_monitors(["pce"], CLASSES, DIM, ce)
    before = monitors.measure(*batch)
    nn.init.zeros_(ce.head.weight)
    assert monitors.measure(*batch)["pce"] != pytest.approx(before["pce"])


@pytest.mark.parametrize("name", ["spce", "triplet", "proxy_nca", "pml:NormalizedSoftmaxLoss"])
def test_pce_without_a_linear_head_names_the_losses_that_have_one(name):
    check_monitors(["spce"], name, {})
    with pytest.raises(DmlError) as caught:
        check_monitors(["spce", "pce"], name, {})
    assert "ce, pce, group, center" in caught.value.why
    assert "--monitor" in caught.value.fix


@pytest.mark.parametrize("name", ["ce", "pce", "group", "center"])
def test_losses_with_a_head_can_be_watched(batch, name):
    assert name in [entry.name for entry in LOSSES]
    values = build_monitors(["pce"], CLASSES, DIM, build(name, CLASSES, DIM)).measure(*batch)
    assert math.isfinite(values["pce"])


WITH_WEIGHTS = ["margin", "proxy_nca", "norm_softmax", "soft_triple", "arcface"]
ANY = [entry.name for entry in LOSSES if entry.name not in WITH_WEIGHTS]


@pytest.mark.parametrize("name", ANY)
def test_any_loss_without_weights_of_its_own_can_be_watched(batch, ce, name):
    values = build_monitors([name], CLASSES, DIM, ce).measure(*batch)
    parts = {key for key in values if "/" in key} - {"pce/lambda"}
    assert math.isfinite(values[name])
    if parts:
        assert sum(values[key] for key in parts) == pytest.approx(values[name])


@pytest.mark.parametrize("name", [*WITH_WEIGHTS, "pml:ProxyAnchorLoss"])
def test_a_loss_with_weights_that_nobody_trains_cannot_be_watched(name):
    with pytest.raises(DmlError) as caught:
        check_monitors([name], "ce", {})
    assert "weights of its own" in caught.value.why
    assert "--monitor" in caught.value.fix


def test_cross_entropy_beside_another_loss_is_that_of_its_head_without_dropout(batch):
    group = build("group", CLASSES, DIM)
    values = build_monitors(["ce"], CLASSES, DIM, group).measure(*batch)
    smoothing = 0.1 * CLASSES / (CLASSES - 1)
    expected = nn.functional.cross_entropy(
        group.head(batch[0]), batch[1], label_smoothing=smoothing
    )
    assert values["ce"] == pytest.approx(expected.item(), rel=1e-6)


def test_a_monitor_that_fails_is_a_note_and_nan(batch, ce, monkeypatch):
    monitors = build_monitors(["triplet"], CLASSES, DIM, ce)
    monkeypatch.setattr(monitors.watched["triplet"], "loss", None)
    for _ in range(2):
        assert math.isnan(monitors.measure(*batch)["triplet"])
    assert len(monitors.notes) == 1
    assert "the monitor triplet cannot be computed" in monitors.notes[0]


def test_watching_draws_no_random_numbers_and_leaves_no_gradient(batch, ce):
    z, labels = batch
    before = torch.get_rng_state()
    build_monitors(["spce", "pce", "group", "ce"], CLASSES, DIM, ce).measure(z, labels)
    assert torch.equal(torch.get_rng_state(), before)
    assert z.grad is None
    assert ce.head.weight.grad is None


def test_half_precision_embeddings_are_measured_in_float32(batch, ce):
    z, labels = batch
    monitors = build_monitors(["spce", "pce"], CLASSES, DIM, ce)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = monitors.measure(z.bfloat16(), labels)
    assert half == pytest.approx(monitors.measure(z.bfloat16().float(), labels))


def test_embeddings_that_are_not_numbers_give_nan_and_no_error(batch, ce):
    z, labels = batch
    z = z.detach().clone()
    z[3, 1] = math.nan
    monitors = build_monitors(["spce", "pce"], CLASSES, DIM, ce)
    values = monitors.measure(z, labels)
    assert all(math.isnan(values[name]) for name in ("spce", "pce", "pce/lambda"))
    assert monitors.notes == []


def test_nothing_to_watch_gives_nothing(batch, ce):
    assert build_monitors([], CLASSES, DIM, ce).measure(*batch) == {}
