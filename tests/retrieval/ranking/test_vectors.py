"""Vectors of any kind and size."""

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.problem import from_arrays
from retrieval.ranking.vectors import prepare, whole_multiples
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


def test_one_row_of_other_numbers_ends_a_lattice():
    X = np.random.default_rng(0).integers(-3, 4, (200, 4)).astype(np.float32)
    assert prepare(from_arrays(X, np.zeros(200, int)), ("l2",), 1 << 20, 1).lattice
    X[150, 2] = 0.1
    assert not prepare(from_arrays(X, np.zeros(200, int)), ("l2",), 1 << 20, 1).lattice


def test_numbers_that_only_round_to_multiples_are_none():
    assert 3 * 0.1 == 0.1 + 0.2  # rounded: 0.1 + 0.2 is not three times 0.1
    X = np.array([[0.1, 0.2], [0.1 + 0.2, 0.1]])
    assert whole_multiples([X])[0] is X
    X[1, 0] = 0.4
    assert whole_multiples([X])[0].tolist() == [[1, 2], [4, 1]]
