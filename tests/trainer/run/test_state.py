"""A checkpoint is restored to the data that it was trained on, and other threads are told."""

import json
from dataclasses import replace

import pytest

from retrieval.errors import DmlError
from tests.trainer.run.runs import Interrupting, Interruption, fit, told_by
from trainer.run import train


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
