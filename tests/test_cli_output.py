"""What the commands print, wherever it goes: encodings, colours, the next step."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval.embeddings import Split
from retrieval.formats.hdf5.file import write

DMLTOOL = Path(sys.executable).parent / "dmltool"
C_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
ENCODINGS = [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "cp1252"}, C_LOCALE]


@pytest.fixture
def files(tmp_path, clustered):
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
def test_output_that_the_encoding_cannot_show_does_not_crash(files, environment):
    name = next(path.name for path in files.iterdir() if path.name != "b.h5")
    for args in (
        ["eval", name, "--no-map", "--no-nmi"],
        ["inspect", name],
        ["compare", name, "b.h5", "--no-map"],
        ["merge", name, "b.h5", "--out", "日本.h5"],
        ["list", "losses"],
        ["eval", "日本 nowhere.h5"],
    ):
        done = run(files, *args, **environment)
        assert done.returncode == (args[-1] == "日本 nowhere.h5"), done.stderr
        assert b"bug" not in done.stderr


@pytest.mark.parametrize("environment", [{}, *ENCODINGS])
def test_json_is_json_in_any_encoding(files, environment):
    done = run(files, "inspect", "é日.h5", "--json", **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attrs"]["model"] == "日本 → \U0001f600"


def test_signs_that_an_encoding_lacks_are_written_otherwise(files):
    done = run(files, "eval", "b.h5", "--no-map", "--no-nmi", PYTHONIOENCODING="ascii")
    assert b"60 queries, each against 59 others - 6 classes - 8 dimensions" in done.stdout
    assert done.stdout.isascii()


def on_terminal(folder, *args, **environment):
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [DMLTOOL, *args], cwd=folder, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
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


def test_every_command_ends_with_the_next_step_on_stderr(files):
    def last_line(*args):
        done = run(files, *args)
        assert done.returncode == 0, done.stderr
        assert b"Next:" not in done.stdout
        return done.stderr.decode().splitlines()[-1]

    quick = ("--no-map", "--no-nmi")
    assert last_line("eval", "b.h5", *quick) == "Next: dmltool report b.h5"
    np.save(files / "y.npy", np.arange(60) % 6)
    with_labels = ("b.h5", "--labels", "y.npy")
    assert (
        last_line("eval", *with_labels, *quick) == f"Next: dmltool report {' '.join(with_labels)}"
    )
    assert last_line("inspect", "b.h5") == "Next: dmltool eval b.h5"
    assert last_line("compare", "é日.h5", "b.h5", *quick) == (
        "Next: dmltool report b.h5 --compare 'é日.h5'"
    )
    assert last_line("merge", "b.h5", "b.h5", "--out", "c.h5") == "Next: dmltool eval c.h5"
    page = last_line("report", "b.h5", "--map", "none", "--no-nmi")
    assert page == f"Next: open {files / 'report.html'} in a browser"
    assert b"Next:" not in run(files, "inspect", "b.h5", "--json").stderr
    assert b"Next:" not in run(files, "eval", "b.h5", *quick, "--json").stderr
    assert b"Next:" not in run(files, "compare", "b.h5", "b.h5", *quick, "--json").stderr


@pytest.mark.parametrize(
    "args",
    [
        ["report", "nope.h5"],
        ["report", "b.h5", "--compare", "nope.h5"],
        ["eval", "nope.h5", "--out", "report.html"],
        ["compare", "b.h5", "nope.h5", "--out", "report.html"],
        ["merge", "b.h5", "nope.h5", "--out", "there.h5"],
        ["export", "nope.h5"],
        ["export", "nope.h5", "--out", "there"],
        ["embed", "nope.h5", "photos", "--out", "there.h5"],
    ],
)
def test_a_missing_input_is_named_before_an_output_that_exists(files, args):
    (files / "there").mkdir()
    for name in ("report.html", "there.h5", "model.onnx", "there/model.onnx"):
        (files / name).touch()
    done = run(files, *args)
    assert done.returncode == 1
    assert b"nope.h5" in done.stderr.splitlines()[0]
