"""Neighbour lists against brute force in float64."""

import numpy as np
import pytest

from retrieval import neighbours
from retrieval.neighbours import NEGATIVE, POSITIVE, nearest, nearest_quickly, pair_scores
from retrieval.problem import from_arrays
from retrieval.ranking.backends.choice import VARIABLE

DISTANCES = ["cos", "l2"]


def alike(vectors: np.ndarray):
    """A problem in which all items are of one class: every list is one of positives."""
    return from_arrays(vectors, np.zeros(len(vectors), int))


def squared_distances(queries: np.ndarray, gallery: np.ndarray, distance: str) -> np.ndarray:
    q, g = (x.astype(np.float64) for x in (queries, gallery))
    if distance == "cos":
        q, g = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, g))
    return ((q[:, None] - g) ** 2).sum(axis=2)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("memory", [1, 40 * 8 * 4, 1 << 30])
def test_positives_and_negatives_are_those_of_brute_force(rng, distance, memory, monkeypatch):
    monkeypatch.setattr(neighbours, "ROWS", 7)
    monkeypatch.setattr(neighbours, "COLUMNS", 16)
    X, labels = rng.standard_normal((60, 8)).astype(np.float32), np.arange(60) % 5
    labels[3] = 77
    problem = from_arrays(X, labels)
    apart = squared_distances(X, X, distance)
    np.fill_diagonal(apart, np.inf)
    same = labels[:, None] == labels
    found = nearest(problem, 6, distance, memory=memory)
    for side, wanted in ((POSITIVE, same), (NEGATIVE, ~same)):
        expected = np.where(wanted, apart, np.inf)
        order = np.argsort(expected, axis=1)[:, :6]
        listed = np.isfinite(np.take_along_axis(expected, order, axis=1))
        assert np.array_equal(found.ids[:, side], np.where(listed, order, -1))
    monkeypatch.setenv(VARIABLE, "torch")
    by_torch = nearest(problem, 6, distance, memory=memory, device="cpu")
    for one, other in zip(by_torch[:2], found[:2], strict=True):
        assert np.array_equal(one, other)
    assert (found.ids[3, POSITIVE] == -1).all()
    assert np.isinf(found.squared[3, POSITIVE]).all()
    best = nearest_quickly(problem, distance, memory=memory)
    assert np.array_equal(best.negative, found.ids[:, NEGATIVE, 0])
    assert best.margin[3] == -np.inf
    others = np.arange(60) != 3
    expected = (found.squared[:, NEGATIVE, 0] - found.squared[:, POSITIVE, 0])[others]
    scale = best.margin[others] @ expected / (expected @ expected)
    assert scale > 0
    np.testing.assert_allclose(best.margin[others] / scale, expected, atol=1e-3)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("memory", [1, 1 << 16])
@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8"])
def test_lists_of_memory_maps_equal_brute_force(tmp_path, rng, distance, memory, kind):
    X = (20 * rng.standard_normal((100, 9))).astype(kind)
    np.save(tmp_path / "x.npy", X)
    gallery = np.load(tmp_path / "x.npy", mmap_mode="r")
    zeros = np.zeros(100, int)
    found = nearest(from_arrays(X[:25], zeros[:25], gallery, zeros), 6, distance, memory=memory)
    expected = np.sort(squared_distances(X[:25], X, distance), axis=1)[:, :6]
    listed = found.space.score(found.squared[:, POSITIVE])
    score = 1 - expected / 2 if distance == "cos" else np.sqrt(expected)
    assert listed == pytest.approx(score, rel=1e-12, abs=1e-7)
    assert all(len(set(row)) == 6 for row in found.ids[:, POSITIVE].tolist())
    assert found.ids.dtype == np.int64


@pytest.mark.parametrize("size", [1e-20, 1e20])
@pytest.mark.parametrize("distance", DISTANCES)
def test_tiny_and_huge_norms_neither_vanish_nor_overflow(rng, distance, size):
    X = rng.standard_normal((100, 6))
    plain, scaled = (nearest(alike(x), 5, distance) for x in (X, (X * size).astype(np.float32)))
    assert np.array_equal(plain.ids, scaled.ids)


def test_a_query_is_left_out_by_its_id_when_embeddings_repeat():
    X = np.repeat(np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32), 2, axis=0)
    ids = nearest(alike(X), 5, "l2").ids[:, POSITIVE]
    assert not (ids == np.arange(60)[:, None]).any()
    assert np.array_equal(ids[:, 0], np.arange(60) ^ 1)  # the twin comes first


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_equals_are_listed_in_the_order_of_the_gallery(distance, memory):
    X = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    ids = nearest(alike(X), 4, distance, memory=memory).ids[:, POSITIVE]
    assert ids.tolist()[0] == [2, 4, 1, 3]
    assert ids.tolist()[2] == [0, 4, 1, 3]


def test_lists_keep_their_digits_far_from_the_origin(rng):
    X = 1e5 + rng.normal(size=(80, 6))
    squared = squared_distances(X, X, "l2")
    np.fill_diagonal(squared, np.inf)
    found = nearest(alike(X), 5, "l2")
    assert found.space.score(found.squared[:, POSITIVE]) == pytest.approx(
        np.sqrt(np.sort(squared, axis=1)[:, :5]), rel=1e-9
    )


def test_lists_are_padded_where_the_gallery_ends():
    X = np.array([[0.0], [1.0], [3.0]], np.float32)
    found = nearest(alike(X), 4, "l2")
    assert found.ids[:, POSITIVE].tolist() == [[1, 2, -1, -1], [0, 2, -1, -1], [1, 0, -1, -1]]
    assert found.space.score(found.squared[0, POSITIVE]).tolist() == [1.0, 3.0, np.inf, np.inf]


def test_the_cosine_of_a_zero_row_is_zero():
    X = np.array([[0.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
    found = nearest(alike(X), 2, "cos")
    assert found.space.score(found.squared[:, POSITIVE]) == pytest.approx(np.zeros((3, 2)))


@pytest.mark.parametrize("distance", DISTANCES)
def test_scores_of_pairs_are_cosines_and_distances(rng, distance):
    X = rng.standard_normal((40, 5))
    q, g = rng.integers(0, 40, (2, 100))
    squared = squared_distances(X, X, distance)[q, g]
    expected = 1 - squared / 2 if distance == "cos" else np.sqrt(squared)
    assert pair_scores(alike(X), q, g, distance) == pytest.approx(expected)


def test_progress_counts_up_to_all_and_can_interrupt(rng):
    problem = alike(rng.standard_normal((300, 8)))
    seen = []
    nearest(problem, 3, "l2", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (300 * 300, 300 * 300)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nearest(problem, 3, "l2", stop, memory=1 << 10)


@pytest.mark.parametrize("size", [1e6, 1e9])
def test_a_row_far_away_takes_no_digits_from_the_distances_of_the_others(rng, size):
    X, labels = rng.standard_normal((200, 8)), rng.integers(0, 9, 200)
    X[5] *= size
    problem = from_arrays(X, labels)
    distances = np.where(
        labels[:, None] == labels, np.inf, np.linalg.norm(X[:, None] - X[None], axis=2)
    )
    others = np.arange(200) != 5
    found = nearest_quickly(problem, "l2").negative
    np.testing.assert_array_equal(found[others], distances.argmin(axis=1)[others])
    ids = nearest(problem, 3, "l2").ids[:, NEGATIVE]
    np.testing.assert_array_equal(ids[others], distances.argsort(axis=1)[others, :3])
