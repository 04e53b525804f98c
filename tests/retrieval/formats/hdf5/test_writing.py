"""dmltool's own files: written in any order, killed at any moment, resumed, never half whole."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from hypothesis import given

from retrieval import files
from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats import arrays
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading.load import load
from tests.forks import Forked
from tests.retrieval.formats.hdf5.rows import PATHS, X, Y, stop_early, writer
from tests.retrieval.formats.samples import ROUND, items

ROOT = Path(__file__).parents[4]


@pytest.mark.usefixtures("tried")
@ROUND
@given(item=items(arrays.KEPT))
def test_own_files_round_trip(tmp_path, item):
    x, y = item
    names = np.array([f"bild {n} ü.png" for n in range(len(x))])
    path = tmp_path / "x.h5"
    hdf5.write(path, {"test": Split(x, y, names)}, attrs={"model": "m"}, force=True)
    found = load(path)
    split = found.splits["test"]
    labels = split.labels if found.label_names is None else found.label_names[split.labels]
    np.testing.assert_array_equal(split.vectors, x, strict=True)
    np.testing.assert_array_equal(labels, y, strict=False)
    np.testing.assert_array_equal(split.paths, names)
    assert found.attrs["model"] == "m"


def test_rows_may_arrive_in_any_order(tmp_path):
    with writer(tmp_path / "x.h5") as out:
        out.write("test", np.array([9, 1, 3, 2]), X[[9, 1, 3, 2]])
        assert out.done("test").tolist() == [n in (1, 2, 3, 9) for n in range(10)]
        out.write("test", 4, X[4:9])
        out.write("test", [0], X[:1])
    found = load(tmp_path / "x.h5")
    np.testing.assert_array_equal(found.splits["test"].vectors, X)
    np.testing.assert_array_equal(found.splits["test"].labels, Y)
    np.testing.assert_array_equal(found.splits["test"].paths, PATHS)
    assert found.attrs["preprocessing"] == '{"crop": "centre", "size": 224}'
    assert found.attrs["complete"] is True
    assert [p.name for p in tmp_path.iterdir()] == ["x.h5"]


def test_missing_rows_leave_only_a_partial_file(tmp_path):
    with (
        pytest.raises(DmlError, match="9 rows of test are missing"),
        writer(tmp_path / "x.h5") as out,
    ):
        out.write("test", 3, X[3:4])
    assert [p.name for p in tmp_path.iterdir()] == ["x.h5.partial"]
    with pytest.raises(DmlError, match="not finished"):
        load(tmp_path / "x.h5")
    with pytest.raises(DmlError, match="half-written"):
        load(tmp_path / "x.h5.partial")
    (tmp_path / "x.h5.partial").rename(tmp_path / "y.h5")
    with pytest.raises(DmlError, match="half-written"):
        load(tmp_path / "y.h5")


def test_an_exception_leaves_a_partial_file_that_resumes(tmp_path):
    stop_early(tmp_path / "x.h5")
    with writer(tmp_path / "x.h5", resume=True) as out:
        left = np.flatnonzero(~out.done("test"))
        assert left.tolist() == [6, 7, 8, 9]
        out.write("test", left, X[left])
    np.testing.assert_array_equal(load(tmp_path / "x.h5").splits["test"].vectors, X)


def test_a_file_is_overwritten_only_with_force(tmp_path):
    for force in (False, True):
        hdf5.write(tmp_path / "x.h5", {"test": Split(X + force, Y)}, force=force)
        with pytest.raises(DmlError, match="exists"):
            hdf5.write(tmp_path / "x.h5", {"test": Split(X, Y)})
        assert load(tmp_path / "x.h5").splits["test"].vectors[0, 0] == X[0, 0] + np.float32(force)


def test_unfinished_work_is_not_thrown_away_unasked(tmp_path):
    stop_early(tmp_path / "x.h5")
    with pytest.raises(DmlError, match="--resume"), writer(tmp_path / "x.h5"):
        pass
    with writer(tmp_path / "x.h5", force=True) as out:
        assert not out.done("test").any()
        out.write("test", 0, X)


def test_two_writers_at_once_are_refused(tmp_path):
    code = f"""
from retrieval.formats.hdf5.writing import Writer
with Writer({str(tmp_path / "x.h5")!r}, {{"test": ([1], None)}}, 2) as out:
    print("ready", flush=True)
    input()
    out.write("test", 0, __import__("numpy").ones((1, 2), "f4"))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"ready\n"
        for options in ({"resume": True}, {"force": True}):
            with pytest.raises(DmlError, match="in use"), writer(tmp_path / "x.h5", **options):
                pass
        other.communicate(b"\n")
    assert other.returncode == 0
    assert load(tmp_path / "x.h5").splits["test"].vectors.tolist() == [[1, 1]]


