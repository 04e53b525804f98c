"""How many runs of a model go side by side, how far ahead images are decoded, and Ctrl-C."""

import signal
import threading
import time

import numpy as np
import pytest
from PIL import Image

from exporter.embedding import engine as engines
from exporter.embedding.engine import lanes_and_threads, onnx_engine
from exporter.onnx.model import describe
from retrieval import resources
from tests.exporter.embedding.toy import call, quarters
from tests.exporter.models import endless_model
from tests.forks import Forked


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


def test_images_are_decoded_ahead_but_not_far_ahead(data, tmp_path, monkeypatch):
    read, ahead, given, threads = [], [], engines.read_images, threading.active_count()
    heard = lambda data, rows, spec: read.extend(rows) or given(data, rows, spec)  # noqa: E731
    monkeypatch.setattr(engines, "read_images", heard)

    def slow(images):
        give_up = time.monotonic() + 20
        while not ahead and len(read) <= 4 and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(0.05)
        ahead.append(len(read))
        return quarters(images)

    call(data, tmp_path / "x.h5", slow, batch_size=4)
    assert ahead[0] > 4  # the next batch is there when this one is done
    assert max(read - 4 * n for n, read in enumerate(ahead)) <= 4 * 4
    assert threading.active_count() == threads


def test_lanes_run_side_by_side(data, tmp_path):
    meet = threading.Barrier(2, timeout=20)

    def together(images):
        meet.wait()  # broken unless two are in it at once
        return quarters(images)

    call(data, tmp_path / "x.h5", together, batch_size=25, lanes=2)


# The trial comes before the file.
TRIAL = """
from pathlib import Path
from cli import main
from exporter.embedding import engine
honest = engine.trial
def begun(*args):
    Path("x.h5.partial").touch()
    return honest(*args)
engine.trial = begun
main(prog_name="dmltool")
"""


@pytest.mark.parametrize("command", ["embed", "trial", "run"])
def test_a_loop_without_end_can_be_interrupted(tmp_path, command):
    """In the threads of `embed`, in the trial of threads before it, and in the main thread."""
    endless_model(tmp_path / "endless.onnx")
    for n in range(4):
        (tmp_path / "photos" / str(n)).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "photos" / str(n) / "0.png")
    embed = ["embed", "endless.onnx", "photos", "--out", "x.h5"]
    given = {
        "embed": ["-m", "cli", *embed, "--threads", "1"],
        "trial": ["-c", TRIAL, *embed],
        "run": [
            "-c",
            "import numpy as np\n"
            "from exporter.onnx.model import describe\n"
            "from exporter.onnx.session import Session\n"
            "session = Session(describe('endless.onnx'))\n"
            "open('x.h5.partial', 'w')\n"
            "session.run(np.zeros((1, 8, 8, 3), np.uint8))",
        ],
    }
    process = Forked(*given[command], cwd=tmp_path)
    try:
        while not (tmp_path / "x.h5.partial").exists() and process.running():
            time.sleep(0.1)
        time.sleep(1)
        process.send(signal.SIGINT)
        code, _, told = process.end(timeout=60)
    finally:
        process.kill()
    assert "Interrupted" in told or "KeyboardInterrupt" in told, told
    assert code != 0
