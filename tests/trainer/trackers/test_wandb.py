"""Weights & Biases: what the files of an offline run hold, and a run without an account."""

from importlib.util import find_spec

import pytest

from tests.trainer.trackers.logs import NOT_INSTALLED, logged
from trainer.config import Config, Run
from trainer.trackers import Trackers


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