def test_rows_that_do_not_fit_are_refused(tmp_path):
    wrong = [("test", 0, X[:, :3]), ("test", 8, X[:3]), ("test", [-1], X[:1])]
    for split, at, rows in wrong:
        stale = tmp_path / f"{at}.h5"
        with pytest.raises(DmlError, match="do not fit"), writer(stale) as out:
            out.write(split, at, rows)


def test_vectors_alone_can_be_written(tmp_path):
    hdf5.write(tmp_path / "x.h5", {"test": Split(X)})
    found = load(tmp_path / "x.h5").splits["test"]
    np.testing.assert_array_equal(found.vectors, X)
    assert found.labels is None


FULL = """
import resource, sys
import numpy as np
from retrieval.errors import DmlError
from retrieval.formats.hdf5 import writing as hdf5
hdf5.os.posix_fallocate = lambda *a: None
try:
    with hdf5.Writer(sys.argv[1], {"test": (np.arange(1000), None)}, 100) as out:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for at in range(0, 1000, 10):
            out.write("test", at, np.ones((10, 100), "f4"))
except DmlError as error:
    print(error)
"""


def test_a_disk_that_fills_up_is_told_and_leaves_nothing_that_looks_whole(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path / "x.h5")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "the disk is full" in ran.stdout
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [p.name for p in tmp_path.iterdir()] == ["x.h5.partial"]
    with hdf5.Writer(tmp_path / "x.h5", {"test": (np.arange(1000), None)}, 100, resume=True) as out:
        left = np.flatnonzero(~out.done("test"))
        assert 0 < len(left) < 1000
        out.write("test", left, np.ones((len(left), 100), "f4"))
    assert (load(tmp_path / "x.h5").splits["test"].vectors == 1).all()


