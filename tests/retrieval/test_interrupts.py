"""Ctrl-C at any moment: one line, exit code 130, soon."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "list": ["list", "losses"],
    "dry run": ["train", "--loss", "group", "--dry-run"],
    "train": ["train", "--data", "nowhere"],
    "eval": ["eval", "nowhere.npy"],
}

# The first thing that the program does when cli is there is to tell so on stderr.
STARTED = """
import os, runpy, sys
sys.path.insert(0, {root!r})
import retrieval.interrupts as interrupts
watch = interrupts.watch
def told(name):
    watch("__main__")
    os.write(2, b"started")
interrupts.watch = told
sys.argv = ["dmltool", *sys.argv[1:]]
runpy.run_module("cli", run_name="__main__")
"""


def interrupted(args, seconds, folder):
    """(exit code, stderr, seconds until the end) of a command that is interrupted after a while."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED.format(root=str(ROOT)), *args],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr.read(7) == b"started"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    told = process.communicate(timeout=60)[1].decode()
    return process.returncode, told, time.monotonic() - began


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_any_moment_is_one_line(name, tmp_path):
    moments = random.Random(name)
    for _ in range(8):
        seconds = moments.choice((0.05, 0.3, 3)) * moments.random()
        code, told, _ = interrupted(COMMANDS[name], seconds, tmp_path)
        assert "Traceback" not in told, (seconds, told)
        assert "ignored" not in told, (seconds, told)
        assert "bug in dmltool" not in told, (seconds, told)
        if code != 0 and "nowhere" not in told:  # it was not faster
            assert code == 130, (seconds, told)
            assert told.count("Interrupted") == 1, (seconds, told)


def test_ctrl_c_inside_an_import_that_catches_everything_ends_the_command(tmp_path):
    code = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
from retrieval import interrupts
interrupts.watch("__main__")
with interrupts.raised():
    print("here", flush=True)
    import stubborn
    time.sleep(60)
"""
    (tmp_path / "stubborn.py").write_text(
        "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end:\n"
        "    try:\n        time.sleep(0.05)\n    except BaseException:\n        pass\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "here\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    told = process.communicate(timeout=60)[1]
    assert time.monotonic() - began < 10  # a second where nothing else runs
    assert (process.returncode, told) == (130, "\nInterrupted.\n")


def test_ctrl_c_inside_an_import_is_raised_at_its_end(tmp_path):
    """What a command has computed before is still shown."""
    code = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
from retrieval import interrupts
interrupts.watch("__main__")
with interrupts.raised(), interrupts.patient():
    print("here", flush=True)
    try:
        import slow
        time.sleep(60)
    except KeyboardInterrupt:
        print("kept", sys.modules["slow"].whole)
"""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(2.5)\nwhole = True\n")
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "here\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("kept True\n", "")


def test_a_child_that_does_not_end_is_killed(tmp_path):
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
from retrieval import interrupts
interrupts.watch("__main__")
with interrupts.raised():
    deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); print(1, flush=True)"
    interrupts.run_child([sys.executable, "-c", deaf + "; time.sleep(60)"])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - began < 10


def test_ctrl_c_ends_the_demo_soon(tmp_path):
    """The seconds are short where nothing else runs: 2 at most."""
    for seconds in (0.5, 2.5, 5.0):
        code, told, took = interrupted(["demo", "--quick", "--out", "demo"], seconds, tmp_path)
        assert code == 130, told
        assert took < 20, (seconds, told)
        assert "Traceback" not in told
        assert "bug in dmltool" not in told
