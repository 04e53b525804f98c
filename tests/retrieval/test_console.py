"""What reaches a terminal: encodings, colours, control characters, progress."""

import json
import logging
import os
import pty
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from retrieval import console
from retrieval.console import ProgressBar, short_path, use_safe_encodings
from retrieval.distributed.world import World
from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.hdf5.writing import write
from tests.commands import call

DMLTOOL = Path(sys.executable).parent / "dmltool"

C_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

ENCODINGS = [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "cp1252"}, C_LOCALE]

X = np.random.default_rng(0).standard_normal((12, 5))
Y = np.arange(12) // 3


def test_progress_of_long_work_is_told_on_stderr(monkeypatch, capsys):
    clock = iter(range(0, 1000, 11))
    time = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("retrieval.console.time", time)  # rich has clocks of its own
    with ProgressBar() as report:
        report("ranks", 1, 4)
        report("ranks", 2, 4)
    captured = capsys.readouterr()
    assert "ranks: 25%" in captured.err
    assert "ranks: 50%, about 22 s left" in captured.err
    assert captured.out == ""


@pytest.fixture
def odd_names(tmp_path, clustered):
    X, labels = clustered
    names = np.array(["naïve", "日本", "a", "b", "c", "\U0001f600"])
    attrs = {"model": "日本 → \U0001f600"}
    write(tmp_path / "é日.h5", {"test": Split(X, labels)}, names, attrs)
    write(tmp_path / "b.h5", {"test": Split(X[:, ::-1] ** 3, labels)}, names, attrs)
    return tmp_path


def run(folder, *args, **environment):
    done = subprocess.run(
        [DMLTOOL, *args], cwd=folder, capture_output=True, env=os.environ | environment
    )
    assert b"Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("environment", ENCODINGS, ids=lambda e: next(iter(e.values())))
def test_output_that_the_encoding_cannot_show_does_not_crash(odd_names, environment):
    """All commands in one process, each as `dmltool ARGS`."""
    name = next(path.name for path in odd_names.iterdir() if path.name != "b.h5")
    commands = [
        ["eval", name, "--no-map", "--no-nmi"],
        ["inspect", name],
        ["compare", name, "b.h5", "--no-map"],
        ["merge", name, "b.h5", "--out", "日本.h5"],
        ["list", "losses"],
        ["eval", "日本 nowhere.h5"],
    ]
    (odd_names / "commands.json").write_text(json.dumps(commands))
    code = (
        "import json, os; from cli import main\n"
        "for args in json.load(open('commands.json')):\n"
        "    args = [os.fsdecode(arg.encode()) for arg in args]  # as in sys.argv\n"
        "    print(args[0], 'ended with', main.main(args, standalone_mode=False) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=odd_names,
        capture_output=True,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    codes = [int(line.split()[-1]) for line in done.stdout.splitlines() if b"ended with" in line]
    assert codes == [0, 0, 0, 0, 0, 1]
    assert b"bug" not in done.stderr


@pytest.mark.parametrize("environment", [{}, *ENCODINGS])
def test_json_is_json_in_any_encoding(odd_names, environment):
    done = run(odd_names, "inspect", "é日.h5", "--json", **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attrs"]["model"] == "日本 → \U0001f600"


def test_output_to_a_closed_stdout_is_lost_and_no_error(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)  # as Python sets it for `dmltool eval ... >&-`
    use_safe_encodings()
    for stream in (sys.stdout, sys.stderr):
        with stream:
            print("lost", file=stream, flush=True)


def test_signs_that_an_encoding_lacks_are_written_otherwise(odd_names):
    done = run(odd_names, "eval", "b.h5", "--no-map", "--no-nmi", PYTHONIOENCODING="ascii")
    assert b"60 queries, each against 59 others - 6 classes - 8 dimensions" in done.stdout
    assert done.stdout.isascii()


def on_terminal(folder, *args, **environment):
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [DMLTOOL, *args],
        cwd=folder,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # closed at the other end
        pass
    process.wait()
    os.close(ours)
    return seen


def test_no_color_holds_for_errors_too(tmp_path):
    assert b"\x1b[" in on_terminal(tmp_path, "eval", "nowhere.h5")
    assert b"\x1b[" not in on_terminal(tmp_path, "eval", "nowhere.h5", NO_COLOR="1")


@pytest.mark.parametrize("columns", [60, 80])
def test_warnings_are_broken_between_words_on_a_terminal(tmp_path, columns):
    np.savez(tmp_path / "x.npz", embeddings=np.ones((12, 5)), labels=Y)
    options = ("--no-nmi", "--no-map")
    seen = on_terminal(tmp_path, "eval", "x.npz", *options, COLUMNS=str(columns), NO_COLOR="1")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    lines = [line.strip() for line in re.split(r"[\r\n]+", plain)]
    assert max(map(len, lines)) <= columns
    assert "counted against them: 12 of 12" in " ".join(lines)


def test_control_characters_of_names_do_not_reach_the_terminal(tmp_path):
    evil = "\x1b[31mred\x07\x9b\u202e"
    names = [f"{evil}{n}" for n in range(5)]
    pd.DataFrame(X, columns=names).assign(label=Y, **{f"{evil}x": 0.5}).to_csv(
        tmp_path / "x.csv", index=False
    )
    np.savez(tmp_path / "x.npz", **{f"a{evil}": X, f"b{evil}": X})
    for args in (("eval", "x.csv", "--no-nmi"), ("inspect", "x.csv"), ("inspect", "x.npz")):
        found = call(args[0], tmp_path / args[1], *args[2:])
        assert "\\x1b[31mred" in found.output
        assert not set("\x1b\x07\x9b\u202e") & set(found.output)
    assert found.exit_code == 1


def test_ranks_compare_all_options_but_names_of_files(monkeypatch):
    seen = {}

    def refuse(options, world, may_differ):
        seen.update(options, own=may_differ)
        raise DmlError("Compared.", "", "")

    monkeypatch.setattr("retrieval.console.from_environment", lambda: World(0, 2))
    monkeypatch.setattr("retrieval.distributed.processes.joined", lambda: nullcontext(World(0, 2)))
    monkeypatch.setattr("retrieval.distributed.processes.require_same_options", refuse)
    call("embed", "a.onnx", "photos", "--out", "a.h5", "--output-name", "pooled")
    assert seen["the command"] == "embed"
    assert seen["--output-name"] == "pooled"
    assert not {"model", "data", "--out", "--threads", "--device", "--provider"} & set(seen)
    assert seen["own"] == "--provider, --threads, --device"
    seen.clear()
    call("eval", "a.h5", "--labels", "a.txt", "--per-class", "a.csv", "--no-nmi")
    assert seen["--nmi"] is False
    assert seen["own"] == "--threads, --device"
    assert not {"file", "--labels", "--gallery", "--per-class", "--out"} & set(seen)


def test_paths_are_short_inside_the_current_folder_only(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    assert short_path(tmp_path / "runs/mine/model.onnx") == "mine/model.onnx"
    assert short_path(tmp_path / "other.h5") == str(tmp_path / "other.h5")


def test_a_note_on_the_device_is_shown_once_whatever_logging_does(capsys, caplog):
    logger = logging.getLogger("retrieval.device")
    before = logger.level, logger.propagate
    with caplog.at_level("INFO"), console.device_told():
        for _ in range(2):
            logger.info("Ranks are counted on %s.", "cuda:0")
    assert capsys.readouterr().err == "Ranks are counted on cuda:0.\n"
    assert not caplog.messages
    assert (logger.level, logger.propagate) == before