def test_a_disk_without_room_is_told_before_the_work(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(DmlError, match="the disk is full"), writer(tmp_path / "x.h5"):
            pass
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(DmlError, match="100 are free"), writer(tmp_path / "y.h5"):
        pass
    assert not list(tmp_path.iterdir())


LIMITED = """
import resource, sys
import numpy as np
from retrieval.errors import DmlError
from retrieval.formats.hdf5.writing import Writer
columns = {"test": (np.arange(1000), [f"{n}.png" for n in range(1000)])}
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    with Writer(sys.argv[1], columns, 100):
        pass
except DmlError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system takes no blocks ahead")
@pytest.mark.parametrize("limit", [100, 3_000, 22_000, 100_000])
def test_a_quota_is_told_instead_of_a_crash_of_hdf5(tmp_path, limit):
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "x.h5"), str(limit)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "x.h5.partial could not be written: the disk is full" in ran.stdout
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


ROWS, DIM = 3000, 32


KILLED = """
import sys, time
import numpy as np
from retrieval.formats.hdf5.writing import Writer
path, rows, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
x = np.random.default_rng(7).standard_normal((rows, dim)).astype("f4")
labels, paths = np.arange(rows) // 3, np.array([f"{n}.png" for n in range(rows)])
order = np.random.default_rng(8).permutation(rows)
print("start", flush=True)
attrs = {"model_sha256": "m", "created": "now"}
with Writer(path, {"test": (labels, paths)}, dim, attrs=attrs, resume=True) as out:
    order = order[~out.done("test")[order]]
    for at in range(0, len(order), 8):
        out.write("test", order[at : at + 8], x[order[at : at + 8]])
        print("batch", flush=True)
        time.sleep(0.001)  # long enough for the killer to come in between
"""


def test_killed_at_random_moments_resumes_to_the_same_file(tmp_path):
    def start(path):
        return Forked("-c", KILLED, path, ROWS, DIM, lines=True)

    chance, kills, target = random.Random(0), 0, tmp_path / "killed.h5"
    while not target.exists():
        process = start(target)
        # Half of the kills hit the laying out of the file, half the writing of rows.
        for _ in range(chance.choice([1, chance.randrange(2, 40)])):
            process.line()
        time.sleep(chance.uniform(0.0, 0.005))
        if kills < 8:
            process.send(signal.SIGKILL)
        code = process.end()[0]
        kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
        if not target.exists():
            with pytest.raises(DmlError):
                load(target)
    assert kills == 8
    start(tmp_path / "whole.h5").end()
    found, wanted = load(target), load(tmp_path / "whole.h5")
    for part in ("vectors", "labels", "paths"):
        np.testing.assert_array_equal(
            getattr(found.splits["test"], part), getattr(wanted.splits["test"], part)
        )
    assert found.attrs == wanted.attrs
    assert target.read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["killed.h5", "whole.h5"]


def test_killed_after_the_last_row_only_needs_renaming(tmp_path):
    stop_early(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5.partial", "r+") as file:
        file["test/embeddings"][:] = X
        file.attrs.modify("complete", True)
        del file["progress"]
    with pytest.raises(DmlError):
        load(tmp_path / "x.h5.partial")
    with writer(tmp_path / "x.h5", resume=True) as out:
        assert out.done("test").all()
    np.testing.assert_array_equal(load(tmp_path / "x.h5").splits["test"].vectors, X)


# Several writers of one file


@pytest.mark.parametrize("options", [{}, {"force": True}, {"resume": True}])
def test_of_two_writers_that_begin_at_once_one_gives_up(tmp_path, monkeypatch, options):
    """The second one begins when the first has found nothing that is in use."""
    reserve, others = hdf5.Writer._reserve, []

    def begin_another(self, raw):
        monkeypatch.setattr(hdf5.Writer, "_reserve", reserve)
        others.append(writer(tmp_path / "x.h5", **options).__enter__())
        reserve(self, raw)

    monkeypatch.setattr(hdf5.Writer, "_reserve", begin_another)
    with pytest.raises(DmlError, match="in use"), writer(tmp_path / "x.h5", **options):
        pass
    (other,) = others
    other.write("test", 0, X)
    other.__exit__(None, None, None)
    np.testing.assert_array_equal(load(tmp_path / "x.h5").splits["test"].vectors, X)
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_a_writer_that_opens_a_file_just_before_it_is_finished_does_not_own_it(
    tmp_path, monkeypatch
):
    first = writer(tmp_path / "x.h5").__enter__()
    first.write("test", 0, X)
    lock = files.lock

    def finish_first(file):
        monkeypatch.setattr(files, "lock", lock)
        first.__exit__(None, None, None)
        return lock(file)

    monkeypatch.setattr(files, "lock", finish_first)
    with pytest.raises(DmlError, match="exists"), writer(tmp_path / "x.h5", resume=True):
        pass
    np.testing.assert_array_equal(load(tmp_path / "x.h5").splits["test"].vectors, X)


def test_temporary_files_of_dead_writers_are_removed_and_of_living_ones_not(tmp_path):
    (tmp_path / ".x.h5.partial.0123abcd.tmp").write_bytes(b"half")
    (tmp_path / ".x.h5.partial.original.tmp").write_bytes(b"of the user")
    living, name = files.create_temporary(tmp_path / "x.h5.partial")
    with living, writer(tmp_path / "x.h5", force=True) as out:
        out.write("test", 0, X)
        assert name.exists()
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"x.h5", name.name, ".x.h5.partial.original.tmp"}


def test_a_resumed_file_leaves_no_file_of_an_attempt_to_start_again(tmp_path):
    stop_early(tmp_path / "x.h5")
    (tmp_path / ".x.h5.partial.0123abcd.tmp").write_bytes(b"half")  # killed while --force began
    with writer(tmp_path / "x.h5", resume=True) as out:
        out.write("test", 0, X)
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_a_conversion_does_not_remove_what_another_process_is_writing(tmp_path):
    with writer(tmp_path / "x.h5") as out:
        with pytest.raises(DmlError, match="in use"):
            hdf5.write(tmp_path / "x.h5", {"test": Split(X, Y)})
        out.write("test", 0, X)
    np.testing.assert_array_equal(load(tmp_path / "x.h5").splits["test"].vectors, X)


def test_files_are_written_and_resumed_where_no_open_file_can_be_renamed(tmp_path, as_on_windows):
    path = tmp_path / "x.h5"
    for options in ({}, {"force": True}, {"force": True, "resume": True}):
        with suppress(ValueError), writer(path, **options) as out:
            out.write("test", 0, X[:5])
            raise ValueError
        with writer(path, **options | {"resume": "resume" in options, "force": True}) as out:
            out.write("test", 0, X)
        np.testing.assert_array_equal(load(path).splits["test"].vectors, X)
        assert [p.name for p in tmp_path.iterdir()] == ["x.h5"]
    hdf5.write(path, {"test": Split(X, Y, None)}, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["x.h5"]
