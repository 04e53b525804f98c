"""The run folder: who gets it, and what a stopped run leaves in it."""

import errno
import os
import shutil

import pytest
import torch

from retrieval import files
from retrieval.errors import DmlError
from tests.forks import Forked
from tests.trainer.run.runs import fit
from tests.trainer.small import RUN_FILES
from trainer.run import checkpoint, train
from trainer.run import folder as run_folder


def test_of_two_runs_that_want_a_folder_one_gets_it(config, tmp_path):
    with run_folder.claimed(tmp_path / "run", config):
        with pytest.raises(run_folder.FolderTaken), run_folder.claimed(tmp_path / "run", config):
            pass
        (tmp_path / "run" / "last.pt").touch()
    with (
        pytest.raises(run_folder.FolderTaken, match="exists already"),
        run_folder.claimed(tmp_path / "run", config),
    ):
        pass


def test_a_folder_with_something_in_it_is_not_used(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    with pytest.raises(DmlError, match="exists already"):
        train.train(config, tmp_path / "run")


def test_a_disk_too_small_for_checkpoints_is_told_before_the_first_epoch(
    config, tmp_path, monkeypatch
):
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DmlError, match="too little room"):
        train.train(config, tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


def test_a_first_checkpoint_that_cannot_be_written_leaves_no_folder(config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DmlError) as caught:
        train.train(config, tmp_path / "new" / "run")
    assert "intact" not in str(caught.value)
    assert "--resume" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def killed_before_its_first_checkpoint(config, folder, moment):
    """A process that ends at once when `moment` is called, before or after it has done it."""
    (folder.parent / "config.toml").write_text(config.to_toml())
    code = f"""
import os, sys
from pathlib import Path
from trainer.run import checkpoint, metrics_log, setup, folder as run_folder, train
from trainer import toml
from trainer.validate import from_dict
honest = {moment}
def killed(*args, **options):
    if {moment!r} != "checkpoint.torch.save":
        honest(*args, **options)
    os._exit(9)
{moment} = killed
train.train(from_dict(toml.read(Path(sys.argv[1])), "it"), Path(sys.argv[2]))
"""
    done = Forked("-c", code, folder.parent / "config.toml", folder).end()
    assert done[0] == 9, done


@pytest.mark.parametrize(
    "moment",
    [
        "setup.open_data",
        "run_folder.write_environment",
        "metrics_log.write_metrics",
        "checkpoint.torch.save",
    ],
)
def test_a_run_killed_before_its_first_checkpoint_starts_anew(moment, change, tmp_path):
    config, killed = change(schedule={"epochs": 1}), tmp_path / "killed"
    killed_before_its_first_checkpoint(config, killed, moment)
    assert any(killed.iterdir())
    for resume in (False, True):
        folder = shutil.copytree(killed, tmp_path / f"resumed {resume}")
        with run_folder.locked(folder), pytest.raises(run_folder.FolderTaken):
            train.train(config, folder, resume=resume)
        begun = checkpoint.load_config(folder)
        assert begun == config
        fit(begun, folder, resume=resume)
        names = {path.name for path in folder.iterdir()}
        assert names == RUN_FILES


def test_starting_anew_takes_nobodys_files(config, tmp_path):
    folder = tmp_path / "run"
    killed_before_its_first_checkpoint(config, folder, "setup.open_data")
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(run_folder.FolderTaken, match="exists already"):
        train.train(config, folder)
    assert (folder / "thesis.tex").read_text() == "x"
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.toml").write_text("mine")
    with pytest.raises(run_folder.FolderTaken, match="exists already"):
        train.train(config, other)
    assert (other / "config.toml").read_text() == "mine"


@pytest.mark.parametrize("name", run_folder.BEFORE)
def test_a_start_killed_while_it_writes_does_not_block_the_folder(name, config, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    if name != run_folder.STARTING:
        (folder / run_folder.STARTING).write_text(config.to_toml())
    file, left = files.create_temporary(folder / name)
    file.close()
    with run_folder.claimed(folder, config):
        assert not left.exists()


def test_a_run_is_trained_by_one_process_at_a_time(config, finished):
    with run_folder.locked(finished), pytest.raises(DmlError, match="by another process"):
        train.train(config, finished, resume=True)
