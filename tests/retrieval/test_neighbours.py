"""Neighbour lists against brute force in float64."""

import sys

import numpy as np
import pytest

from retrieval import neighbours
from retrieval.errors import DmlError

DISTANCES = ["cos", "l2"]


def clusters(seed: int, N: int, D: int, C: int, noise: float = 1.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, C, N)
    return rng.normal(size=(C, D))[labels] + noise * rng.normal(size=(N, D)), labels


@pytest.mark.parametrize("size", [1e-20, 1e20])
@pytest.mark.parametrize("distance", DISTANCES)
def test_tiny_and_huge_norms_neither_vanish_nor_overflow(distance, size):
    x, _ = clusters(7, 100, 6, 8)
    x = (x * size).astype(np.float32)
    ids, _ = neighbours.search(x, x, 5, distance, self_ids=np.arange(100))
    plain, _ = neighbours.search(x / size, x / size, 5, distance, self_ids=np.arange(100))
    assert np.array_equal(ids, plain)


def test_a_query_is_left_out_by_its_id_when_embeddings_repeat():
    x = np.repeat(np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32), 2, axis=0)
    everyone = np.arange(60)
    ids, _ = neighbours.search(x, x, 5, "l2", self_ids=everyone)
    assert not (ids == everyone[:, None]).any()
    assert np.array_equal(ids[:, 0], everyone ^ 1)  # the twin comes first


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("memory", [1, 1 << 16, 1 << 30])
@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "int8"])
def test_search_equals_brute_force_on_memory_maps(tmp_path, distance, memory, kind):
    x = (clusters(11, 200, 9, 10)[0] * 20).astype(kind)
    np.save(tmp_path / "x.npy", x)
    gallery = np.load(tmp_path / "x.npy", mmap_mode="r")
    q = x[:50].astype(np.float64)
    g = x.astype(np.float64)
    if distance == "cos":
        q, g = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (q, g))
    squared = ((q[:, None] - g) ** 2).sum(axis=2)
    squared[np.arange(50), np.arange(50)] = np.inf
    ids, scores = neighbours.search(
        gallery[:50], gallery, 6, distance, self_ids=np.arange(50), memory=memory
    )
    assert ids.dtype == np.int64
    assert scores.dtype == np.float32
    nearest = np.sort(squared, axis=1)[:, :6]
    expected = 1 - nearest / 2 if distance == "cos" else nearest
    assert scores == pytest.approx(expected, rel=1e-5, abs=1e-5)
    listed = np.take_along_axis(squared, ids, axis=1)
    assert listed == pytest.approx(nearest, rel=1e-5, abs=1e-5)
    assert all(len(set(row)) == 6 for row in ids.tolist())


def test_search_keeps_its_digits_far_from_the_origin():
    x = 1e5 + np.random.default_rng(14).normal(size=(80, 6))
    squared = ((x[:, None] - x) ** 2).sum(axis=2)
    np.fill_diagonal(squared, np.inf)
    _, scores = neighbours.search(x, x, 5, "l2", self_ids=np.arange(80))
    assert scores == pytest.approx(np.sort(squared, axis=1)[:, :5], rel=1e-4)


def test_search_pads_where_the_gallery_ends():
    x = np.array([[0.0], [1.0], [3.0]], np.float32)
    ids, scores = neighbours.search(x, x, 4, "l2", self_ids=np.array([0, 1, -1]))
    assert ids.tolist() == [[1, 2, -1, -1], [0, 2, -1, -1], [2, 1, 0, -1]]
    assert scores.tolist()[0] == [1.0, 9.0, np.inf, np.inf]
    assert neighbours.search(x, x, 4, "cos")[1][0].tolist() == [0, 0, 0, -np.inf]


def test_progress_counts_queries_up_to_all_and_can_interrupt():
    x, _ = clusters(12, 300, 8, 10)
    seen = []
    neighbours.search(x, x, 3, "l2", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (300, 300)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        neighbours.search(x, x, 3, "l2", memory=1 << 14, progress=stop)


def test_missing_faiss_names_the_extras(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(DmlError, match=r"\.\[cpu\]"):
        neighbours.search(np.eye(3), np.eye(3), 1, "l2")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_without_a_distance_are_refused(value):
    x = np.eye(3)
    x[1, 1] = value
    with pytest.raises(DmlError, match="NaN"):
        neighbours.search(x, x, 1, "cos")


def test_unknown_distance_names_the_known_ones():
    with pytest.raises(DmlError, match="cos and l2"):
        neighbours.search(np.eye(3), np.eye(3), 1, "euclid")
