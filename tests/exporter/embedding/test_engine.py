"""How many runs of a model go side by side."""

import time

import numpy as np
import pytest

from exporter.embedding import engine as engines
from exporter.embedding.engine import lanes_and_threads, onnx_engine
from exporter.onnx.model import describe
from retrieval import resources


@pytest.fixture
def two_processors(monkeypatch):
    monkeypatch.setattr(resources, "processors", lambda: 2)


def test_a_trial_chooses_the_lanes_and_says_so(exported, monkeypatch, two_processors):
    """Busy neighbours: two at a time take longer than one after the other."""
    monkeypatch.setattr(engines, "trial", lambda _, most, lanes: {1: 0.1, 2: 0.5}[lanes] * most)
    engine = onnx_engine(describe(exported), "cpu")
    assert engine.lanes == 1
    assert "1 thread: 5.0 times as fast as 2 in a trial" in engine.why


def test_a_real_trial_is_short_and_leaves_the_session_usable(exported, two_processors):
    began = time.monotonic()
    engine = onnx_engine(describe(exported), "cpu")
    assert time.monotonic() - began < 10  # 0.05 where nothing else runs
    assert engine.lanes in (1, 2)
    assert "in a trial" in engine.why
    assert engine.run(np.zeros((3, 16, 16, 3), np.uint8)).shape == (3, engine.dim)


def test_threads_that_are_given_are_taken_without_a_trial(exported, monkeypatch, two_processors):
    monkeypatch.setattr(engines, "trial", lambda *_: pytest.fail("it was tried"))
    assert onnx_engine(describe(exported), "cpu", threads=1).lanes == 1
    assert onnx_engine(describe(exported), "cpu", threads=2).lanes == 2
    assert lanes_and_threads(16) == (4, 4)


def test_more_threads_than_processors_are_not_started(exported, two_processors):
    engine = onnx_engine(describe(exported), "cpu", threads=100_000)
    assert engine.lanes == 2
    assert "--threads 100000: 2 are used" in engine.why
