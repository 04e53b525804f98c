"""Neighbour lists and places of right items against exact arithmetic and brute force."""

import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval import listed, metrics, neighbours
from retrieval.errors import DmlError

DISTANCES = ["cos", "l2"]


def nearness(query: np.ndarray, item: np.ndarray, distance: str) -> Fraction:
    """Ascending with the distance, by exact arithmetic. The cosine of a zero row is 0."""
    q, x = [Fraction(float(v)) for v in query], [Fraction(float(v)) for v in item]
    if distance == "l2":
        return sum((a - b) ** 2 for a, b in zip(q, x, strict=True))
    dot, length = sum(a * b for a, b in zip(q, x, strict=True)), sum(b * b for b in x)
    return -dot * abs(dot) / length if length else Fraction(0)


def slow(queries, query_labels, gallery, gallery_labels, distance, selfs=None) -> list:
    """(R, positions of all right items) of each query, wrong items first among equals."""
    result = []
    for i, query in enumerate(queries):
        scored = [
            (nearness(query, item, distance), bool(label == query_labels[i]))
            for j, (item, label) in enumerate(zip(gallery, gallery_labels, strict=True))
            if selfs is None or j != selfs[i]
        ]
        scored.sort()  # False before True: wrong items first
        result.append([place for place, (_, right) in enumerate(scored, 1) if right])
    return result


def found_places(found: metrics.RightPositions) -> list[list[int]]:
    return [part.tolist() for part in np.split(found.positions, found.offsets[1:-1])]


def assert_equals_slow(queries, query_labels, gallery, gallery_labels, distance, selfs, **options):
    expected = slow(queries, query_labels, gallery, gallery_labels, distance, selfs)
    sides = (queries, query_labels, gallery, gallery_labels)
    found = listed.right_positions(*sides, distance, self_ids=selfs, **options)
    assert found.counts.tolist() == [len(places) for places in expected]
    assert found_places(found) == [[p for p in ps if p <= len(ps)] for ps in expected]
    for k in (1, 3):
        ranks = listed.recall_ranks(*sides, k, distance, self_ids=selfs, **options)
        assert ranks.tolist() == [min(ps[0], k + 1) if ps else 0 for ps in expected]


def clusters(seed: int, N: int, D: int, C: int, noise: float = 1.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, C, N)
    return rng.normal(size=(C, D))[labels] + noise * rng.normal(size=(N, D)), labels


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("seed", range(3))
def test_places_equal_exact_arithmetic_on_grids_full_of_ties(distance, seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, (100, 3)).astype(np.float32)  # duplicates, multiples and zero rows
    labels = rng.integers(0, 9, 100)
    assert_equals_slow(x, labels, x, labels, distance, np.arange(100))
    assert_equals_slow(x[:30], labels[:30], x[30:], labels[30:], distance, None)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    N=st.integers(1, 50),
    D=st.integers(1, 4),
    span=st.integers(0, 3),
    C=st.integers(1, 20),
    distance=st.sampled_from(DISTANCES),
    memory=st.sampled_from([1, 3000, 1 << 20]),
)
def test_places_equal_exact_arithmetic_whatever_the_memory(seed, N, D, span, C, distance, memory):
    rng = np.random.default_rng(seed)
    x = rng.integers(-span, span + 1, (N, D)).astype(np.float32)
    labels = rng.integers(0, C, N)
    assert_equals_slow(x, labels, x, labels, distance, np.arange(N), memory=memory)


@pytest.mark.parametrize("distance", DISTANCES)
def test_places_equal_exact_arithmetic_where_float32_sees_only_equals(distance):
    # Copies of few points, moved by less than float32 can add to them.
    rng = np.random.default_rng(5)
    x = rng.normal(size=(6, 16))[rng.integers(0, 6, 90)] + 1e-9 * rng.normal(size=(90, 16))
    labels = rng.integers(0, 10, 90)
    assert_equals_slow(x, labels, x, labels, distance, np.arange(90))


