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


def test_pairs_that_reach_no_threshold_of_either_side_are_skipped(rng):
    A, B, margin = 30, 41, 1 / 2

    def halves(low, high, *shape):  # exact in float32, and often equal
        return rng.integers(2 * low, 2 * high, shape) / 2

    heads, lengths = halves(-1, 1, A, B), (halves(0, 2, A), halves(0, 2, B))
    rows, columns = (
        kernels.Reach(halves(2, 5, n), halves(-8, 0, n), *halves(0, 3, 2, n), halves(0, 4, n))
        for n in (A, B)
    )
    most = heads + np.outer(*lengths)
    pairs = [
        (most, rows.cos[:, None]),
        (most, columns.cos),
        ((most + margin) * np.outer(rows.twice, columns.norm), columns.square - rows.l2[:, None]),
        ((most + margin) * np.outer(rows.norm, columns.twice), rows.square[:, None] - columns.l2),
    ]
    reaches = [a >= b for a, b in pairs]
    for n, (a, b) in enumerate(pairs):  # some pairs reach this one alone, and just so
        assert ((a == b) & (np.sum(reaches, axis=0) == 1)).any(), n
    product = heads.astype(np.float32)
    units = np.ones((B, 1), np.float32)
    tails = [kernels.Tails(np.float32(x), units[: len(x)]) for x in lengths]
    sides = [kernels.Reach(*map(np.float32, side)) for side in (rows, columns)]
    kernels.complete_product(product, np.float32(margin), *tails, *sides)
    np.testing.assert_array_equal(product, np.where(np.any(reaches, axis=0), 1, -2))


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
