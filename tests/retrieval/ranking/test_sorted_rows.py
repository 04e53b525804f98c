"""Positions by sorting: the same as by counting, and only where a class is large."""

import numpy as np
import pytest

from retrieval.problem import from_arrays
from retrieval.ranking.sorted_rows import sorted_positions, sorting_pays
from retrieval.ranking.vectors import prepare
from tests.retrieval.ranking.references import DISTANCES, listed, ranks_of


def sizes_of(rng, sizes, D=16):
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = rng.standard_normal((len(sizes), D))[labels] + 2 * rng.standard_normal((len(labels), D))
    return (rows * rng.uniform(0.5, 2, (len(labels), 1))).astype(np.float32), labels


def prepared(X, labels):
    return prepare(from_arrays(X, labels), DISTANCES, 1 << 30, 1)


def test_sorting_and_counting_find_the_same_positions(rng):
    X, labels = sizes_of(rng, [300, 200, 100, 1])
    X[::9] = X[0]  # ties between classes: float64 leaves them to the exact count
    counted, by_sorting = (ranks_of(X, labels, positions=True, sort=sort) for sort in (False, True))
    for d in DISTANCES:
        assert listed(by_sorting[d].positions) == listed(counted[d].positions)
        assert (by_sorting[d].rank == counted[d].rank).all()
        assert (by_sorting[d].positions.counts == counted[d].positions.counts).all()


def test_only_large_classes_are_sorted_and_the_order_of_queries_stays(rng):
    X, labels = sizes_of(rng, [400] + [3] * 200)
    large = sorting_pays(from_arrays(X, labels))
    assert (large == (labels == 0)).all()
    mixed, counted = (ranks_of(X, labels, positions=True, sort=sort) for sort in (None, False))
    for d in DISTANCES:
        assert listed(mixed[d].positions) == listed(counted[d].positions)
        assert (mixed[d].rank == counted[d].rank).all()
        assert (mixed[d].nearest == counted[d].nearest).all()


def test_float64_decides_nearly_all_queries_and_leaves_ties_undecided(rng):
    X, labels = sizes_of(rng, [300, 300])
    assert not sorted_positions(prepared(X, labels))[1].any()
    X[1] = X[0]
    labels[:3] = 0, 1, 0
    assert sorted_positions(prepared(X, labels))[1].sum() > 300


def test_ties_of_whole_numbers_are_decided_by_sorting(rng):
    codes = rng.integers(0, 2, (200, 6)).astype(np.float32)
    labels = rng.integers(0, 2, 200)
    problem = from_arrays(codes, labels)
    assert not sorted_positions(prepare(problem, ("l2",), 1 << 30, 1))[1].any()


@pytest.mark.parametrize("query_labels", [[0, 0, 0], [0, 1, 7]])
def test_every_item_of_the_gallery_may_be_a_positive(query_labels, rng):
    X, Q = rng.standard_normal((5, 3)), rng.standard_normal((3, 3))
    found = ranks_of(X, np.zeros(5, int), Q, np.array(query_labels), positions=True, sort=True)
    for d in DISTANCES:
        expected = [[1, 2, 3, 4, 5] if label == 0 else [] for label in query_labels]
        assert listed(found[d].positions) == expected
