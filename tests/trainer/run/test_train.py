"""Runs: what they leave behind, how they end, and that they go on as if never interrupted."""

import json
import os
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from retrieval.errors import DmlError
from tests.forks import Forked
from tests.ranks import together
from tests.trainer.run.runs import (
    Interrupting,
    Interruption,
    assert_same_bits,
    assert_same_files,
    fit,
    weights,
)
from tests.trainer.small import RUN_FILES, draw_pictures, small_config
from trainer.config import Batches, Loss, Phase
from trainer.resolve import resolve
from trainer.run import checkpoint, train
from trainer.run.metrics_log import read_metrics

LOSSES = {
    "ce": Loss("ce"),  # dropout draws
    "group": Loss("group"),  # anchors are drawn
    "proxy_nca": Loss("proxy_nca"),  # parameters of its own
    "margin": Loss("margin", miner="distance_weighted"),  # negatives are drawn
}


@pytest.mark.parametrize(
    ("select", "score", "better"),
    [("val", 0.6, True), ("val", 0.5, True), ("val", 0.4, False), ("last", 0.4, True)],
)
def test_the_best_epoch_is_the_last_of_those_with_the_highest_score(select, score, better, change):
    training = SimpleNamespace(
        config=change(run={"select": select}), best={"epoch": 1, "scores": {"l2": 0.9, "cos": 0.5}}
    )
    assert train.is_better(training, {"l2": 0.1, "cos": score}) == better


def test_the_test_set_is_scored_with_the_best_epoch(change, tmp_path, monkeypatch):
    scored = []
    monkeypatch.setattr(train, "is_better", lambda training, _: training.best is None)
    monkeypatch.setattr(
        train.validation, "score_test", lambda job: scored.append(job.embedder.state_dict())
    )
    train.train(change(schedule={"epochs": 2}), tmp_path / "run")
    best, last = (checkpoint.load(tmp_path / "run" / name) for name in ("best.pt", "last.pt"))
    assert (best["epoch"], last["epoch"]) == (1, 2)
    assert_same_bits(scored[0], best["embedder"])


def test_a_run_leaves_a_complete_folder(trained):
    folder, result = trained
    names = {path.name for path in folder.iterdir()}
    assert names == RUN_FILES
    start, *records = read_metrics(folder)
    assert start["epoch"] == 0
    assert [record["epoch"] for record in records] == [1, 2, 3]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[0]["parts"].keys() == {"tightness", "contrastive"}
    assert records[0]["scores"].keys() == {"cos", "l2"}
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(result))
    assert 0 < result["test"]["distances"]["cos"]["nmi"]["mean"] <= 1
    assert result["test"]["settings"]["recall_at"] == [1, 2]  # as the settings say
    assert result["test"]["distances"]["cos"]["recall"]["1"] > 0.5
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"]
    assert environment["device"] == "cpu"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_epoch_is_that_of_the_highest_validation_recall(change, tmp_path):
    result = fit(change(schedule={"epochs": 6}), tmp_path / "run")
    scores = [record["scores"]["cos"] for record in read_metrics(tmp_path / "run")[1:]]
    assert len(set(scores)) > 2  # the pictures are not so easy that nothing is to be picked
    best = max(epoch for epoch, score in enumerate(scores, 1) if score == max(scores))
    assert result["best_epoch"] == best  # of equals the later one
    assert checkpoint.load(tmp_path / "run" / "best.pt")["epoch"] == best
    assert checkpoint.load(tmp_path / "run" / "last.pt")["epoch"] == 6


def test_the_same_seed_gives_the_same_weights_with_any_number_of_workers(whole, change, tmp_path):
    fit(change(data={"workers": 2, "cache": "none"}), tmp_path / "run")
    assert_same_bits(weights(whole), weights(tmp_path / "run"))


def test_another_seed_gives_other_weights(whole, change, tmp_path):
    fit(change(run={"seed": 1}), tmp_path / "run")
    key = "embedder.projection.weight"
    assert not torch.equal(weights(whole)[key], weights(tmp_path / "run")[key])


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_interrupted_anywhere_goes_on_bit_for_bit(loss, change, tmp_path):
    config = change(loss=LOSSES[loss], optimizer={"momentum": 0.9, "name": "sgd", "clip": 1.0})
    if loss == "group":
        config = change(loss=LOSSES[loss], phase=Phase(1), batches=Batches(classes=4, images=4))
    fit(config, tmp_path / "whole")
    step = random.Random(loss).randrange(3)  # 48 images, 16 a batch
    for after in (3 + step, 6 + step):  # of the second epoch, and of the third
        folder = tmp_path / f"cut{after}"
        with pytest.raises(Interruption):
            fit(config, folder, Interrupting(after))
        fit(config, folder, resume=True)
        assert_same_bits(weights(tmp_path / "whole"), weights(folder))
        assert_same_bits(weights(tmp_path / "whole", "best.pt"), weights(folder, "best.pt"))
        assert_same_files(tmp_path / "whole", folder)
        names = {path.name for path in folder.iterdir()}
        assert names == {path.name for path in (tmp_path / "whole").iterdir()}
        kept = ("epoch", "loss", "parts", "scores", "best", "lr")
        for one, other in zip(read_metrics(tmp_path / "whole"), read_metrics(folder), strict=True):
            assert [one[key] for key in kept] == [other[key] for key in kept]


