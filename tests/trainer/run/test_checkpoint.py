"""Checkpoints are written whole or not at all, and hold all that an export needs."""

import errno
import os
from pathlib import Path

import pytest
import torch

from retrieval import files
from retrieval.errors import DmlError
from tests.forks import Forked
from tests.trainer.run.runs import assert_same_bits, fit, weights
from trainer.run import checkpoint, train
from trainer.run.setup import load_embedder


def test_a_checkpoint_is_all_that_an_export_needs(config, finished):
    state = checkpoint.load(finished / "best.pt")
    assert state["config"] == config.to_dict()
    assert len(state["label_names"]) == 6  # 10 classes, 2 for test, 2 for validation
    assert state["preprocessing"].keys() >= {"mean", "std", "resize", "crop", "interpolation"}
    assert state["preprocessing"]["draft"] == 2
    assert state["preprocessing"]["background"] == [255, 255, 255]
    embedder = load_embedder(state)
    assert not embedder.training
    assert embedder(torch.zeros(1, 3, 16, 16)).shape == (1, 16)


def test_a_damaged_checkpoint_names_the_other_one_of_the_run(finished):
    best, last = finished / "best.pt", finished / "last.pt"
    state = torch.load(best, weights_only=True)
    for other, fix in ((True, f"dmltool export {last}"), (False, "Train again")):
        best.unlink()
        torch.save({"format": state["format"], "version": state["version"]}, best)
        if not other:
            last.unlink()
        with pytest.raises(DmlError, match="damaged") as caught:
            checkpoint.load(best)
        assert fix in caught.value.fix
        assert str(best) not in caught.value.fix


def test_a_truncated_checkpoint_names_the_other_one_of_the_run(finished):
    best, last = finished / "best.pt", finished / "last.pt"
    content = best.read_bytes()
    best.unlink()  # it may be another name of last.pt
    for left in (3000, 0):
        best.write_bytes(content[:left])
        with pytest.raises(DmlError, match="cannot be read") as caught:
            checkpoint.load(best)
        assert caught.value.why
        assert f"dmltool export {last}" in caught.value.fix


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epoch", -1),
        ("threads", -3),
        ("best", {"epoch": 1}),
        ("best", {"epoch": 1, "scores": {"cos": "a"}}),
    ],
)
def test_a_checkpoint_with_an_odd_value_names_its_key(key, value, finished):
    torch.save(checkpoint.load(finished) | {key: value}, finished / "last.pt")
    with pytest.raises(DmlError, match="damaged") as caught:
        checkpoint.load(finished)
    assert caught.value.why == f"Missing or odd in it: {key}."


def test_a_broken_configuration_in_a_checkpoint_does_not_advise_options():
    state = {"config": {"optimizer": {"lr": -1.0}}}
    with pytest.raises(DmlError, match=r"in best\.pt cannot be used") as caught:
        checkpoint.config_of(state, Path("best.pt"))
    assert caught.value.fix == "Use another checkpoint, or train again."


def test_a_full_disk_is_told_and_earlier_checkpoints_stay(config, whole, tmp_path, monkeypatch):
    save, calls = torch.save, []

    def full(state, file):
        calls.append(state["epoch"])
        if state["epoch"] == 2:
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DmlError) as caught:
        train.train(config, tmp_path / "run")
    assert "No space left on device" in str(caught.value)
    assert "--resume" in caught.value.fix
    assert calls == [0, 1, 2]
    assert checkpoint.load(tmp_path / "run")["epoch"] == 1
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
    monkeypatch.undo()
    fit(config, tmp_path / "run", resume=True)
    assert_same_bits(weights(whole), weights(tmp_path / "run"))


def test_a_disk_that_really_fills_up_leaves_no_half_checkpoint(tmp_path):
    code = """
import resource, signal, sys, torch
from pathlib import Path
from trainer.run import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
empty = {key: kind() for key, kind in checkpoint.KEYS.items()}
folder = Path(sys.argv[1])
checkpoint.save(folder, empty, best=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save(folder, empty | {"epoch": 7, "loss": {"a": torch.zeros(10**6)}}, best=True)
except Exception as error:
    print(error)
"""
    ended, told, errors = Forked("-c", code, tmp_path).end()
    assert ended == 0, errors
    assert "checkpoint of epoch 7 cannot be written" in told
    assert "File too large. Earlier checkpoints are intact." in told
    assert {path.name for path in tmp_path.iterdir()} == {"best.pt", "last.pt"}
    assert checkpoint.load(tmp_path)["epoch"] == 0


def test_checkpoints_need_no_hard_links(change, tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(files.os, "link", refused)
    fit(change(schedule={"epochs": 1}), tmp_path / "run")
    assert checkpoint.load(tmp_path / "run" / "best.pt")["epoch"] >= 1
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]


def test_ctrl_c_while_a_checkpoint_is_written_is_no_disk_error(config, tmp_path, monkeypatch):
    save = torch.save

    def interrupted(state, file):
        class Interrupting:
            def write(self, data):
                raise KeyboardInterrupt

        save(state, Interrupting() if state["epoch"] == 1 else file)

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.train(config, tmp_path / "run")
    assert checkpoint.load(tmp_path / "run")["epoch"] == 0


def instead_of(path):
    """What the error for a path without a checkpoint advises."""
    with pytest.raises(DmlError, match="There is no checkpoint") as caught:
        checkpoint.load(path)
    return caught.value.fix


@pytest.mark.parametrize("name", [".", "/", "best.pt", "last.pt", "../"])
def test_a_place_without_a_name_of_its_own_gets_advice_too(name, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    assert instead_of(Path(name)) == "Look for last.pt or best.pt: ls runs/*"


def test_a_missing_checkpoint_names_a_run_of_the_folder_or_one_of_a_like_name(tmp_path):
    for name in ("my runs/glyphs ce", "my runs/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "last.pt").touch()
    runs, usual = tmp_path / "my runs", "Look for last.pt or best.pt: ls runs/*"
    assert instead_of(runs) == f"Name a run in it: '{runs}/glyphs ce'"
    assert instead_of(runs / "glyphs cee") == f"Did you mean '{runs}/glyphs ce'?"
    assert instead_of(runs / "best.pt") == f"Name a run in it: '{runs}/glyphs ce'"  # as export
    assert instead_of(runs / "glyphs cee" / "best.pt") == f"Did you mean '{runs}/glyphs ce'?"
    last = runs / "other" / "last.pt"  # of a finished run that has lost best.pt
    told = f"Use the last one of the run, {last}; to export it: dmltool export '{last}'"
    assert instead_of(runs / "other" / "best.pt") == told
    assert instead_of(runs / "other" / "lst.pt") == f"Did you mean '{runs}/other/last.pt'?"
    assert instead_of(runs / "cub") == usual
    assert instead_of(tmp_path / "no folder" / "glyphs ce") == usual
    (runs / "empty").mkdir()
    assert instead_of(runs / "empty") == usual


def test_commands_about_a_checkpoint_can_be_copied_whatever_the_folder_is_called(
    config, finished, tmp_path
):
    folder = finished.rename(tmp_path / "a b")
    saved = checkpoint.load(folder)
    saved["optimizer"]["state"].clear()
    torch.save(saved, folder / "last.pt")
    with pytest.raises(DmlError) as caught:
        fit(config, folder, resume=True)
    assert caught.value.fix.endswith(f"dmltool export '{folder}'")
