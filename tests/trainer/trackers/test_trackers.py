"""Trackers: what they get, once each, also of resumed runs, and that none of them ends a run.

MLflow and W&B are large (50 packages), so `make test` does not install them: with them,
pip install -c constraints.txt ".[trackers]", test_mlflow.py and test_wandb.py run too.
"""

import json

import pytest
import torch

from retrieval.errors import DmlError
from tests.commands import call
from tests.trainer.trackers.logs import opened
from trainer import trackers
from trainer.run.metrics_log import read_metrics
from trainer.run.train import train
from trainer.run.watch import Watch
from trainer.trackers import TRACKERS
from trainer.trackers.tracker import Tracker

HERE = "tests.trainer.trackers.test_trackers"
CODE = [("run", "log", ["shutil:rmtree"]), ("loss", "name", "shutil:rmtree")]
MEMORY, FULL, GONE = (f"{HERE}:{name}" for name in ("Memory", "Full", "Gone"))


class Memory(Tracker):
    """Writes what it gets to a file of the run folder, by the id of its run."""

    def __init__(self, folder, config, run):
        self.run, self.place = run or f"{folder.name}-id", "in a file"
        self.file = folder / f"{self.run}.jsonl"

    def add(self, values, epoch):
        with self.file.open("a") as file:
            print(json.dumps([epoch, values]), file=file)

    def close(self, finished):
        with self.file.open("a") as file:
            print(json.dumps(["finished", finished]), file=file)


class Full(Memory):
    """Its disk is full from epoch 1 on, until the file `room` is there."""

    def add(self, values, epoch):
        if epoch and not (self.file.parent / "room").exists():
            raise OSError(28, "No space left on device")
        super().add(values, epoch)


class Gone(Tracker):
    """Its server does not answer."""

    def __init__(self, *given):
        raise ConnectionError("connection refused")


class Notes(Watch):
    """Keeps the notes; with `stop`, interrupts at the end of that epoch."""

    def __init__(self, stop=None):
        self.notes, self.stop = [], stop

    def note(self, text):
        self.notes.append(text)

    def epoch(self, record):
        if record["epoch"] == self.stop:
            raise KeyboardInterrupt


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def test_a_resumed_run_goes_on_in_the_tracker_and_sends_each_epoch_once(change, runs):
    folder, config = runs / "run", change(run={"log": (MEMORY, FULL, GONE)})
    first, second = Notes(stop=1), Notes()
    with pytest.raises(KeyboardInterrupt):
        train(config, folder, first)
    (folder / "room").touch()
    result = train(config, folder, second, resume=True)
    got = lines(folder / "run-id.jsonl")
    records = read_metrics(folder)
    by_epoch = [(epoch, values) for epoch, values in got if isinstance(epoch, int)]
    # Memory and Full write to the same file: Full lacks epoch 1, and gets it when it is resumed.
    assert sorted(e for e, v in by_epoch if "test/cos recall@1" not in v) == [
        e for e in range(4) for _ in range(2)
    ]
    for epoch, values in by_epoch:
        if "loss" in values:
            assert values["loss"] == pytest.approx(records[epoch]["loss"])
            assert values["scores/cos"] == records[epoch]["scores"]["cos"]
    tested = [(e, v["test/cos recall@1"]) for e, v in by_epoch if "test/cos recall@1" in v]
    score = result["test"]["distances"]["cos"]["recall"]["1"]
    assert tested == [(result["best_epoch"], score)] * 2
    assert [ended for name, ended in got if name == "finished"] == [False, True, True]
    for name, count in ((FULL, 1), (GONE, 1), (MEMORY, 0)):  # one warning each
        assert sum(note.startswith(f"{name} failed") for note in first.notes) == count
    assert "No space left" in "".join(first.notes)
    state = json.loads((folder / trackers.STATE).read_text())
    assert state[MEMORY] == {"run": "run-id", "epoch": 3}


def test_a_tracker_that_cannot_end_its_run_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(Memory, "close", lambda *_: 1 / 0)
    notes = []
    opened(MEMORY, tmp_path, notes).close(finished=True)
    assert "ZeroDivisionError" in notes[-1]


@pytest.mark.parametrize("text", ["", "[1]", '{"mlflow": 3}', "{"])
def test_a_damaged_state_file_starts_a_new_run_in_the_tracker(tmp_path, text):
    (tmp_path / trackers.STATE).write_text(text)
    assert opened(MEMORY, tmp_path).open[MEMORY].run == f"{tmp_path.name}-id"


@pytest.mark.parametrize("entry", [e for e in TRACKERS if e.module], ids=lambda e: e.name)
def test_a_missing_package_is_named_with_the_line_that_installs_it(entry, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(DmlError) as error:
        trackers.check([entry.name])
    assert f"--log {entry.name} needs" in error.value.what
    assert f'pip install -c constraints.txt ".[{entry.extra}]"' in error.value.fix


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tensorbord", "--log tensorboard"),
        (f"{HERE}:Missing", "has no attribute 'Missing'"),
        ("builtins:print", "'builtins:print' is not a tracker."),
    ],
)
def test_an_unknown_tracker_is_refused_before_anything_is_trained(name, told):
    done = call("train", "--log", name, "--dry-run")
    assert done.exit_code == 1
    assert told in done.stderr


@pytest.mark.parametrize("name", ["shutil:rmtree", "builtins:print"])
def test_only_subclasses_of_tracker_are_called(name, change, tmp_path):
    with pytest.raises(DmlError, match=f"{name}' is not a tracker"):
        train(change(run={"log": (name,)}), tmp_path / "run", Notes())
    notes = []
    assert not trackers.Trackers(tmp_path, change(run={"log": (name,)}), notes.append).open
    assert f"{name} failed, and the run continues without it ('{name}' is not a" in notes[0]


@pytest.mark.parametrize(("table", "key", "value"), CODE)
def test_a_checkpoint_does_not_choose_code_that_runs(table, key, value, change, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(change(), tmp_path / "run", Notes(stop=1))
    path = tmp_path / "run/last.pt"
    state = torch.load(path, weights_only=True)
    state["config"][table][key] = value
    torch.save(state, path)
    done = call("train", "--resume", tmp_path / "run")
    assert done.exit_code == 1
    assert "code outside dmltool" in done.stderr
    assert "DMLTOOL_OWN" in done.stderr