def wait_for_checkpoint(folder, process):
    while not (folder / "last.pt").exists() and process.running():
        time.sleep(0.02)


def test_a_run_killed_at_random_moments_ends_with_the_same_weights(change, tmp_path):
    config = change(schedule={"epochs": 5}, data={"workers": 1})
    (tmp_path / "config.toml").write_text(config.to_toml())
    began = time.monotonic()
    fit(config, tmp_path / "whole")
    seconds = time.monotonic() - began
    folder, moments = tmp_path / "killed", random.Random(1)
    args = ["--config", tmp_path / "config.toml", "--out", folder]
    for _ in range(2):
        process = Forked("-m", "cli", "train", *args)
        wait_for_checkpoint(folder, process)
        time.sleep(moments.uniform(0, seconds))
        process.kill()
        assert checkpoint.load(folder)["epoch"] >= 0  # whole at any moment
        args = ["--resume", folder]
    done = Forked("-m", "cli", "train", *args).end()
    assert done[0] == 0, done
    assert_same_bits(weights(tmp_path / "whole"), weights(folder))
    assert_same_bits(weights(tmp_path / "whole", "best.pt"), weights(folder, "best.pt"))
    assert_same_files(tmp_path / "whole", folder)
    assert [r["epoch"] for r in read_metrics(folder)] == list(range(6))
    left = {path.name for path in folder.iterdir()}
    assert left == {path.name for path in (tmp_path / "whole").iterdir()}


def test_resuming_a_finished_run_changes_nothing(config, trained, finished):
    before = (finished / "last.pt").read_bytes()
    assert train.train(config, finished, resume=True) == trained[1] | {"run": str(finished)}
    assert (finished / "last.pt").read_bytes() == before


def test_names_that_are_not_utf8_are_trained_on(change, tmp_path):
    odd = os.fsdecode(b"caf\xe9")
    draw_pictures(tmp_path / "data").joinpath("class3").rename(tmp_path / "data" / odd)
    config = change(data={"root": str(tmp_path / "data")}, schedule={"epochs": 1})
    train.train(config, tmp_path / "run")
    assert odd in checkpoint.load(tmp_path / "run")["label_names"]


# The presets of Cars, and sop-group, differ from these in numbers only.
GROUP_PRESETS = ("cub-group", "cub-group-code", "sop-group-code")


@pytest.mark.parametrize("name", GROUP_PRESETS)
def test_group_presets_train_on_small_pictures(name, pictures, tmp_path):
    """With all of their settings but the data set, sizes, network and the number of epochs."""
    flags = {"data.dataset": "folder", "data.root": str(pictures), "data.workers": 0}
    flags |= {"network.backbone": "smallcnn", "network.weights": "none"}
    flags |= {"input.resize": 18, "input.crop": 16}
    flags |= {"batches.classes": 3, "batches.images": 4, "schedule.epochs": 2, "phase.epochs": 1}
    flags |= {"run.device": "cpu", "run.select": "last"}
    config, _ = resolve(name, None, flags)
    result = fit(config, tmp_path / "run")
    assert result["epochs"] == 2
    parts = [set(record["parts"]) for record in read_metrics(tmp_path / "run")]
    last = {"refined", "ce"} if name.endswith("code") else {"refined"}
    assert parts == [{"ce"}, last]
    head = checkpoint.load(tmp_path / "run")["loss"]
    assert ("head.bias" in head) == name.endswith("code")
    assert head["head.weight"].shape == (8, 1024 if name.endswith("code") else 512)


