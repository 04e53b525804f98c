"""Compiled loops over tiles against plain NumPy."""

import numpy as np
import pytest

from retrieval.ranking import kernels


def test_a_pair_at_its_threshold_is_not_skipped():
    one = np.ones(1, np.float32)
    half = np.float32(0.5)
    tails = kernels.Tails(half * one, np.array([[np.sqrt(half), half]], np.float32))
    for cos, expected in ((0.75, 0.75), (0.7500001, -2.0)):
        reach = kernels.Reach(np.float32(cos) * one, -np.inf * one, 0 * one, one, one)
        nothing = kernels.Reach(np.inf * one, -np.inf * one, 0 * one, one, one)
        product = half * one[:, None]
        kernels.complete_product(product, np.float32(0), tails, tails, reach, nothing)
        assert product[0, 0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("B", [40, 41])  # columns are counted two rows at a time
def test_rows_and_columns_that_reach_their_thresholds_are_counted(rng, B):
    A, margin = 6, np.float32(0.01)
    product = rng.uniform(-1, 1, (A, B)).astype(np.float32)
    product[1, 2] = np.nan  # a query meets itself
    norm, twice = rng.uniform(1, 2, B), rng.uniform(2, 4, A)
    norms = np.stack([norm, norm**2 + 0.01, norm**2 - 0.01]).astype(np.float32)
    cos, l2 = rng.uniform(-1, 1, A), rng.uniform(-3, 0, A)
    thresholds = np.stack([cos + 0.02, cos, twice, -l2 - 0.05, -l2]).astype(np.float32)
    s, p = product.astype(np.float64), twice[:, None] * norm
    wanted = [
        s >= cos[:, None] + 0.02,
        s >= cos[:, None],
        (s - 0.01) * p - norms[1] >= l2[:, None] + 0.05,
        (s + 0.01) * p - norms[2] >= l2[:, None],
    ]
    expected = np.array([reached.sum(axis=1) for reached in wanted])
    assert 0 < expected.min(axis=1).max() < expected.max() < B
    counts = np.empty((4, A), np.int32)
    kernels.count_rows(product, margin, thresholds, norms, (True, True), counts)
    np.testing.assert_array_equal(counts, expected)
    turned = np.ascontiguousarray(product.T)
    kernels.count_columns(turned, margin, thresholds, norms, (True, True), counts)
    np.testing.assert_array_equal(counts, expected)
