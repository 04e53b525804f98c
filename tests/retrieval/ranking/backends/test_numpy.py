"""Counting on the CPU: once for both distances where all rows have one length."""

import numpy as np
import pytest

from retrieval.problem import from_arrays
from retrieval.ranking.backends.numpy import NumpyBackend
from retrieval.ranking.tiles import TileCounter
from retrieval.ranking.vectors import prepare
from tests.retrieval.ranking.references import assert_exact, ranks_of


def test_the_nearest_positive_is_no_doubt(monkeypatch, rng):
    monkeypatch.setattr(NumpyBackend, "doubtful", lambda *_: pytest.fail("nothing is in doubt"))
    angles = rng.permutation(40) * 0.07  # no two pairs of neighbours are equally near by accident
    angles += 0.001 * np.arange(40) ** 1.5
    X = np.stack([np.cos(angles), np.sin(angles)], 1)
    ranks_of(X, np.arange(40) % 8, distances=("cos",), block=16)


@pytest.mark.parametrize("kind", ["anywhere", "close together"])
def test_rows_of_one_length_are_counted_once_for_both_distances(kind, rng, monkeypatch):
    X = rng.standard_normal((60, 12))
    if kind == "close together":
        X = 1 + 1e-3 * X
    # Lengths that differ by less than rows of one length may: l2 and cos order them differently.
    X *= (1 + 8e-6 * rng.random((60, 1))) / np.linalg.norm(X, axis=1, keepdims=True)
    X = X.astype(np.float32)
    X[7] = 0
    labels = rng.integers(0, 6, len(X))
    queries = [row for row in range(60) if row != 7]
    counted = []
    count = NumpyBackend._count

    def watched(self, tile, product, thresholds, wanted):
        counted.append((wanted, product.size))
        return count(self, tile, product, thresholds, wanted)

    monkeypatch.setattr(NumpyBackend, "_count", watched)
    gallery = X[queries], labels[queries]
    assert_exact(*gallery, X, labels, block=16)  # one query is zero
    assert_exact(*gallery, block=16)
    once, twice = (
        sum(n for w, n in counted if w == kind) for kind in ((True, False), (True, True))
    )
    assert once > 0
    if kind == "anywhere":
        assert twice < once / 2


@pytest.mark.parametrize("sideways", [3e-6, 7.9e-6])  # l2 finds both equally near at 8e-6
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_nearly_one_length_may_rank_differently_by_each_distance(sign, sideways):
    # The negative is nearer by one distance alone: l2 sees its length, cos its angle.
    negative = np.array([sign * sideways, 1 + sign * 8e-6])
    gallery = np.array([[0, 1], negative])
    assert_exact(gallery, np.array([0, 1]), np.array([[1.0, 0.0]]), np.array([0]), block=1)


def test_a_query_near_zero_beside_long_rows_gives_no_warning_of_numpy():
    gallery = np.array([[100, 0], [0, 100], [60, 80]], np.float32)
    queries = np.array([[1e-45, 0], [1, 0]], np.float32)
    assert_exact(gallery, np.array([0, 1, 0]), queries, np.array([0, 1]))


def test_rows_of_different_lengths_are_counted_by_each_distance(rng):
    X = rng.standard_normal((20, 4))
    problem = from_arrays(X, np.arange(20) % 4)
    counter = TileCounter(prepare(problem, ("l2", "cos"), 1 << 20, 1), False)
    assert counter.backend.joint is None


@pytest.mark.parametrize(("distance", "alone"), [("cos", (True, False)), ("l2", (False, True))])
def test_one_distance_alone_is_all_that_is_counted(distance, alone, rng, monkeypatch):
    wanted = []
    count = NumpyBackend._count

    def watched(self, tile, product, thresholds, asked):
        wanted.append(asked)
        return count(self, tile, product, thresholds, asked)

    monkeypatch.setattr(NumpyBackend, "_count", watched)
    X, labels = rng.standard_normal((60, 12)).astype(np.float32), rng.integers(0, 6, 60)
    ranks_of(X, labels, distances=(distance,), block=16)
    assert set(wanted) == {alone}
