"""Vectors of any kind and size."""

import numpy as np
import pytest

from retrieval.errors import DmlError
from tests.retrieval.ranking.references import ranks_of


def test_vectors_outside_the_range_of_float64_squares_are_refused():
    for size in (1e200, 1.2e154, 1e141, 1e-141, 1e-200):
        with pytest.raises(DmlError, match="cannot be compared"):
            ranks_of(np.array([[size], [1.0]]), np.array([0, 0]))


def test_a_mapped_file_gives_the_same_ranks_as_memory(tmp_path, rng):
    X, labels = rng.standard_normal((90, 5)).astype(np.float32), rng.integers(0, 5, 90)
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert (ranks_of(mapped, labels)["l2"].rank == ranks_of(X, labels)["l2"].rank).all()
