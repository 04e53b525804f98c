"""The nearest positive, through the ranks that follow from it."""

from fractions import Fraction

import numpy as np
import pytest

from retrieval.problem import from_arrays
from retrieval.ranking import nearest_positive
from retrieval.ranking.positions import listed_positives
from retrieval.ranking.vectors import prepare
from tests.retrieval.ranking.references import HARD, assert_exact, ranks_of


@pytest.mark.parametrize("name", HARD)
def test_large_classes_give_the_same_exact_ranks(name, monkeypatch, rng):
    monkeypatch.setattr(nearest_positive, "_LARGE", 0)
    X = HARD[name]
    assert_exact(X, rng.integers(0, 3, len(X)), block=16)


def test_a_query_without_a_positive_has_rank_zero():
    result = ranks_of(np.eye(3, dtype=np.float32), np.array([0, 0, 1]))
    assert result["cos"].rank.tolist()[2] == 0
    assert result["cos"].nearest.tolist() == [1, 0, -1]


@pytest.mark.parametrize("size", [2.0**-107, 2.0**-108])
def test_the_nearest_of_tiny_rows_is_found_for_a_huge_query(size, monkeypatch, rng):
    monkeypatch.setattr(nearest_positive, "_LARGE", 0)
    X = (rng.standard_normal((100, 8)) * size).astype(np.float32)
    huge = (rng.standard_normal((20, 8)) * 2.0**100).astype(np.float32)
    labels = np.zeros(100, int)
    found = ranks_of(X, labels, huge, labels[:20], distances=("l2",))["l2"].nearest
    # |q - x|^2 - |q|^2 = |x|^2 - 2 q x, where |x|^2 is too small to matter.
    assert (found == (huge.astype(np.float64) @ X.T.astype(np.float64)).argmax(axis=1)).all()


def test_the_nearest_of_rows_of_nearly_one_length_is_found_for_a_short_query(monkeypatch, rng):
    monkeypatch.setattr(nearest_positive, "_LARGE", 0)
    X, short = rng.standard_normal((500, 8)), 1e-6 * rng.standard_normal((20, 8))
    X *= (1 + 1e-7 * rng.random((500, 1))) / np.linalg.norm(X, axis=1, keepdims=True)
    labels = np.zeros(500, int)
    found = ranks_of(X, labels, short, labels[:20], distances=("l2",))["l2"].nearest
    wanted = ((short[:, None] - X) ** 2).sum(axis=-1).argmin(axis=1)
    assert found.tolist() == wanted.tolist()


def test_parts_of_a_large_class_share_its_members(monkeypatch, rng):
    calls = []
    two_of_each = nearest_positive._two_of_each
    monkeypatch.setattr(
        nearest_positive, "_two_of_each", lambda *args: calls.append(1) or two_of_each(*args)
    )
    ranks_of(rng.standard_normal((1500, 4)).astype(np.float32), np.arange(1500) % 2)
    assert len(calls) == 2  # of 750 items each, looked at in parts of 512


def test_bounds_of_listed_positives_hold_the_exact_distance(rng):
    X = rng.standard_normal((60, 40)).astype(np.float32)
    prepared = prepare(from_arrays(X, np.arange(60) % 2), ("l2",), 1 << 20, 1)
    classes = nearest_positive.Classes(prepared)
    for large in (True, False):  # by products of classes, or pair by pair
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nearest_positive, "_LARGE", 0 if large else 1 << 40)
            listed = listed_positives(prepared, classes)
        found = nearest_positive.nearest_listed(prepared, listed)["l2"]
        exact = [
            sum((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(*pair, strict=True))
            for pair in zip(X, X[found.index], strict=True)
        ]
        off = [abs(Fraction(near) - far) for near, far in zip(found.squared, exact, strict=True)]
        assert any(off)
        assert all(one <= bound for one, bound in zip(off, found.error, strict=True))
        assert (found.error < 1e-11 * found.squared).all()


def test_runs_of_pairs_split_no_query(monkeypatch):
    monkeypatch.setattr(nearest_positive, "_TOGETHER", 2)
    runs = nearest_positive._query_runs(np.array([0, 0, 0, 1, 2, 2]))
    assert [(run.start, run.stop) for run in runs] == [(0, 3), (3, 6)]
