"""Trackers: what they get, once each, also of resumed runs, and that none of them ends a run.

MLflow and W&B are large (50 packages), so `make test` does not install them: with them,
pip install -c constraints.txt ".[trackers]", the last tests run too.
"""

import json
from importlib.util import find_spec

import pytest

from retrieval.errors import DmlError
from tests.conftest import call
from trainer.config import Config, Run
from trainer.run import trackers
from trainer.run.metrics_log import environment, read_metrics
from trainer.run.trackers import TRACKERS, Trackers
from trainer.run.train import train
from trainer.run.watch import Watch
from trainer.validate import from_dict

HERE = "tests.trainer.run.test_trackers"
MEMORY, FULL, GONE = (f"{HERE}:{name}" for name in ("Memory", "Full", "Gone"))
RECORDS = [
    {"epoch": 0, "scores": {"cos": 0.25}},
    {"epoch": 1, "loss": 2.5, "lr": 0.1, "parts": {}, "scores": {"cos": 0.5}},
    {"epoch": 2, "loss": 1.5, "lr": 0.1, "monitor": {"spce": None}, "scores": {"cos": 0.75}},
]
TEST = {"cos": {"recall@1": 0.625}}


class Memory:
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


class Gone:
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


def opened(name, folder, notes=None):
    """The trackers of a run folder with one tracker, which works."""
    folder.mkdir(parents=True, exist_ok=True)
    notes = [] if notes is None else notes
    found = Trackers(folder, Config(run=Run(log=(name,))), notes.append)
    assert found.open, notes
    return found


def logged(name, folder):
    """Log two epochs, stop, and go on with all of them, as a resumed run does."""
    first = opened(name, folder)
    first.add(RECORDS[:2])
    first.close(finished=False)
    second = opened(name, folder)
    second.add(RECORDS)
    second.add_test(TEST, 2)
    second.close(finished=True)
    assert first.open[name].run == second.open[name].run
    return second.open[name].run


def test_a_tracker_that_cannot_end_its_run_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(Memory, "close", lambda *_: 1 / 0)
    notes = []
    opened(MEMORY, tmp_path, notes).close(finished=True)
    assert "ZeroDivisionError" in notes[-1]


@pytest.mark.parametrize("text", ["", "[1]", '{"mlflow": 3}', "{"])
def test_a_damaged_state_file_starts_a_new_run_in_the_tracker(tmp_path, text):
    (tmp_path / trackers.STATE).write_text(text)
    assert opened(MEMORY, tmp_path).open[MEMORY].run == f"{tmp_path.name}-id"


@pytest.mark.parametrize("name", TRACKERS.names())
def test_a_missing_package_is_named_with_the_line_that_installs_it(name, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(DmlError) as error:
        trackers.check([name])
    assert f"--log {name} needs" in error.value.what
    extra = "extras" if name == "tensorboard" else "trackers"
    assert f'pip install -c constraints.txt ".[{extra}]"' in error.value.fix


def test_an_unknown_tracker_is_refused_before_anything_is_trained():
    done = call("train", "--log", "tensorbord", "--dry-run")
    assert done.exit_code == 1
    assert "--log tensorboard" in done.stderr


def test_the_setting_of_earlier_versions_still_means_tensorboard():
    assert from_dict({"run": {"tensorboard": True}}, "It").run.log == ("tensorboard",)
    assert from_dict({"run": {"tensorboard": False}}, "It").run.log == ()
    done = call("train", "--set", "run.tensorboard=true", "--dry-run")
    assert 'log = ["tensorboard"]' in done.stdout


def test_tensorboard_gets_every_record_once(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
    assert [e.step for e in events.Scalars("scores/cos")] == [0, 1, 2]
    assert [(e.step, e.value) for e in events.Scalars("test/cos recall@1")] == [(2, 0.625)]


NOT_INSTALLED = "too large for make test: " + 'pip install -c constraints.txt ".[trackers]"'


@pytest.mark.skipif(find_spec("mlflow") is None, reason=f"MLflow is {NOT_INSTALLED}")
@pytest.mark.filterwarnings("ignore")  # its own, of deprecated functions
@pytest.mark.parametrize("store", ["sqlite:///{}/mlflow.db", "file://{}/mlruns"])
def test_mlflow_gets_every_record_once_in_one_run(store, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.format(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = logged("mlflow", tmp_path / "run")
    client = MlflowClient()
    found = client.get_experiment_by_name("dmltool")
    (only,) = client.search_runs([found.experiment_id])
    assert (only.info.run_id, only.info.status) == (run, "FINISHED")
    assert only.data.params["optimizer.lr"] == "0.001"
    history = client.get_metric_history(run, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 2.5), (2, 1.5)]
    assert only.data.metrics["test/cos recall_at_1"] == 0.625


def wandb_records(path):
    """The serialised records of an offline run: 7 bytes of header, then the log of LevelDB."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # a block ends with zeros that hold no header
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.skipif(find_spec("wandb") is None, reason=f"W&B is {NOT_INSTALLED}")
@pytest.mark.filterwarnings("ignore")
def test_wandb_gets_every_record_once_in_one_run(tmp_path, monkeypatch):
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = logged("wandb", tmp_path / "run")
    wandb.teardown()  # the process that writes the files ends
    rows, ids = [], set()
    for path in tmp_path.glob("run/wandb/offline-run-*/*.wandb"):
        for data in wandb_records(path):
            record = Record.FromString(data)
            ids |= {record.run.run_id} - {""}
            items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            rows += [{key: float(text) for key, text in items.items()}] if items else []
    assert ids == {run}
    losses = sorted((row["epoch"], row["loss"]) for row in rows if "loss" in row)
    assert losses == [(1, 2.5), (2, 1.5)]
    assert [row["epoch"] for row in rows if "test/cos recall@1" in row] == [2]


@pytest.mark.skipif(find_spec("wandb") is None, reason=f"W&B is {NOT_INSTALLED}")
def test_wandb_without_an_account_does_not_ask_for_one(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    notes = []
    Trackers(tmp_path, Config(run=Run(log=("wandb",))), notes.append)
    assert "wandb login" in notes[0]


def test_passwords_are_left_out_of_notes_and_of_the_command_that_is_recorded(monkeypatch):
    monkeypatch.setattr("sys.argv", ["dmltool", "--storage", "postgresql://me:s3cret@host/x"])
    found = environment("cpu", 1)["command"]
    assert found == ["dmltool", "--storage", "postgresql://host/x"]
