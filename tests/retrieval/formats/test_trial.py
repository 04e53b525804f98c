"""A file that kills, fills or hangs the library that reads it is an error, not the end."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.formats import trial
from retrieval.loading.load import load

pytestmark = pytest.mark.usefixtures("tried")


@pytest.fixture
def file(tmp_path):
    (tmp_path / "x.h5").write_bytes(b"abc")
    return tmp_path / "x.h5"


def test_nothing_happens_where_nothing_is_wrong(file):
    trial.attempt(lambda: 3, file, "hdf5")


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS])
def test_a_crash_is_an_error_that_names_the_signal(file, number, capfd):
    with pytest.raises(DmlError, match=signal.Signals(number).name) as error:
        trial.attempt(lambda: os.kill(os.getpid(), number), file, "hdf5")
    assert str(file) in error.value.what
    assert capfd.readouterr() == ("", "")


def test_a_real_abort_prints_nothing_of_its_own(file, capfd):
    with pytest.raises(DmlError, match="SIGABRT"):
        trial.attempt(lambda: ctypes.CDLL(None).abort(), file, "hdf5")
    assert capfd.readouterr() == ("", "")


def test_errors_of_the_child_are_raised_here(file):
    def fail():
        raise DmlError("What.", "Why.", "Fix.")

    with pytest.raises(DmlError) as error:
        trial.attempt(fail, file, "hdf5")
    assert (error.value.what, error.value.why, error.value.fix) == ("What.", "Why.", "Fix.")
    with pytest.raises(DmlError, match="ZeroDivisionError"):
        trial.attempt(lambda: 1 / 0, file, "hdf5")


def test_memory_is_limited_by_the_size_of_the_file(file, monkeypatch):
    monkeypatch.setattr(trial, "CPU_SECONDS", 20)  # else slow pages end it first
    trial.attempt(lambda: np.ones(10_000_000), file, "hdf5")
    with pytest.raises(DmlError, match="too much memory"):
        trial.attempt(lambda: np.ones(80_000_000), file, "hdf5")


def test_time_is_limited(file, monkeypatch):
    monkeypatch.setattr(trial, "WALL_SECONDS", 0.3)
    with pytest.raises(DmlError, match="too long"):
        trial.attempt(lambda: time.sleep(30), file, "hdf5")
    monkeypatch.setattr(trial, "WALL_SECONDS", 60)
    monkeypatch.setattr(trial, "CPU_SECONDS", 1)

    def spin():
        while True:
            pass

    start = time.monotonic()
    with pytest.raises(DmlError, match="too long"):
        trial.attempt(spin, file, "hdf5")
    assert time.monotonic() - start < 40  # by the second of the processor, not by the clock


def test_it_can_be_switched_off(file, monkeypatch):
    monkeypatch.setenv("DMLTOOL_TRIAL", "0")
    trial.attempt(lambda: os.kill(os.getpid(), signal.SIGKILL), file, "hdf5")


def test_a_system_without_room_for_a_child_does_not_blame_the_file(file, monkeypatch):
    def fork():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", fork)
    trial.attempt(lambda: None, file, "hdf5")
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_threads_may_run_meanwhile(file):
    stop = threading.Event()
    workers = [threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])]
    for worker in workers:
        worker.start()
    try:
        for _ in range(20):
            trial.attempt(lambda: np.ones(1000).sum(), file, "hdf5")
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def test_no_child_and_no_descriptor_is_left(file):
    def children():  # others of this process may be those of other tests
        return Path("/proc/self/task", str(os.getpid()), "children").read_text().split()

    before, others = len(os.listdir("/proc/self/fd")), children()
    for work in (lambda: None, os.abort):
        with contextlib.suppress(DmlError):
            trial.attempt(work, file, "hdf5")
    assert len(os.listdir("/proc/self/fd")) == before
    assert children() == others


def test_a_parquet_footer_that_aborts_arrow_is_an_error(capfd):
    """A damaged file on which pyarrow 26 calls abort(); another version may refuse it itself."""
    path = Path(__file__).parents[1] / "files" / "aborts.parquet"
    with pytest.raises(DmlError) as error:
        load(path)
    assert path.name in error.value.what
    assert capfd.readouterr() == ("", "")
