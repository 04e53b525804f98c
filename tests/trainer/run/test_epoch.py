"""Epochs: their losses and monitors, their phases, and shares of several processes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.amp import GradScaler

from retrieval.errors import DmlError
from tests.trainer.run.runs import (
    Interrupting,
    Interruption,
    assert_same_bits,
    assert_same_files,
    fit,
    weights,
)
from tests.trainer.small import small_config
from trainer.config import Batches, Config, Loss, Optimizer, Phase, Schedule
from trainer.data.loading import Loader
from trainer.run import checkpoint, optimizers, train
from trainer.run.epoch import epoch_plan, steps_of_phase
from trainer.run.metrics_log import read_metrics
from trainer.run.optimizers import rate


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    config, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        optimizers, "rate", lambda _, step, steps, __: 1.0 if step < steps else 1e30
    )
    with pytest.raises(
        DmlError, match=r"The loss is (nan|inf|-inf) at step 2 of 3 in epoch 2\."
    ) as caught:
        train.train(config, tmp_path / "run")
    assert "end of epoch 1" in str(caught.value)
    state = checkpoint.load(tmp_path / "run")
    assert state["epoch"] == 1
    assert all(v.isfinite().all() for v in state["embedder"].values() if v.is_floating_point())


def test_monitored_losses_are_recorded_beside_the_loss(change, tmp_path):
    loss = Loss("ce", {"dropout": 0.0, "smoothing": 0.0}, monitor=("spce", "pce"))
    fit(change(loss=loss, schedule={"epochs": 1}), tmp_path / "run")
    monitor = read_metrics(tmp_path / "run")[1]["monitor"]
    assert monitor.keys() >= {"spce", "spce/tightness", "spce/contrastive", "pce"}
    assert all(np.isfinite(value) for value in monitor.values())


def test_a_monitored_value_that_is_not_a_number_does_no_harm(change, tmp_path, monkeypatch):
    from trainer.losses.monitor import Monitors

    monkeypatch.setattr(Monitors, "measure", lambda *_: {"spce": float("nan")})
    config = change(
        loss={"monitor": ("spce",)}, run={"log": ("tensorboard",)}, schedule={"epochs": 1}
    )
    fit(config, tmp_path / "run")
    assert read_metrics(tmp_path / "run")[1]["monitor"] == {"spce": None}


def test_monitoring_does_not_change_the_result(whole, change, tmp_path):
    fit(change(loss={"monitor": ("spce", "pce")}), tmp_path / "run")
    assert_same_bits(weights(whole), weights(tmp_path / "run"))


@pytest.mark.parametrize("phase", [0, 1])
def test_a_length_scales_the_embeddings_of_loss_head_and_monitors(
    phase, change, tmp_path, monkeypatch
):
    seen = {"loss": set(), "head": set(), "monitor": set()}

    def noted(name, method):
        def call(self, embeddings, *rest):
            lengths = torch.linalg.vector_norm(embeddings, dim=1)
            seen[name] |= {round(length, 3) for length in lengths.tolist()}
            return method(self, embeddings, *rest)

        return call

    from trainer.losses.ce import CrossEntropy
    from trainer.losses.monitor import Monitors

    monkeypatch.setattr(CrossEntropy, "split", noted("loss", CrossEntropy.split))
    monkeypatch.setattr(Monitors, "measure", noted("monitor", Monitors.measure))
    monkeypatch.setattr(torch.nn.Linear, "forward", noted("head", torch.nn.Linear.forward))
    config = change(
        loss=Loss("ce", {"dropout": 0.0}, length=4.0, monitor=("spce",)),
        phase=Phase(phase),
        schedule={"epochs": 1},
    )
    fit(config, tmp_path / "run")
    assert seen["monitor"] == {4.0}
    assert 4.0 in seen["head"]
    assert seen["loss"] == ({4.0} if phase == 0 else set())


def of_two_phases(config):
    """The path of *-group-code: a phase with settings of its own, then another optimiser."""
    own = {"lr": 3e-4, "eps": 1e-2, "weight_decay": 0.0}
    decay = {"weight_decay": 1e-3, "decay_all": True, "decoupled": True}
    return replace(
        config,
        loss=Loss("group", {"diagonal": 1.0, "anchors": 1}),
        phase=Phase(2, batch=8, augment=False, optimizer=own),
        batches=Batches(classes=4, images=4, sampling="classes"),
        optimizer=Optimizer(name="radam", lr=2e-3, **decay),
        schedule=Schedule(name="step", milestones=(3,), epochs=4),
    )


@pytest.fixture(scope="module")
def phases(pictures, tmp_path_factory):
    """The folder of a run of two phases, and the shape of each epoch and if it is unchanged."""
    folder, seen, whole = tmp_path_factory.mktemp("phases") / "run", [], Loader.epoch

    def noted(self, plan, keys):
        seen.append((plan.shape, keys is None))
        return whole(self, plan, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "epoch", noted)
        fit(of_two_phases(small_config(pictures)), folder)
    return folder, seen


def test_the_first_epochs_of_a_two_phase_run_are_classification(phases, change, tmp_path):
    records = read_metrics(phases[0])[1:]
    parts = [set(record["parts"]) for record in records]
    assert parts == [{"ce"}, {"ce"}, {"refined", "ce"}, {"refined", "ce"}]
    assert [record["lr"] for record in records] == pytest.approx([3e-4, 3e-4, 2e-3, 2e-4])
    state = checkpoint.load(phases[0] / "last.pt")["optimizer"]
    steps = {int(each["step"]) for each in state["state"].values()}
    assert steps == {2 * (48 // 16)}  # those since the phase ended: a new optimiser
    assert {group["eps"] for group in state["param_groups"]} == {1e-8}
    with pytest.raises(DmlError, match="no head to classify with"):
        train.train(change(loss=Loss("spce"), phase=Phase(1)), tmp_path / "other")


def test_each_step_has_its_rate_and_each_epoch_its_random_numbers(change, tmp_path, monkeypatch):
    rates, changes, seeds = [], [], []
    loaded, set_rate = Loader.epoch, optimizers.set_rate

    def epoch(self, plan, keys):
        changes.append(set(keys.ravel().tolist()))
        seeds.append(torch.initial_seed())  # of dropout and anchors
        return loaded(self, plan, keys)

    def noted(optimizer, factor):
        rates.append(factor)
        set_rate(optimizer, factor)

    monkeypatch.setattr(Loader, "epoch", epoch)
    monkeypatch.setattr(optimizers, "set_rate", noted)
    fit(change(schedule={"epochs": 2, "name": "cosine", "warmup": 0}), tmp_path / "run")
    assert rates == pytest.approx([(1 + np.cos(np.pi * step / 6)) / 2 for step in range(6)])
    assert seeds[0] != seeds[1]
    assert [len(each) for each in changes] == [48, 48]
    assert not changes[0] & changes[1]


@pytest.fixture
def scaled(monkeypatch):
    """Scale gradients as with fp16, which not every processor computes; the scale soon grows."""

    def scaler(device, enabled):
        return GradScaler(device, init_scale=1024.0, growth_interval=2)

    monkeypatch.setattr(torch.amp, "GradScaler", scaler)


@pytest.mark.usefixtures("scaled")
def test_gradients_are_clipped_to_the_norm_of_the_settings(change, tmp_path, monkeypatch):
    norms, step = [], torch.optim.SGD.step

    def noted(self, *args):
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
        return step(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", noted)
    fit(change(optimizer=Optimizer("sgd", clip=0.01), schedule={"epochs": 1}), tmp_path / "run")
    assert norms == pytest.approx([0.01] * 3, rel=1e-3)


@pytest.mark.usefixtures("scaled")
def test_a_run_with_scaled_gradients_goes_on_as_if_never_interrupted(change, tmp_path):
    config = change(schedule={"epochs": 2})
    fit(config, tmp_path / "whole")
    with pytest.raises(Interruption):
        fit(config, tmp_path / "cut", Interrupting(4))
    fit(config, tmp_path / "cut", resume=True)
    assert_same_files(tmp_path / "whole", tmp_path / "cut")


def test_a_run_that_ends_in_a_phase_of_another_optimiser_is_resumed(change, tmp_path):
    config = change(phase=Phase(1, optimizer={"name": "sgd", "momentum": 0.9}))
    with pytest.raises(Interruption):
        fit(config, tmp_path / "cut", Interrupting(4))  # the checkpoint is that of epoch 1
    fit(config, tmp_path / "cut", resume=True)
    assert checkpoint.load(tmp_path / "cut")["epoch"] == 3


@pytest.mark.parametrize(("sampling", "most"), [("classes", 5), ("images", 10)])
def test_the_settings_decide_how_often_a_class_is_drawn(change, sampling, most):
    targets = np.repeat(np.arange(4), (2, 4, 8, 26))
    config = change(batches=Batches(classes=2, images=2, sampling=sampling))
    plan = epoch_plan(config, targets, epoch=0)  # 10 batches of 2 classes
    assert np.bincount(targets[plan[:, ::2]].ravel())[3] == most


def test_a_phase_sees_its_own_batches_and_unchanged_images(phases):
    assert phases[1] == [((6, 8), True)] * 2 + [((3, 16), False)] * 2  # 48 images of 6 classes


@pytest.mark.parametrize("steps", [5, 9, 12, 16])  # within the phase, at its end, after it
def test_a_run_of_two_phases_goes_on_as_if_never_interrupted(steps, config, phases, tmp_path):
    config, folder = of_two_phases(config), tmp_path / "cut"
    with pytest.raises(Interruption):
        fit(config, folder, Interrupting(steps))
    fit(config, folder, resume=True)
    assert_same_bits(weights(phases[0]), weights(folder))
    assert_same_files(phases[0], folder)


def test_a_batch_that_processes_cannot_share_is_refused(change):
    from retrieval.distributed.world import World
    from trainer.run.epoch import check_shares

    targets = np.repeat(np.arange(8), 20)
    config = change(
        batches={"size": 16, "classes": 0}, phase={"epochs": 1, "batch": 15}, schedule={"epochs": 2}
    )
    with pytest.raises(DmlError, match="batch of 15 images cannot be shared by 2") as caught:
        check_shares(config, targets, 0, World(0, 2, 0))
    assert caught.value.fix.endswith("2 divides: --set phase.batch=N.")
    check_shares(config, targets, 1, World(0, 2, 0))
    with pytest.raises(DmlError, match="batch of 16 images cannot be shared by 3") as caught:
        check_shares(config, targets, 1, World(0, 3, 0))
    assert caught.value.fix.endswith("--batch N|CxM.")
    check_shares(config, targets, 0, World(0, 3, 0))


def test_processes_take_all_columns_of_a_batch():
    from retrieval.distributed.world import World
    from trainer.run.epoch import own_columns

    plan = np.arange(30).reshape(2, 15)
    shares = [own_columns(plan, World(rank, 3, rank)) for rank in range(3)]
    assert np.array_equal(np.concatenate(shares, axis=1), plan)


@pytest.mark.parametrize(("phase_batch", "batch"), [(4, 16), (16, 4)])
def test_warmup_counts_the_steps_of_a_phase_with_other_batches(phase_batch, batch):
    """64 images: epochs of 16 and 4 steps, and a warm-up that reaches past the first two."""
    targets = np.repeat(np.arange(8), 8)
    config = Config(
        batches=Batches(size=batch),
        phase=Phase(epochs=2, batch=phase_batch),
        schedule=Schedule(epochs=60, name="constant", warmup=40),
    )
    found = []
    for epoch in range(12):
        steps = len(epoch_plan(config, targets, epoch))
        others = steps_of_phase(config, targets, epoch)
        first = epoch * steps
        found += [rate(config.schedule, first + n, steps, others) for n in range(steps)]
    warmup = min(40, (2 * 64 // phase_batch + 58 * 64 // batch) // 10)
    expected = [min(1.0, (n + 1) / warmup) for n in range(len(found))]
    assert found == pytest.approx(expected, abs=1e-12)
