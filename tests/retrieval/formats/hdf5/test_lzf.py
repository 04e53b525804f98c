"""LZF, h5py's fast compression."""

import contextlib

import h5py
import numpy as np
import pytest

from retrieval.formats.hdf5 import lzf

CHANCE = np.random.default_rng(0)


@pytest.mark.parametrize("size", [33, 10_000])
def test_what_h5py_compresses_comes_back(tmp_path, size):
    array = CHANCE.integers(0, 3, size, "u1")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        stored = file.create_dataset("x", data=array, chunks=(size,), compression="lzf")
        file.flush()
        skipped, data = stored.id.read_direct_chunk((0,))
    assert not skipped
    assert lzf.inflate(data, size) == array.tobytes()
    with pytest.raises(ValueError, match="longer than a chunk"):
        lzf.inflate(data, size - 1)


@pytest.mark.parametrize("size", [1, 33, 10_000])
def test_damaged_lzf_never_leaves_its_bounds(size):
    for _ in range(300):
        data = CHANCE.integers(0, 256, size, "u1").tobytes()
        with contextlib.suppress(ValueError):
            assert len(lzf.inflate(data, 5000)) <= 5000