@pytest.mark.parametrize("select", ["test", "last"])
def test_without_validation_all_training_classes_are_learnt(select, change, tmp_path):
    result = train.train(change(run={"select": select}), tmp_path / "run", test=select == "test")
    state = checkpoint.load(tmp_path / "run" / "best.pt")
    assert len(state["label_names"]) == 8
    assert result["select"] == select
    if select == "last":
        assert (result["best_epoch"], result["scores"], result["baselines"]) == (3, {}, {})
        assert [record["epoch"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3]
    else:
        chosen = read_metrics(tmp_path / "run")[result["best_epoch"]]["scores"]["cos"]
        assert result["test"]["distances"]["cos"]["recall"]["1"] == chosen


def test_half_precision_trains_and_the_loss_is_float32(change, tmp_path, bf16):
    fit(change(run={"precision": "bf16"}, schedule={"epochs": 2}), tmp_path / "run")
    records = read_metrics(tmp_path / "run")[1:]
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(v.dtype == torch.float32 for v in weights(tmp_path / "run").values() if v.ndim)


TORCHRUN = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from cli import main
def dmltool(*words):
    main(words, prog_name="dmltool", standalone_mode=False)
start = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
elastic_launch(LaunchConfig(1, 1, 2, **start), dmltool)(*sys.argv[1:])
"""
"""What torchrun does for two processes, but that they are forked and do not start anew."""


def test_two_processes_train_as_one(change, tmp_path):
    """Frozen BatchNorm: torch has no synchronised one for the CPU."""
    log = {"log": ("tensorboard",)}
    config = change(
        network={"freeze_batchnorm": True}, loss=Loss("spce"), run=log, schedule={"epochs": 2}
    )
    (tmp_path / "config.toml").write_text(config.to_toml())
    fit(config, tmp_path / "one")
    words = ("--config", tmp_path / "config.toml", "--out", tmp_path / "two", "--json")
    code, told, errors = Forked("-c", TORCHRUN, "train", *words).end()
    assert code == 0, errors
    result = json.loads(told)  # one process tells it
    chosen = read_metrics(tmp_path / "two")[result["best_epoch"]]
    assert result["scores"] == chosen["scores"]
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-4)
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1  # of the first process


RANK = """
import os, sys
from trainer.run import train
honest, moment = train.train_epoch, sys.argv.pop(1)
def ended(training, epoch):
    if os.environ["RANK"] == "1" and epoch == 1:
        os._exit(9)
    return honest(training, epoch)
if moment == "training":
    train.train_epoch = ended
from cli import main
main(prog_name="dmltool")
"""


@pytest.mark.parametrize("moment", ["training", "data"])
def test_a_rank_that_ends_ends_the_others_and_its_reason_is_told_once(moment, config, tmp_path):
    """Without torchrun, which would end them by itself."""
    (tmp_path / "config.toml").write_text(config.to_toml())
    more = ["--data", str(tmp_path / "nowhere")] if moment == "data" else []
    out = ["--config", tmp_path / "config.toml", "--out", tmp_path / "run", *more]
    ranks = together(2, "-c", RANK, moment, "train", *out)
    told = [rank.stderr for rank in ranks]
    lost, survivor = (1, 0) if moment == "training" else (0, 1)
    assert ranks[survivor].code == 1, told
    assert f"Error: Rank {survivor} stops, because rank {lost} on " in told[survivor]
    assert "bug in dmltool" not in "".join(told)
    assert "Traceback" not in "".join(told)
    if moment == "data":
        assert ranks[lost].code == 1
        assert "".join(told).count("There is no folder") == 1


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"data": {"root": "nowhere"}}, "nowhere"),
        ({"data": {"val_fraction": 0.0}}, "no images to choose the best epoch by"),
        ({"batches": {"classes": 20, "images": 4}}, "a batch needs 20 classes"),
        ({"batches": {"classes": 4, "images": 40}}, "fewer than 40 images"),
        ({"run": {"device": "cuda:7"}}, "'cuda:7' cannot be used"),
        ({"loss": {"monitor": ("pce",), "name": "spce"}}, "pce needs a loss with a linear head"),
        ({"loss": {"options": {"smoothin": 0.2}}}, "'smoothing'"),
        ({"network": {"backbone": "resnet19"}}, "resnet1"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_written(tables, told, change, tmp_path):
    with pytest.raises(DmlError) as caught:
        train.train(change(**tables), tmp_path / "run")
    assert told in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_ranks_compare_settings_and_what_is_to_be_done_but_not_where_files_are(
    tmp_path, monkeypatch
):
    seen = []

    def refuse(options, world, may_differ):
        seen.append(options)
        assert may_differ == "run.device, run.threads"
        raise DmlError("Compared.", "", "")

    monkeypatch.setattr("retrieval.distributed.processes.require_same_options", refuse)
    config = small_config(tmp_path)
    for n, more in enumerate(({}, {"resume": True}, {"test": False})):
        here = replace(
            config,
            data=replace(config.data, root=f"{n}", options={"images": f"{n}", "seed": 3}),
            network=replace(config.network, weights=f"{n}.pt"),
        )
        with pytest.raises(DmlError, match="Compared"):
            train.train(here, tmp_path / f"{n}", **more)
    assert [(given.pop("resume"), given.pop("test")) for given in seen] == [
        (False, True),
        (True, True),
        (False, False),
    ]
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["data.options"] == {"seed": 3}
