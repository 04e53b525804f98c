"""Counting by tiles: any tile, in float32 or float64, gives the exact ranks."""

import weakref

import numpy as np
import pytest

from retrieval.problem import from_arrays
from retrieval.ranking import position_kernels, tiles
from retrieval.ranking.ranks import count_ranks
from retrieval.ranking.tiles import TileCounter
from retrieval.ranking.vectors import prepare
from tests.golden.cases import vectors, whole
from tests.ranks import in_threads
from tests.retrieval.ranking.references import HARD, assert_exact, ranks_of


@pytest.mark.parametrize("pairs", [1 << 14, 4], ids=["float32 tiles", "float64 tiles"])
@pytest.mark.parametrize("name", HARD)
def test_ranks_and_ties_are_those_of_exact_arithmetic(name, pairs, monkeypatch, rng):
    monkeypatch.setattr(tiles, "_PAIRS", pairs)  # 4: every tile with doubts is redone in float64
    X = HARD[name]
    labels = rng.integers(0, 6, len(X))
    labels[:2] = 7, 8  # without positives
    assert_exact(X, labels, block=16)


def test_differences_whose_squares_are_below_float64_are_compared(rng):
    X = np.c_[np.full(12, 1e-139), 1e-165 * rng.standard_normal(12)]
    assert_exact(X, np.arange(12) % 3, block=5)


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


def test_memory_of_products_is_free_when_all_is_counted(rng):
    X = rng.standard_normal((40, 4)).astype(np.float32)
    problem = from_arrays(X, np.arange(40) % 4)
    counter = TileCounter(prepare(problem, ("cos",), 1 << 20, 1), False)
    backend = weakref.ref(counter.backend)
    counter.count(None)
    assert backend() is None


def test_the_pairs_in_doubt_of_any_query_have_room(monkeypatch):
    # Otherwise the negatives kept for a query could never be added, and counting would not end.
    monkeypatch.setattr(tiles, "_PAIRS", 4)
    problem = from_arrays(*vectors())
    counter = TileCounter(prepare(problem, ("cos",), 1 << 20, 1), True, block=2)
    most = counter.positions["cos"].kept.room.max()
    assert len(counter._room_for_positives()) >= most > 4


def test_what_threads_share_is_changed_under_its_lock(monkeypatch):
    problem, locked = from_arrays(*whole()), {}
    counter = TileCounter(prepare(problem, ("l2", "cos"), 1 << 20, 1), True, block=1000)
    assert len(counter.query_locks) == 1

    class Watched(np.ndarray):
        def __iadd__(self, other):
            locked.setdefault("counts", []).append(counter.lock.locked())
            return super().__iadd__(other)

    for shared in (counter.counts, counter.ties):
        shared.update({d: numbers.view(Watched) for d, numbers in shared.items()})
    for name in ("keep_tile", "credit_rest", "credit_pairs"):
        real = getattr(position_kernels, name)

        def watched(*arguments, name=name, real=real):
            locked.setdefault(name, []).append(counter.query_locks[0].locked())
            return real(*arguments)

        monkeypatch.setattr(position_kernels, name, watched)
    counter.count(None)
    assert set(locked) == {"counts", "keep_tile", "credit_rest", "credit_pairs"}
    assert all(all(each) for each in locked.values())


def test_pairs_are_added_under_the_lock_of_their_queries(monkeypatch):
    problem, blocks = from_arrays(*whole()), set()
    counter = TileCounter(prepare(problem, ("l2", "cos"), 1 << 20, 1), True, block=16)
    real = position_kernels.credit_pairs

    def watched(pairs, *arguments):
        (block,) = set((pairs.query // 16).tolist())
        assert counter.query_locks[block].locked()
        blocks.add(block)
        return real(pairs, *arguments)

    monkeypatch.setattr(position_kernels, "credit_pairs", watched)
    counter.count(None)
    assert len(blocks) > 1


def test_every_tile_is_counted_by_one_rank(monkeypatch):
    problem, seen = from_arrays(*vectors()), {}
    honest = TileCounter._column

    def column(self, one):
        g, parts = one
        seen.setdefault(self.world.rank, []).extend((q.start, g.start) for q in parts)
        return honest(self, one)

    monkeypatch.setattr(TileCounter, "_column", column)
    in_threads(3, lambda world: count_ranks(problem, block=16, threads=1, world=world))
    tiles = [tile for some in seen.values() for tile in some]
    assert len(tiles) == len(set(tiles)) == 55
    assert {len(some) for some in seen.values()} <= {18, 19}
