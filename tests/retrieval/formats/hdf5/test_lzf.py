"""LZF, h5py's fast compression."""

import contextlib

import numpy as np
import pytest

from retrieval.formats.hdf5 import lzf

CHANCE = np.random.default_rng(0)


@pytest.mark.parametrize("size", [1, 33, 10_000])
def test_damaged_lzf_never_leaves_its_bounds(size):
    for _ in range(300):
        data = CHANCE.integers(0, 256, size, "u1").tobytes()
        with contextlib.suppress(ValueError):
            assert len(lzf.inflate(data, 5000)) <= 5000
