"""Positions of all positives against exact arithmetic, FAISS and pytorch-metric-learning."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval import metrics
from retrieval.ranking import nearest_positive, positions, tiles
from tests.retrieval.ranking.references import (
    BACKENDS,
    DISTANCES,
    HARD,
    counted_by,
    exact_positions,
    faiss_neighbours,
    listed,
    ranks_of,
    values,
)


def clusters(seed: int, N: int, D: int, C: int):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, C, N)
    return rng.normal(size=(C, D))[labels] + rng.normal(size=(N, D)), labels


def assert_exact_positions(*args, self_ids=None, **options):
    """Both backends give the exact positions and ranks."""
    results = {}
    for backend in BACKENDS:
        with counted_by(backend):
            results[backend] = ranks_of(*args, self_ids=self_ids, positions=True, **options)
    for distance in DISTANCES:
        expected = exact_positions(*args, distance=distance, self_ids=self_ids)
        for backend, result in results.items():
            found, where = result[distance], (backend, distance)
            within = [[m for m in ms if m <= len(ms)] for ms in expected]
            assert found.positions.counts.tolist() == [len(all_) for all_ in expected], where
            assert listed(found.positions) == within, where
            assert found.rank.tolist() == [ms[0] if ms else 0 for ms in expected], where


@pytest.mark.parametrize(
    "options",
    [
        {"block": 16, "sort": False},
        {"block": 64, "threads": 1, "sort": False},
        {"block": 16, "memory": 240_000, "sort": False},
        {"sort": True},
        {"block": 16, "threads": 3, "sort": False, "postponed": 1, "large": 0},
        {"block": 16, "threads": 3, "sort": False, "room": 2},
        {"block": 64, "threads": 1, "sort": False, "room": 5, "large": 0},
        {"block": 16, "threads": 1, "sort": False, "room": 5, "pairs": 1},
    ],
    ids=[
        "tiles",
        "one tile",
        "chunks of queries",
        "sorted",
        "nothing postponed, products of classes",
        "room for two negatives",
        "room for five negatives, products of classes",
        "room for as many pairs in doubt as a tile has rows",
    ],
)
@pytest.mark.parametrize("name", HARD)
def test_positions_of_positives_are_those_of_exact_arithmetic(name, options, rng, monkeypatch):
    options = dict(options)
    monkeypatch.setattr(tiles, "_POSTPONED", options.pop("postponed", tiles._POSTPONED))
    monkeypatch.setattr(tiles, "_PAIRS", options.pop("pairs", tiles._PAIRS))
    monkeypatch.setattr(nearest_positive, "_LARGE", options.pop("large", nearest_positive._LARGE))
    monkeypatch.setattr(positions, "ROOM", options.pop("room", positions.ROOM))
    assert_exact_positions(HARD[name], rng.integers(0, 4, len(HARD[name])), **options)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_positions_of_any_small_input_are_exact(data):
    N, D = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 3))
    X = np.array([[data.draw(values) for _ in range(D)] for _ in range(N)]).astype(np.float32)
    labels = np.array([data.draw(st.integers(0, 2)) for _ in range(N)])
    sort = data.draw(st.booleans())
    assert_exact_positions(X, labels, block=data.draw(st.integers(1, 9)), sort=sort)


@pytest.mark.parametrize("seed", range(3))
def test_positions_are_exact_on_grids_full_of_ties(seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, (100, 3)).astype(np.float32)  # duplicates, multiples and zero rows
    labels = rng.integers(0, 9, 100)
    for sort in (False, True):
        assert_exact_positions(x, labels, sort=sort)
        assert_exact_positions(x[30:], labels[30:], x[:30], labels[:30], sort=sort)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    N=st.integers(2, 50),
    D=st.integers(1, 4),
    span=st.integers(0, 3),
    C=st.integers(1, 20),
    memory=st.sampled_from([1, 3000, 1 << 20]),
)
def test_positions_are_exact_whatever_the_memory(seed, N, D, span, C, memory):
    rng = np.random.default_rng(seed)
    x = rng.integers(-span, span + 1, (N, D)).astype(np.float32)
    assert_exact_positions(x, rng.integers(0, C, N), memory=memory, sort=False)


def near_copies() -> np.ndarray:
    """Copies of a few points, moved by less than float32 can add to them."""
    rng = np.random.default_rng(5)
    return rng.normal(size=(6, 16))[rng.integers(0, 6, 90)] + 1e-9 * rng.normal(size=(90, 16))


@pytest.mark.parametrize(
    "x",
    [
        near_copies(),
        (1000 + np.random.default_rng(6).normal(size=(90, 8))).astype(np.float32),
        (1e-20 * clusters(7, 90, 6, 8)[0]).astype(np.float32),
        (1e20 * clusters(7, 90, 6, 8)[0]).astype(np.float32),
    ],
    ids=["equal in float32", "far from the origin", "tiny", "huge"],
)
def test_positions_are_exact_where_float32_is_not(x, rng):
    assert_exact_positions(x, rng.integers(0, 10, len(x)))


@pytest.mark.parametrize("seed", range(5))
def test_equals_behind_a_clear_first_neighbour_are_told_apart(seed):
    # Nearest a negative, then 60 items that float32 cannot order.
    rng = np.random.default_rng(seed)
    gallery = np.concatenate([[0.1], 1 + 1e-10 * rng.permutation(60), rng.uniform(8, 9, 80)])
    labels = np.concatenate([[1], rng.permutation(60) >= 20, np.full(80, 2)]).astype(int)
    assert_exact_positions(gallery[:, None], labels, np.zeros((1, 1)), np.array([0]))


@pytest.mark.parametrize("distance", DISTANCES)
def test_positions_agree_with_the_neighbour_lists_of_faiss(rng, distance):
    labels = rng.integers(0, 25, 900)
    X = (rng.standard_normal((25, 12))[labels] + rng.standard_normal((900, 12))).astype(np.float32)
    counted = ranks_of(X, labels, positions=True, block=128)[distance]
    positive = labels[faiss_neighbours(X, distance)] == labels[:, None]
    R = positive.sum(axis=1)
    assert counted.positions.counts.tolist() == R.tolist()
    assert listed(counted.positions) == [
        [int(m) + 1 for m in np.flatnonzero(row[:r])] for row, r in zip(positive, R, strict=True)
    ]
    assert counted.rank.tolist() == (positive.argmax(axis=1) + 1).tolist()


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
    found = ranks_of(x, labels, positions=True)[distance].positions
    assert metrics.r_precision(found).mean() == pytest.approx(reference["r_precision"])
    assert metrics.map_at_r(found).mean() == pytest.approx(reference["mean_average_precision_at_r"])


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("value", [0.0, 0.3, 1e9])
def test_all_equal_rows_score_the_floor(distance, value):
    x, labels = np.full((60, 7), value, np.float32), np.arange(60) % 6
    found = ranks_of(x, labels, positions=True)[distance]
    assert (found.rank == 51).all()  # all 50 negatives come first
    assert not metrics.r_precision(found.positions).any()
    assert not metrics.map_at_r(found.positions).any()
    assert (found.positions.counts == 9).all()


def test_single_image_classes_are_lone_and_count_as_misses():
    x, _ = clusters(9, 40, 4, 5)
    labels = np.arange(40)
    labels[:20] = 0
    found = ranks_of(x, labels, positions=True)["l2"].positions
    assert (found.counts[20:] == 0).all()
    each = metrics.r_precision(found)
    assert not each[20:].any()
    assert each.mean() == pytest.approx(each[:20].sum() / 40)


@pytest.mark.parametrize("memory", [1 << 15, 1 << 18, 1 << 30])
def test_positions_depend_neither_on_memory_nor_on_row_order(memory):
    x, labels = clusters(10, 300, 12, 25)
    x = x.astype(np.float32)
    x[::7] = x[3]
    expected = ranks_of(x, labels, positions=True)
    order = np.random.default_rng(0).permutation(300)
    found = ranks_of(x[order], labels[order], positions=True, memory=memory)
    for distance in DISTANCES:
        by_row = listed(expected[distance].positions)
        assert listed(found[distance].positions) == [by_row[i] for i in order]
