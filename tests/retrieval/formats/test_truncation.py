"""A file that is cut short while it is mapped ends with a message and not with a silent signal."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
USES = {
    "copied": "x.copy()",
    "multiplied": "x @ x.T",
    "in a thread": "t = threading.Thread(target=lambda: x.sum()); t.start(); t.join()",
}
SCRIPT = """
import os, sys, threading
from retrieval.loading import load
from retrieval.formats import truncation
truncation.enable()
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


@pytest.mark.parametrize("use", USES)
def test_reading_on_is_an_error_that_names_the_file(file, use):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(use=USES[use]), file],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert run.returncode == 1
    assert f"{file} was cut short" in run.stderr
    assert run.stdout == ""


def test_eval_of_a_file_that_is_cut_short_says_so(file):
    command = [sys.executable, "-m", "cli", "eval", str(file), "--no-map"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        maps = Path(f"/proc/{run.pid}/maps")
        end = time.monotonic() + 60
        while str(file) not in maps.read_text():
            assert run.poll() is None
            assert time.monotonic() < end
        os.truncate(file, 4096)
        out, told = run.communicate(timeout=60)
    assert run.returncode == 1, (out, told)
    # All rows may have been copied before; then the change itself is noticed.
    assert "cut short" in told or "was changed while it was read" in told
