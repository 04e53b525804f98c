"""The threads of a run: those of its checkpoint, or those that a trial chooses."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.trainer.run.runs import Interrupting, Interruption, assert_same_bits, fit, told_by
from trainer.run import checkpoint, device
from trainer.run.setup import build_embedder


@pytest.fixture
def two_threads(monkeypatch):
    """Those of torch before a run; the other tests go on with one."""
    monkeypatch.setattr("retrieval.resources.processors", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_a_resumed_run_keeps_its_number_of_threads(change, tmp_path, two_threads):
    texts, config = [], change(schedule={"epochs": 1})
    with pytest.raises(Interruption):
        fit(replace(config, run=replace(config.run, threads=1)), tmp_path / "run", Interrupting(1))
    fit(config, tmp_path / "run", told_by(texts), resume=True)
    assert checkpoint.load(tmp_path / "run")["threads"] == 1
    assert not any("threads" in text for text in texts)
    assert torch.get_num_threads() == 2  # as before


def test_a_trial_chooses_the_threads_of_a_new_run(change, tmp_path, monkeypatch, two_threads):
    """Busy neighbours: what torch does with two threads takes five times as long."""
    for name in device.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    now = [0.0]

    def work(*_):
        now[0] += 5.0 if torch.get_num_threads() == 2 else 1.0

    monkeypatch.setattr(device, "embed", work)
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    texts = []
    fit(change(schedule={"epochs": 1}), tmp_path / "run", told_by(texts))
    assert checkpoint.load(tmp_path / "run")["threads"] == 1
    [told] = [text for text in texts if "trial" in text]
    assert told.startswith("1 thread: ")
    assert "5.0 times as fast as 2" in told


def test_a_deterministic_run_leaves_the_threads_to_no_trial(
    change, tmp_path, monkeypatch, two_threads
):
    """Which number wins depends on what else the machine does, and with it the last bits."""
    for name in device.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "faster_threads", lambda *_: pytest.fail("it was tried"))
    fit(change(run={"deterministic": True}, schedule={"epochs": 1}), tmp_path / "run")
    assert checkpoint.load(tmp_path / "run")["threads"] == 2


def test_a_trial_takes_a_moment_and_changes_neither_weights_nor_random_numbers(
    config, monkeypatch, two_threads
):
    for name in device.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    embedder = build_embedder(config, pretrained=True)
    before = {key: value.clone() for key, value in embedder.state_dict().items()}
    state = torch.get_rng_state()
    began = time.process_time()  # others may keep the machine busy
    assert device.use_threads(embedder, 16)
    assert time.process_time() - began < 10  # 0.1 where nothing else runs
    assert_same_bits(before, embedder.state_dict())
    assert torch.equal(torch.get_rng_state(), state)
    assert embedder.training


def test_layout_changes_the_memory_of_weights_and_not_their_values():
    network = nn.Conv2d(3, 4, 3)
    before = network.weight.detach().clone()
    assert device.in_layout(network, torch.channels_last) is network
    assert network.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(network.weight, before)
