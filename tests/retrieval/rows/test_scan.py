"""Scans of rows: compared with NumPy, for all dtypes."""

import numpy as np
import pytest

from retrieval import evaluate
from retrieval.problem import from_arrays
from retrieval.rows.scan import NARROW, scan, units


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("layout", ["rows", "columns", "unaligned"])
def test_lengths_and_units_are_those_of_float64(rng, dtype, layout):
    X = (40 * rng.standard_normal((50, 7))).astype(dtype)
    X[3] = 0
    given = X
    if layout == "columns":
        given = np.asfortranarray(X)
    elif layout == "unaligned":
        raw = np.zeros((50, 1 + 7 * X.itemsize), np.uint8)
        raw[:, 1:] = X.view(np.uint8).reshape(50, -1)
        given = raw[:, 1:].view(dtype)
    found, wide = scan(given), X.astype(np.float64)
    np.testing.assert_allclose(found.square, (wide**2).sum(axis=1), rtol=1e-15)
    assert np.count_nonzero(found.square) == 49
    inverse = rng.random(50)
    wanted = (wide * inverse[:, None]).astype(np.float32)
    np.testing.assert_array_equal(units(given, inverse), wanted)


def test_hashes_are_equal_for_equal_rows_of_any_dtype_and_directions_for_parallel_rows():
    X = np.array([[1, 2, 0], [1, 2, -0.0], [2, 4, 0], [-1, -2, 0], [1, 2, 3]])
    scans = [scan(X.astype(dtype)) for dtype in ("float16", "float32", "int8")]
    for found in scans:
        np.testing.assert_array_equal(found.hashes, scans[0].hashes)
        assert found.hashes[0] == found.hashes[1]
        assert len(set(found.hashes.tolist())) == 4
        assert found.directions[0] == found.directions[1] == found.directions[2]
        assert len(set(found.directions.tolist())) == 3
    assert scan(X) is None  # float64


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_scores_are_those_of_vectors_that_are_not_scanned(rng, monkeypatch, dtype):
    X = rng.integers(-3, 4, (300, 3)).astype(dtype)  # many ties, duplicates and zero rows
    labels = rng.integers(0, 20, 300)
    for rest in ((), (X[:90], labels[:90][::-1].copy())):
        monkeypatch.undo()
        found = evaluate(X, labels, *rest, nmi=False)
        assert from_arrays(X, labels, *rest).gallery_scan is not None
        monkeypatch.setattr("retrieval.problem.scan", lambda vectors: None)
        assert evaluate(X, labels, *rest, nmi=False) == found
