"""Identical rows against brute force, for codes whose words differ in a few bits only."""

import numpy as np
import pytest

from retrieval import evaluate
from retrieval.rows import identical as identical_rows
from retrieval.rows.identical import direction_groups, row_groups, rows_among

KINDS = {
    "int8": lambda rng, shape: rng.integers(-128, 128, shape).astype(np.int8),
    "uint8": lambda rng, shape: rng.integers(0, 256, shape).astype(np.uint8),
    "binary": lambda rng, shape: rng.integers(0, 2, shape).astype(np.uint8),
    "signs": lambda rng, shape: rng.choice([-1, 1], shape).astype(np.float32),
    "float16": lambda rng, shape: rng.integers(-4, 5, shape).astype(np.float16),
}


def pairs(kind: str, seed: int, N: int = 4000, D: int = 24) -> np.ndarray:
    """Rows of which a third is there twice, in any order."""
    rng = np.random.default_rng(seed)
    X = KINDS[kind](rng, (N, D))
    return rng.permutation(np.concatenate([X, X[: N // 2]]))


def slow_groups(X: np.ndarray) -> np.ndarray:
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(x.tobytes(), n) for n, x in enumerate(X)])


@pytest.mark.parametrize("kind", KINDS)
def test_identical_rows_of_codes_are_all_found(kind):
    X = pairs(kind, 0)
    assert np.array_equal(row_groups(X), slow_groups(X))


@pytest.mark.parametrize("kind", KINDS)
def test_queries_in_the_gallery_are_all_found(kind):
    X = pairs(kind, 1)
    queries, gallery = X[:2000], X[2000:]
    known = {x.tobytes() for x in gallery}
    found = rows_among(queries, gallery)
    assert np.array_equal(found >= 0, [q.tobytes() in known for q in queries])
    inside = found >= 0
    assert np.array_equal(gallery[found[inside]], queries[inside])


@pytest.mark.parametrize("bits", [0, 2])
def test_rows_with_one_hash_still_find_their_twins(monkeypatch, bits):
    """A hash of no bits, or of two, collides for nearly all rows."""
    hashes = identical_rows._hashes
    monkeypatch.setattr(
        identical_rows, "_hashes", lambda *given: hashes(*given) & np.uint64(2**bits - 1)
    )
    X = pairs("binary", 2, N=60)
    assert np.array_equal(row_groups(X), slow_groups(X))
    known = {x.tobytes() for x in X[50:]}
    found = rows_among(X[:50], X[50:])
    assert np.array_equal(found >= 0, [q.tobytes() in known for q in X[:50]])


def test_groups_of_one_direction_are_a_promise(monkeypatch):
    monkeypatch.setattr(identical_rows, "_hashes", lambda count, *_: np.zeros(count, np.uint64))
    X = np.array([[1, 2], [2, 4], [2, 1], [4, 2]], np.float32)
    group = direction_groups(X, lambda part: X[part], np.arange(4))
    assert group.tolist() == [0, 0, 2, 3]


def test_rows_of_other_dtypes_and_minus_zero_are_identical():
    gallery = np.array([[0.0, 1.0], [2.0, 3.0]])
    queries = np.array([[2, 3], [0, 1], [1, 0]], np.int8)
    assert rows_among(queries, gallery).tolist() == [1, 0, -1]
    assert row_groups(np.array([[0.0, 1.0], [-0.0, 1.0]])).tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary"])
def test_checks_count_every_conflicting_duplicate_and_query_in_the_gallery(kind):
    X = KINDS[kind](np.random.default_rng(3), (400, 24))
    X = np.unique(X, axis=0)
    N = len(X)
    both = np.concatenate([X, X[:81]])
    labels = np.r_[np.arange(N) % 20, (np.arange(81) + 1) % 20]
    options = {"nmi": False, "map_at_r": False, "distances": "l2"}
    alone = evaluate(both, labels, **options)
    assert alone["checks"]["conflicting_duplicates"] == 162
    asked = evaluate(X[:81], np.arange(81) % 20, X, np.arange(N) % 20, **options)
    assert asked["checks"]["queries_in_gallery"] == 81