@pytest.mark.parametrize("distance", DISTANCES)
def test_places_equal_exact_arithmetic_far_from_the_origin(distance):
    rng = np.random.default_rng(6)
    x = (1000 + rng.normal(size=(120, 8))).astype(np.float32)
    labels = rng.integers(0, 10, 120)
    assert_equals_slow(x, labels, x, labels, distance, np.arange(120))


@pytest.mark.parametrize("seed", range(5))
def test_equals_behind_a_clear_first_neighbour_are_looked_through(seed):
    # Nearest a wrong item, then 60 that float32 cannot order, more than any list holds at first.
    rng = np.random.default_rng(seed)
    gallery = np.concatenate([[0.1], 1 + 1e-10 * rng.permutation(60), rng.uniform(8, 9, 80)])
    labels = np.concatenate([[1], rng.permutation(60) < 20, np.full(80, 2)]).astype(int)
    labels[1:61] = 1 - labels[1:61]
    assert_equals_slow(np.zeros((1, 1)), np.array([0]), gallery[:, None], labels, "l2", None)


@pytest.mark.parametrize("distance", DISTANCES)
def test_ordinary_embeddings_need_no_brute_force(monkeypatch, distance):
    x, labels = clusters(13, 600, 32, 60)
    pending = []
    brute = listed._brute_places
    monkeypatch.setattr(
        listed, "_brute_places", lambda t, p, d: pending.append(len(p)) or brute(t, p, d)
    )
    sides = (x, labels, x, labels)
    listed.right_positions(*sides, distance, self_ids=np.arange(600))
    listed.recall_ranks(*sides, 4, distance, self_ids=np.arange(600))
    assert pending == [0, 0]


@pytest.mark.parametrize("size", [1e-20, 1e20])
@pytest.mark.parametrize("distance", DISTANCES)
def test_tiny_and_huge_norms_neither_vanish_nor_overflow(distance, size):
    x, labels = clusters(7, 100, 6, 8)
    x = (x * size).astype(np.float32)
    assert_equals_slow(x, labels, x, labels, distance, np.arange(100))
    ids, _ = neighbours.search(x, x, 5, distance, self_ids=np.arange(100))
    plain, _ = neighbours.search(x / size, x / size, 5, distance, self_ids=np.arange(100))
    assert np.array_equal(ids, plain)


@pytest.mark.parametrize("distance", DISTANCES)
def test_r_precision_and_map_at_r_equal_pytorch_metric_learning(distance):
    import torch
    from pytorch_metric_learning.distances import CosineSimilarity, LpDistance
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    x, labels = clusters(8, 400, 16, 20)
    metric = CosineSimilarity() if distance == "cos" else LpDistance(normalize_embeddings=False)
    reference = AccuracyCalculator(
        include=("r_precision", "mean_average_precision_at_r"), knn_func=CustomKNN(metric)
    ).get_accuracy(torch.tensor(x), torch.tensor(labels))
    found = listed.right_positions(x, labels, x, labels, distance, self_ids=np.arange(400))
    assert metrics.r_precision(found)[0] == pytest.approx(reference["r_precision"])
    assert metrics.map_at_r(found)[0] == pytest.approx(reference["mean_average_precision_at_r"])


def test_leaving_out_by_id_where_dropping_the_first_column_flatters():
    x = np.array([[0.0], [0.0], [1.0], [1.1]], np.float32)
    labels = np.array([0, 1, 2, 2])
    everyone = np.arange(4)
    ids, _ = neighbours.search(x, x, 2, "l2")
    dropped = (labels[ids[:, 1]] == labels) | (ids[:, 1] == everyone)
    assert dropped.mean() == 0.75  # one of the twins finds itself in the second column
    ranks = listed.recall_ranks(x, labels, x, labels, 1, "l2", self_ids=everyone)
    assert metrics.recall_at(ranks, [1])[1] == 0.5


