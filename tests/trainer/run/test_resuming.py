"""A run is resumed on the data that it was trained on; leftovers go, and other threads are told."""

import json
from dataclasses import replace

import pytest
import torch

from retrieval.errors import DmlError
from tests.trainer.run.runs import Interrupting, Interruption, fit, told_by
from trainer.run import checkpoint, train
from trainer.run.metrics_log import read_metrics


def test_an_epoch_that_was_recorded_but_not_saved_is_recorded_once(config, tmp_path, monkeypatch):
    save, folder = checkpoint.save, tmp_path / "run"

    def interrupted(place, state, best):
        if state["epoch"] == 2:
            raise Interruption
        save(place, state, best)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", interrupted)
        with pytest.raises(Interruption):
            fit(config, folder)
    assert [record["epoch"] for record in read_metrics(folder)] == [0, 1, 2]
    fit(config, folder, resume=True)
    assert [record["epoch"] for record in read_metrics(folder)] == [0, 1, 2, 3]


def test_resuming_with_other_data_is_refused(change, finished):
    other = change(data={"options": {"seed": 3}})
    with pytest.raises(DmlError, match="not the one"):
        train.train(other, finished, resume=True)


def test_another_number_of_threads_is_told(change, tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.resources.processors", lambda: 2)
    texts, config = [], change(schedule={"epochs": 1})
    with pytest.raises(Interruption):
        fit(config, tmp_path / "run", Interrupting(1))
    two = replace(config, run=replace(config.run, threads=2))
    fit(two, tmp_path / "run", told_by(texts), resume=True)
    assert any(text.startswith("1 thread before, 2 now") for text in texts)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["resumed"][0]["threads"] == 2


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[1, 2]",
        b'{"epoch": "x"}',
        b'{"epoch": 1}',
        b'{"epoch": 1, "loss": 0.5, "parts": [], "monitor": {}, "scores_of": "val", "scores": {}}',
        b'{"epoch": 1, "loss": "x", "parts": {}, "monitor": {}, "scores_of": "val", "scores": {}}',
        b'{"epoch": 0, "loss": 1, "parts": {}, "monitor": {}, "scores_of": "val", "scores": {}}',
        b"[" * 100_000,
    ],
)
def test_a_run_whose_metrics_are_damaged_goes_on(line, config, trained, finished):
    metrics = finished / "metrics.jsonl"
    sound = metrics.read_bytes()
    metrics.write_bytes(line + b"\n" + sound)
    found = fit(config, finished, resume=True)
    assert found == trained[1] | {"run": str(finished), "test": None}
    assert metrics.read_bytes() == sound


@pytest.mark.parametrize("text", ["[1]", "null", '{"resumed": 5}', "{"])
def test_a_run_whose_environment_is_damaged_goes_on(text, config, trained, finished):
    (finished / "environment.json").write_text(text)
    found = fit(config, finished, resume=True)
    assert found["scores"] == trained[1]["scores"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved.clear(),
        lambda saved: saved.update(state=[1]),
        lambda saved: saved["state"].update({0: "text"}),
        lambda saved: saved["state"].update({999: saved["state"][0]}),
        lambda saved: saved["state"][0].pop("exp_avg"),
        lambda saved: saved["state"][0].update(exp_avg=torch.zeros(3)),
        lambda saved: saved["state"].clear(),
        lambda saved: saved["state"].pop(0),
        lambda saved: saved.pop("entries") and saved["state"].clear(),  # of an older version
        lambda saved: saved.pop("param_groups"),
        lambda saved: saved["param_groups"].pop(),
        lambda saved: saved["param_groups"][0].update(name="loss/weights"),
        lambda saved: saved["param_groups"][0]["params"].pop(),
    ],
)
def test_a_damaged_state_of_the_optimiser_is_told(damage, change, finished):
    saved = checkpoint.load(finished)
    damage(saved["optimizer"])
    torch.save(saved, finished / "last.pt")
    with pytest.raises(DmlError, match="is damaged") as caught:
        fit(change(schedule={"epochs": 4}), finished, resume=True)
    assert "state of the optimiser" in caught.value.why


def test_the_settings_of_the_optimiser_are_those_of_the_run_not_of_its_state(change, finished):
    saved = checkpoint.load(finished)
    saved["optimizer"]["param_groups"][0] |= {"base_lr": 1e9, "weight_decay": 5.0}
    torch.save(saved, finished / "last.pt")
    config = change(schedule={"epochs": 4})
    fit(config, finished, resume=True)
    group = checkpoint.load(finished)["optimizer"]["param_groups"][0]
    spec = config.optimizer
    assert (group["base_lr"], group["weight_decay"]) == (spec.lr, spec.weight_decay)


def test_a_checkpoint_of_an_older_version_is_resumed(change, finished):
    saved = checkpoint.load(finished)
    saved["optimizer"].pop("entries")
    torch.save(saved, finished / "last.pt")
    fit(change(schedule={"epochs": 4}), finished, resume=True)
    assert checkpoint.load(finished)["epoch"] == 4


def test_what_a_kill_left_behind_is_removed(change, tmp_path):
    config = change(schedule={"epochs": 1})
    with pytest.raises(Interruption):
        fit(config, tmp_path / "run", Interrupting(1))
    names = ("curves.png", "metrics.jsonl", "config.toml", "environment.json", "result.json")
    for name in (*names, "last.pt", "best.pt"):
        (tmp_path / "run" / f".{name}.ab3d0f7e.tmp").write_bytes(b"half")
    fit(config, tmp_path / "run", resume=True)
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
