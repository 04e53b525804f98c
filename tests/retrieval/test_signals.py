"""Ctrl-C at any moment: one line, exit code 130, soon. A mapped file that is cut short is named."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pytest

from retrieval import console, signals
from tests.forks import Forked

pytestmark = pytest.mark.usefixtures("tried")

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
import retrieval.signals as signals
watch = signals.end_on_interrupt
def told(name):
    watch("__main__")
    os.write(2, b"started")
signals.end_on_interrupt = told
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


@pytest.mark.parametrize(
    ("given", "tells"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "1"}, True),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, False),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "2"}, False),
        ({"SLURM_PROCID": "1"}, True),
    ],
)
def test_of_several_processes_the_first_tells_of_ctrl_c_also_while_it_starts(
    given, tells, environment, capfd, monkeypatch
):
    environment(**given)
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    signals.end()
    assert ended == [130]
    assert capfd.readouterr().err == "\nInterrupted: nothing was written.\n" * tells


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_any_moment_is_one_line(name, tmp_path):
    moments = random.Random(name)
    for most in (0.05, 0.3, 1, 3):
        seconds = most * moments.random()
        code, told, _ = interrupted(COMMANDS[name], seconds, tmp_path)
        assert "Traceback" not in told, (seconds, told)
        assert "ignored" not in told, (seconds, told)
        assert "bug in dmltool" not in told, (seconds, told)
        if code != 0 and "nowhere" not in told:  # it was not faster
            assert code == 130, (seconds, told)
            assert told.count("Interrupted") == 1, (seconds, told)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_ctrl_c_that_is_blocked_while_python_starts_is_one_line(before, tmp_path):
    """As `env --block-signal=INT dmltool` starts it; a background job is still not interrupted."""

    def block():
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])

    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cli", "list", "losses"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=block,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.send_signal(signal.SIGINT)
    shown, told = process.communicate(timeout=60)
    if before == signal.SIG_DFL:
        assert (process.returncode, shown) == (130, b"")
        assert told == b"\nInterrupted: nothing was written.\n"
    else:
        assert (process.returncode, told) == (0, b"")


def test_children_of_a_command_do_not_start_with_ctrl_c_blocked():
    code = f"""
import signal, subprocess, sys
sys.path[:0] = [{str(ROOT)!r}]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
from retrieval import signals
signals.end_on_interrupt("__main__")
mask = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
subprocess.run([sys.executable, "-c", mask], check=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_ctrl_c_inside_an_import_that_catches_everything_ends_the_command(tmp_path):
    code = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
from pathlib import Path
from retrieval import signals
signals.end_on_interrupt("__main__")
from retrieval.console import on_interrupt, resumable
partial = Path({str(tmp_path / "x.h5.partial")!r})
with signals.raised(), on_interrupt(resumable(partial, resume=False)):
    partial.touch()
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
    assert (process.returncode, told) == (130, "\nInterrupted: add --resume to continue.\n")


@pytest.mark.parametrize("lacking", ["", "del signals.signal.pthread_kill"])  # as Windows does
def test_ctrl_c_inside_an_import_is_raised_at_its_end(tmp_path, lacking):
    """What a command has computed before is still shown."""
    code = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]
from retrieval import signals
signals.end_on_interrupt("__main__")
{lacking}
with signals.raised(), signals.patient():
    print("here", flush=True)
    try:
        import slow
        while True:
            time.sleep(0.1)
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


WINDOWS = """
import os, subprocess, types
given = subprocess.Popen.send_signal
def send_signal(self, number):
    assert number == 9, "Windows sends no signals, but kills"
    given(self, number)
subprocess.Popen.send_signal = send_signal
signals.os = types.SimpleNamespace(**vars(os) | {"name": "nt"})
"""


@pytest.mark.parametrize("system", ["", WINDOWS])
def test_a_child_that_does_not_end_is_killed(tmp_path, system):
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
from retrieval import signals
signals.end_on_interrupt("__main__")
{system}
with signals.raised():
    deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); print(1, flush=True)"
    signals.run_child([sys.executable, "-c", deaf + "; time.sleep(60)"])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.communicate(timeout=60) == ("", "")
    assert time.monotonic() - began < 10


def test_ctrl_c_ends_the_demo_soon(tmp_path):
    """The seconds are short where nothing else runs: 2 at most."""
    for seconds in (0.5, 2.5, 5.0):
        code, told, took = interrupted(["demo", "--quick", "--out", "demo"], seconds, tmp_path)
        assert code == 130, told
        assert took < 20, (seconds, told)
        assert "Traceback" not in told
        assert "bug in dmltool" not in told


def test_ctrl_c_inside_an_import_of_the_demo_is_not_lost(tmp_path):
    """Libraries catch everything around imports of their own; the demo would go on."""
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").write_text(
        "import sys, time\nprint('here', file=sys.stderr, flush=True)\n"
        "end = time.monotonic() + 30\nwhile time.monotonic() < end:\n"
        "    try:\n        time.sleep(0.05)\n    except BaseException:\n        pass\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "demo", "--quick", "--out", "demo"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    while process.stderr.readline() not in ("here\n", ""):
        pass
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    told = process.communicate(timeout=60)[1]
    assert time.monotonic() - began < 15  # two seconds where nothing else runs
    assert process.returncode == 130, told
    assert "Interrupted" in told


USES = {
    "copied": "x.copy()",
    "multiplied": "x @ x.T",
    "in a thread": "t = threading.Thread(target=lambda: x.sum()); t.start(); t.join()",
}
SCRIPT = """
import os, sys, threading
from retrieval.loading.load import load
from retrieval import signals
signals.tell_cut_files()
x = load(sys.argv[1]).splits["test"].vectors
os.truncate(sys.argv[1], 4096)
{use}
print("not reached")
"""


@pytest.fixture
def file(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((6000, 256)).astype(np.float32)
    np.savez(tmp_path / "x.npz", embeddings=vectors, labels=np.arange(6000) // 4)
    return tmp_path / "x.npz"


# As soon as it has been read, while its rows are still in the file only.
EVAL = """
import os
from cli import main
from retrieval.loading import load as loading
honest = loading.load
def load(path, *rest, **options):
    found = honest(path, *rest, **options)
    os.truncate(path, 4096)
    return found
loading.load = load
main(prog_name="dmltool")
"""


@pytest.mark.parametrize("use", USES)
def test_reading_on_is_an_error_that_names_the_file(file, use):
    code, out, told = Forked("-c", SCRIPT.format(use=USES[use]), file).end(timeout=60)
    assert code == 1
    assert f"{file} was cut short" in told
    assert out == ""


def test_eval_of_a_file_that_is_cut_short_says_so(file):
    code, out, told = Forked("-c", EVAL, "eval", file, "--no-map").end(timeout=60)
    assert code == 1, (out, told)
    # All rows may have been copied before; then the change itself is noticed.
    assert "cut short" in told or "was changed while it was read" in told


def test_a_ctrl_c_that_has_been_answered_is_not_raised_again(monkeypatch, capsys):
    monkeypatch.setattr(signals, "_when", 1.0)
    monkeypatch.setattr(signals, "_waiting", True)  # for the end of an import
    with pytest.raises(click.exceptions.Exit), console.on_interrupt(lambda: "nothing"):
        raise RuntimeError("what a library makes of Ctrl-C")
    assert "Interrupted: nothing." in capsys.readouterr().err
    monkeypatch.setattr(signals, "_looking", True)
    signals._raise(signal.SIGINT, None)
