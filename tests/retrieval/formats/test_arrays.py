"""Memory for arrays: where it is taken, how much of it, and conversions without loss."""

import gzip
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import h5py
import numpy as np
import pytest

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats import arrays
from retrieval.formats.arrays import Growing, Sharing, machine
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading.load import load
from tests.retrieval.formats.samples import X, only, refused

pytestmark = pytest.mark.usefixtures("tried")


def test_ml_dtypes_style_bfloat16_npy(tmp_path):
    bits = (X.view(np.uint32) >> 16).astype(np.uint16)
    np.save(tmp_path / "x.npy", bits.view("V2"))
    found = only(load(tmp_path / "x.npy")).vectors
    np.testing.assert_array_equal(found, (bits.astype(np.uint32) << 16).view(np.float32))


def test_integers_become_float64_only_if_exact(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1, 2**53]]))
    assert only(load(tmp_path / "x.npy")).vectors.dtype == np.float64
    np.save(tmp_path / "x.npy", np.array([[1, 2**53 + 1]]))
    with pytest.raises(DmlError, match="2\\^53"):
        load(tmp_path / "x.npy")


@pytest.mark.parametrize(("shape", "why"), [((0, 8), "no rows"), ((40, 0), "no numbers")])
def test_an_array_without_numbers_is_told(tmp_path, shape, why):
    np.savez(tmp_path / "x.npz", x=np.zeros(shape), y=np.arange(shape[0]))
    assert why in refused(tmp_path / "x.npz", "has the shape").why


def test_large_arrays_go_to_an_unlinked_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "available_memory", lambda: 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    small, large = arrays.allocate((2, 4), "f4"), arrays.allocate((100, 10), "f4")
    assert not isinstance(small, np.memmap)
    assert isinstance(large, np.memmap)
    assert large.shape == (100, 10)
    assert not list(tmp_path.iterdir())
    large[:] = 3
    assert large.sum() == 3000


def test_rows_that_follow_each_other_are_gathered_without_a_copy(tmp_path, monkeypatch):
    rows = np.arange(40.0).reshape(10, 4)
    for at in ([3, 4, 5], [9], []):
        found = arrays.gathered(rows, np.array(at, np.int64))
        assert np.shares_memory(found, rows) or not at
        np.testing.assert_array_equal(found, rows[at].reshape(-1, 4))
    monkeypatch.setattr(arrays, "available_memory", lambda: 0)
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 64)  # two rows
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = arrays.gathered(rows, np.array([0, 2, 3, 7, 9]))
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(found, rows[[0, 2, 3, 7, 9]])


def test_compressed_files_larger_than_memory_are_read(tmp_path, monkeypatch):
    x = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    np.savez_compressed(tmp_path / "x.npz", x=x)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=x, compression="gzip", chunks=(64, 8))
    monkeypatch.setattr(arrays, "available_memory", lambda: 1000)
    monkeypatch.setattr(arrays, "BLOCK_BYTES", 4096)
    for name in ("x.npz", "x.h5"):
        found = load(tmp_path / name).splits["test"].vectors
        assert isinstance(found, np.memmap)
        np.testing.assert_array_equal(found, x)


def test_no_room_for_a_large_array_is_told(monkeypatch):
    monkeypatch.setattr(arrays, "available_memory", lambda: 0)
    with pytest.raises(DmlError, match="TMPDIR"):
        arrays.allocate((1 << 40, 1 << 14), "f8")


def test_a_full_disk_is_named(monkeypatch):
    def full(buffering=-1, **_):
        return open("/dev/full", "w+b", buffering=buffering)

    monkeypatch.setattr(arrays.tempfile, "TemporaryFile", full)
    with closing(Growing(X)) as rows:
        told = f"no room for an array of {X.nbytes} B"
        with pytest.raises(DmlError, match=told) as error:
            rows.append(X)
        assert "too large for memory" not in error.value.why
        assert "TMPDIR" in error.value.fix