def test_recall_ignores_self_when_embeddings_repeat():
    x = np.repeat(np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32), 2, axis=0)
    alone = np.arange(60)  # every row a class of its own: whoever scores has found itself
    ranks = listed.recall_ranks(x, alone, x, alone, 5, "l2", self_ids=alone)
    assert not ranks.any()
    ids, _ = neighbours.search(x, x, 5, "l2", self_ids=alone)
    assert not (ids == alone[:, None]).any()
    assert np.array_equal(ids[:, 0], alone ^ 1)  # the twin comes first


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("value", [0.0, 0.3, 1e9])
def test_all_equal_rows_score_the_floor(distance, value):
    x, labels = np.full((60, 7), value, np.float32), np.arange(60) % 6
    everyone = np.arange(60)
    ranks = listed.recall_ranks(x, labels, x, labels, 50, distance, self_ids=everyone)
    assert (ranks == 51).all()  # all 50 wrong items come first
    found = listed.right_positions(x, labels, x, labels, distance, self_ids=everyone)
    assert metrics.r_precision(found)[0] == metrics.map_at_r(found)[0] == 0.0
    assert (found.counts == 9).all()


def test_copies_of_one_class_are_no_tie_with_others():
    # The lists end among equals, all of them right: a longer look must say rank 1, not a miss.
    x = np.array([[0.0]] * 30 + [[5.0]] * 90, np.float32)
    labels = np.array([0] * 30 + [1, 2] * 45)
    ranks = listed.recall_ranks(x, labels, x, labels, 1, "l2", self_ids=np.arange(120))
    assert (ranks[:30] == 1).all()
    assert (ranks[30:] == 2).all()


def test_single_image_classes_are_lone_and_count_as_misses():
    x, _ = clusters(9, 40, 4, 5)
    labels = np.arange(40)
    labels[:20] = 0
    found = listed.right_positions(x, labels, x, labels, "l2", self_ids=np.arange(40))
    assert (found.counts[20:] == 0).all()
    mean, each = metrics.r_precision(found)
    assert not each[20:].any()
    assert mean == pytest.approx(each[:20].sum() / 40)


def test_query_labels_that_the_gallery_lacks_are_lone():
    x = np.eye(4, dtype=np.float32)
    ranks = listed.recall_ranks(x, np.array([0, 1, 7, 9]), x, np.array([1, 0, 0, 1]), 4, "cos")
    # Query 0 is gallery item 0, a wrong one; the right ones, 1 and 2, tie with the wrong 3.
    assert ranks.tolist() == [3, 3, 0, 0]


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("memory", [1 << 15, 1 << 18, 1 << 30])
def test_memory_and_row_order_do_not_matter(distance, memory):
    x, labels = clusters(10, 300, 12, 25)
    x = x.astype(np.float32)
    x[::7] = x[3]
    everyone = np.arange(300)
    expected = listed.right_positions(x, labels, x, labels, distance, self_ids=everyone)
    order = np.random.default_rng(0).permutation(300)
    found = listed.right_positions(
        x[order], labels[order], x[order], labels[order], distance, self_ids=everyone, memory=memory
    )
    by_row = found_places(expected)
    assert found_places(found) == [by_row[i] for i in order]
    expected = listed.recall_ranks(x, labels, x, labels, 9, distance, self_ids=everyone)
    found = listed.recall_ranks(
        x[order], labels[order], x, labels, 9, distance, self_ids=order, memory=memory
    )
    assert np.array_equal(found, expected[order])


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


def test_one_large_class_does_not_lengthen_the_lists_of_others(monkeypatch):
    labels = np.concatenate([np.zeros(400, int), np.repeat(np.arange(1, 201), 3)])
    x = np.random.default_rng(1).normal(size=(1000, 8))
    lengths = []
    knn = neighbours._knn
    monkeypatch.setattr(
        neighbours, "_knn", lambda q, g, k: lengths.append((len(q), k)) or knn(q, g, k)
    )
    listed.right_positions(x, labels, x, labels, "l2", self_ids=np.arange(1000))
    assert lengths[0][0] == 600
    assert lengths[0][1] < 20


def test_progress_counts_queries_up_to_all_and_can_interrupt():
    x, labels = clusters(12, 300, 8, 10)
    seen = []
    neighbours.search(x, x, 3, "l2", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (300, 300)
    seen.clear()
    listed.right_positions(
        x, labels, x, labels, "l2", progress=lambda done, total: seen.append((done, total))
    )
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
    with pytest.raises(DmlError, match="cos, l2"):
        neighbours.search(np.eye(3), np.eye(3), 1, "euclid")
