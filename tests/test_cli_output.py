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
from retrieval.formats.hdf5 import write

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