def test_a_system_without_a_folder_for_temporary_files_is_told(tmp_path, monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    for name in "ab":
        np.save(tmp_path / f"{name}.npy", X)
    (tmp_path / "x.npy.gz").write_bytes(gzip.compress((tmp_path / "a.npy").read_bytes()))
    monkeypatch.setattr(tempfile, "gettempdir", none)
    for name in ("[ab].npy", "x.npy.gz"):
        with pytest.raises(DmlError, match="no folder for temporary files") as error:
            load(tmp_path / name)
        assert "TMPDIR" in error.value.fix


@pytest.mark.parametrize("name", ["x.h5", "x.npz"])
def test_paths_that_are_much_alike_are_not_taken_for_a_bomb(tmp_path, monkeypatch, name):
    """They shrink to a hundredth, but a file of as many vectors is large anyway."""
    monkeypatch.setattr(arrays, "ROOM_BYTES", 1 << 16)
    paths = np.array([f"{'folder/' * 100}{n:05}.jpg" for n in range(2000)])
    x = np.random.default_rng(0).standard_normal((2000, 256)).astype("f4")
    if name == "x.h5":
        hdf5.write(tmp_path / name, {"test": Split(x, np.arange(2000) % 9, paths)})
    else:
        np.savez_compressed(tmp_path / name, embeddings=x, labels=np.arange(2000) % 9, paths=paths)
    found = load(tmp_path / name).splits["test"]
    assert found.paths.tolist() == paths.tolist()
    with h5py.File(tmp_path / "y.h5", "w") as file:  # numbers are held to their own size
        file["x"] = x
        file.create_dataset("labels", data=np.zeros(2000, "i8"), chunks=(2000,))
        file.create_dataset("y", data=np.zeros((2000, 256), "f4"), compression="gzip")
    with pytest.raises(DmlError, match="h5repack -f NONE"):
        load(f"{tmp_path / 'y.h5'}::y")


def test_the_arrays_of_a_file_share_one_budget(tmp_path, monkeypatch):
    """Each array of the file would be let pass alone."""
    monkeypatch.setattr(arrays, "ROOM_BYTES", 1 << 20)
    path = tmp_path / "x.npz"
    names = np.array([f"{n:0100d}" for n in range(2000)])  # 800 KB of zeros and numbers
    np.savez_compressed(path, embeddings=np.zeros((2000, 100), np.float32), labels=names)
    with pytest.raises(DmlError, match=r"claims .* bytes of data"):
        load(path)
    monkeypatch.setattr(arrays, "ROOM_BYTES", 1 << 21)
    assert len(load(path).splits["test"].labels) == 2000


# One copy for all processes of a machine


@pytest.mark.skipif(sys.platform != "linux", reason="copies are shared on Linux only")
def test_what_another_process_wrote_is_opened_once():
    first = Sharing()
    with tempfile.TemporaryFile() as file:
        file.write(b"rows")
        file.flush()
        first.add(file)
    second = Sharing(first.own)
    with second.next() as found:
        assert found.read() == b"rows"
    assert second.next() is None
    os.close(first.own[0][1])


@pytest.mark.skipif(sys.platform != "linux", reason="copies are shared on Linux only")
def test_a_pipe_of_another_process_is_not_waited_for():
    """In a container the number of a process may be that of another one."""
    end, other = os.pipe()
    os.close(other)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(Sharing([(os.getpid(), end, 1, 2)]).next)
        try:
            assert opening.result(10) is None
        finally:
            os.close(os.open(f"/proc/self/fd/{end}", os.O_RDWR))  # ends a wait
            os.close(end)


def test_machines_and_containers_of_the_same_name_are_told_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"boot {name}\n")
        (tmp_path / f"processes {name}").symlink_to(f"pid:[{name}]")
    places = [(x, f"processes {y}") for x in "ab" for y in "ab"] + [("none", "none")]
    found = {machine(tmp_path / boot, tmp_path / numbers) for boot, numbers in places}
    assert len(found) == 5
    assert machine() == machine()
