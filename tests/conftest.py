"""Small data that several test files use."""

import ctypes
import gc
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from cli import main
from retrieval.distributed.world import SLURM, VARIABLES
from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.files import whole_file
from retrieval.formats import trial
from retrieval.formats.hdf5.writing import write
from tests import forks, traces, windows
from tests.commands import X, Y
from trainer.run import metrics_log

ROOT = Path(__file__).parent
# Tests are too small to gain from threads, and their numbers should not depend on a trial of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that tests start would else compile our sources again, each of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Background jobs of a shell are deaf to Ctrl-C, and so is what they start; here it is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """For all tests in several processes: one process that forks serves all of them."""
    several = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if several and config.args_source == config.ArgsSource.TESTPATHS:
        forks.serve()


def pytest_collection_modifyitems(items):
    """Run the tests of `retrieval` first.

    Its readers try files in forks. A fork of a process that has traced networks takes ten times as
    long as one of a small process.
    """
    items.sort(key=lambda item: (ROOT / "retrieval") not in item.path.parents)


@pytest.fixture(autouse=True, scope="module")
def freed_memory():
    """Give the memory that is not in use back to the system, so that forks take less time."""
    yield
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def pytest_collection_finish():
    """Share traces; let the collector of garbage look at what tests make, not at all imports."""
    if "exporter.onnx.trace" in sys.modules:
        traces.share()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # collecting after every 700 objects takes longer


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tests, and the processes they start, leave nothing in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_traces(tmp_path_factory):
    """A folder for the graphs of exported networks, shared by the processes of pytest -n."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "traces"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(traces.FOLDER, str(folder))
        yield


@pytest.fixture(autouse=True, scope="session")
def untried():
    """Read files at once: a fork of this large process, for each file, takes a tenth of all tests.

    This holds for processes that tests start, too. Tests of damaged files, and some of whole
    commands, try files as users do: the fixture `tried`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(trial.SWITCH, "0")
        yield


@pytest.fixture
def tried(monkeypatch):
    """Files are tried in a child process before they are read, as for every user."""
    monkeypatch.delenv(trial.SWITCH)


@pytest.fixture(autouse=True, scope="session")
def plain_curves():
    """A file instead of the drawing, which takes as long as a small training.

    tests/trainer/run/test_metrics_log.py draws, and so does every process that tests start.
    """

    def draw(folder, records):
        if records:
            with whole_file(folder / metrics_log.CURVES) as file:
                file.write(b"not drawn")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_log, "draw_curves", draw)
        yield


@pytest.fixture(autouse=True, scope="session")
def limited_onednn():
    """Where AMX is advertised, find out whether it may be used before oneDNN settles on it.

    Else the first bf16 layer could end the process, and all of its tests with it.
    """
    flags = Path("/proc/cpuinfo")
    if not flags.exists() or "amx_bf16" not in flags.read_text():
        return
    with suppress(ImportError):  # torch is not installed
        import torch

        from trainer.run.half_precision import allow_half

        with suppress(DmlError):  # neither way; the tests of half precision are skipped
            allow_half(torch.bfloat16)
        torch.nn.functional.conv2d(torch.ones(1, 1, 8, 8), torch.ones(1, 1, 3, 3))


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from tests.browser import Browser  # which does not work on Windows

    one = Browser(program, tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def clustered(rng):
    """60 vectors around 6 centres and their labels: right more often than not, never always."""
    labels = np.arange(60) % 6
    vectors = rng.standard_normal((6, 8))[labels] + 0.8 * rng.standard_normal((60, 8))
    return vectors.astype(np.float32), labels


@pytest.fixture
def files(tmp_path, clustered):
    X, labels = clustered
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", labels)
    names = np.array([f"class {c}" for c in range(6)])
    write(tmp_path / "a.h5", {"test": Split(X, labels)}, names, {"model": "a"})
    write(tmp_path / "b.h5", {"test": Split(X[:, ::-1] ** 3, labels)}, names, {"model": "b"})
    write(
        tmp_path / "shop.h5",
        {"query": Split(X[:20], labels[:20]), "gallery": Split(X[20:], labels[20:])},
    )
    return tmp_path


@pytest.fixture
def environment(monkeypatch):
    """Set variables of the environment; those of torchrun and Slurm are absent before."""
    for name in (*VARIABLES, *SLURM):
        monkeypatch.delenv(name, raising=False)
    return lambda **given: [monkeypatch.setenv(name, value) for name, value in given.items()]


@pytest.fixture
def photos(tmp_path):
    """A folder of small pictures, one folder for each class."""
    from tests.trainer.small import draw_pictures  # imports torch

    return draw_pictures(tmp_path / "photos")


@pytest.fixture
def dmltool(tmp_path, monkeypatch):
    """Runs a command in this process, in a folder and with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda *args: CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def table(tmp_path):
    """X and Y as a CSV table with a header and a column beside them."""
    import pandas as pd

    frame = pd.DataFrame(X, columns=[f"d{n}" for n in range(5)]).assign(label=Y, width=0.5)
    frame.to_csv(tmp_path / "x.csv", index=False)
    return tmp_path / "x.csv"


@pytest.fixture
def as_on_windows(monkeypatch):
    """Renaming and removing what this process has open fails."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux tells what is open")
    windows.refuse_open_files(monkeypatch)
