"""The input files of a command."""

import os
import sys

import numpy as np
import pytest

from retrieval.distributed import processes
from retrieval.distributed.world import World
from retrieval.errors import DmlError
from retrieval.formats.arrays import Sharing
from retrieval.loading import inputs as loading
from retrieval.loading.inputs import Inputs


@pytest.mark.parametrize("given", [{"names": ("",)}, {"names": ("x.npy",), "labels": [""]}])
def test_an_empty_name_is_told_at_once(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.ones((2, 2)))
    with pytest.raises(DmlError, match="name of a file is empty"):
        Inputs(*given["names"], labels=given.get("labels", ()))


def test_a_change_of_any_shard_is_noticed(tmp_path):
    for n in range(3):
        np.save(tmp_path / f"{n}.npy", np.ones((1, 2)))
    inputs = Inputs(str(tmp_path), None)
    inputs.check_unchanged()
    os.utime(tmp_path / "1.npy", (1, 1))
    with pytest.raises(DmlError, match=r"1\.npy was changed"):
        inputs.check_unchanged()


def test_a_change_inside_a_store_is_noticed(tmp_path):
    (tmp_path / "x.zarr" / "c").mkdir(parents=True)
    for name in (".zgroup", "c/0"):
        (tmp_path / "x.zarr" / name).write_text("{}")
    inputs = Inputs(str(tmp_path / "x.zarr"))
    os.utime(tmp_path / "x.zarr" / "c" / "0", (2**32, 2**32))
    with pytest.raises(DmlError, match=r"x\.zarr was changed"):
        inputs.check_unchanged()


def test_a_file_that_was_changed_while_it_was_read_is_told_as_such(tmp_path):
    file = tmp_path / "x.npz"
    np.savez(file, embeddings=np.ones((4, 2), np.float32), labels=np.arange(4))
    inputs = Inputs(str(file))
    inputs.load(str(file))
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DmlError, match="was changed while it was read"):
        inputs.load(str(file))
    damaged = Inputs(str(file))  # nobody changes it now
    with pytest.raises(DmlError, match="cannot be read as npz"):
        damaged.load(str(file))


@pytest.fixture
def as_rank(monkeypatch):
    """Read a set as one of two ranks, the first before the second: its vectors and own copies."""
    told, shared = {}, []

    def gather(value, world):
        told.setdefault(world.rank, value)
        return [told[rank] for rank in sorted(told)]

    class Kept(Sharing):
        def __init__(self, *given):
            super().__init__(*given)
            shared.append(self)

    monkeypatch.setattr(processes, "gather", gather)
    monkeypatch.setattr(loading, "Sharing", Kept)

    def read(folder, rank):
        inputs = Inputs(str(folder), world=World(rank, 2, rank, 2))
        return inputs.load(str(folder)).splits["test"].vectors, len(shared[-1].own)

    yield read
    for number in {file[1] for each in shared for file in each.own}:
        os.close(number)


@pytest.mark.skipif(sys.platform != "linux", reason="copies are shared on Linux only")
@pytest.mark.parametrize("same", [True, False])
def test_a_rank_maps_the_copy_of_the_first_only_of_the_same_files(same, as_rank, tmp_path):
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        for n in range(2):
            x = np.full((4, 3), value, np.float32)
            np.savez(tmp_path / name / f"{n}.npz", embeddings=x, labels=np.arange(4))
    first, copies = as_rank(tmp_path / "a", 0)
    assert ((first == 1).all(), copies) == (True, 1)
    second, copies = as_rank(tmp_path / ("a" if same else "b"), 1)
    assert ((second == (1 if same else 2)).all(), copies) == (True, 0 if same else 1)
