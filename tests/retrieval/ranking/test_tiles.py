"""Counting by tiles: any tile, in float32 or float64, gives the exact ranks."""

import weakref

import numpy as np
import pytest

from retrieval.problem import from_arrays
from retrieval.ranking import tiles
from retrieval.ranking.backends.numpy import NumpyBackend
from retrieval.ranking.tiles import TileCounter
from retrieval.ranking.vectors import prepare
from tests.retrieval.ranking.references import HARD, assert_exact, ranks_of


@pytest.mark.parametrize("pairs", [1 << 14, 4], ids=["float32 tiles", "float64 tiles"])
@pytest.mark.parametrize("name", HARD)
def test_ranks_and_ties_are_those_of_exact_arithmetic(name, pairs, monkeypatch, rng):
    monkeypatch.setattr(tiles, "_PAIRS", pairs)  # 4: every tile with doubts is redone in float64
    X = HARD[name]
    assert_exact(X, rng.integers(0, 6, len(X)), block=16)


def test_ranks_do_not_depend_on_block_threads_or_row_order(rng):
    labels = rng.integers(0, 9, 300)
    X = np.repeat(rng.standard_normal((100, 8)), 3, axis=0).astype(np.float32)  # many ties
    reference = ranks_of(X, labels)
    order = rng.permutation(300)
    for options in ({"block": 13}, {"threads": 1}, {"block": 64, "threads": 5}, {"memory": 1}):
        shuffled = ranks_of(X[order], labels[order], **options)
        for distance in ("cos", "l2"):
            assert (shuffled[distance].rank == reference[distance].rank[order]).all()
            assert (shuffled[distance].ties == reference[distance].ties[order]).all()


def test_progress_reaches_the_total(rng):
    seen = []
    ranks_of(
        rng.standard_normal((50, 3)),
        rng.integers(0, 3, 50),
        block=8,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] == 28


def test_an_interrupt_stops_the_count(rng):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranks_of(rng.standard_normal((500, 3)), np.arange(500) % 5, block=8, progress=interrupt)


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_one_distance_alone_has_the_ranks_that_it_has_beside_the_other(distance, rng):
    labels = rng.integers(0, 9, 300)
    X = rng.standard_normal((300, 8)).astype(np.float32)
    both, alone = (
        ranks_of(X, labels, block=70),
        ranks_of(X, labels, distances=(distance,), block=70),
    )
    assert list(alone) == [distance]
    assert (alone[distance].rank == both[distance].rank).all()


def test_one_huge_row_leaves_the_other_rows_to_float32(monkeypatch, rng):
    monkeypatch.delattr(tiles.TileCounter, "_tile_float64")
    settled = []
    settle = tiles._Worker.settle
    monkeypatch.setattr(
        tiles._Worker,
        "settle",
        lambda w, d: (settled.append(sum(map(len, w.open[d]))), settle(w, d)),
    )
    X, labels = rng.standard_normal((200, 16)).astype(np.float32), rng.integers(0, 20, 200)
    X[7] *= np.float32(1e17)
    labels[7] = labels[8]
    ranks_of(X, labels, distances=("l2",), block=64, threads=1)
    assert 150 < sum(settled) < 250  # the huge row as a query, and hardly another


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


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_nearly_one_length_may_rank_differently_by_each_distance(sign):
    # The negative is nearer by one distance alone: l2 sees its length, cos its angle.
    negative = np.array([sign * 3e-6, 1 + sign * 8e-6])
    gallery = np.array([[0, 1], negative])
    assert_exact(gallery, np.array([0, 1]), np.array([[1.0, 0.0]]), np.array([0]), block=1)


def test_rows_of_different_lengths_are_counted_by_each_distance(rng):
    X = rng.standard_normal((20, 4))
    problem = from_arrays(X, np.arange(20) % 4)
    counter = TileCounter(prepare(problem, ("l2", "cos"), 1 << 20, 1), False)
    assert counter.backend.joint is None


def test_memory_of_products_is_free_when_all_is_counted(rng):
    X = rng.standard_normal((40, 4)).astype(np.float32)
    problem = from_arrays(X, np.arange(40) % 4)
    counter = TileCounter(prepare(problem, ("cos",), 1 << 20, 1), False)
    backend = weakref.ref(counter.backend)
    counter.count(None)
    assert backend() is None
