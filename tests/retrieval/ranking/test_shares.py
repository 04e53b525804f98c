"""Ranks that share out classes and tiles count what one process counts."""

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.evaluation import Settings, score
from retrieval.problem import from_arrays
from retrieval.ranking import nearest_positive, sorted_rows
from retrieval.ranking.positions import BYTES
from retrieval.ranking.ranks import count_ranks
from retrieval.ranking.tiles import TileCounter
from tests.golden.cases import vectors, whole
from tests.ranks import in_threads
from tests.retrieval.ranking.references import HARD


def few_large_classes():
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 3, 300)
    X = rng.standard_normal((3, 30))[labels] + 3 * rng.standard_normal((300, 30))
    return X.astype(np.float32), labels


def hard(name):
    return HARD[name], np.random.default_rng(2).integers(0, 5, len(HARD[name]))


DATA = {"duplicates": vectors, "ties": whole, "large classes": few_large_classes}
DATA |= {name: lambda name=name: hard(name) for name in HARD}


def assert_same(found, wanted):
    for d in wanted:
        for name in ("rank", "ties", "nearest"):
            assert np.array_equal(getattr(found[d], name), getattr(wanted[d], name)), (d, name)
        for a, b in zip(found[d].positions, wanted[d].positions, strict=True):
            assert np.array_equal(a, b), d


@pytest.fixture
def small_chunks(monkeypatch):
    """Enough tasks for every rank, also of small data."""
    monkeypatch.setattr(nearest_positive, "_CHUNK", 4000)
    monkeypatch.setattr(nearest_positive, "_LARGE", 10**5)
    monkeypatch.setattr(sorted_rows, "_NUMBERS", 1)


SORTED = ("duplicates", "ties", "large classes", "zero rows", "collapsed", "one outlier")


@pytest.mark.parametrize(
    ("name", "sort"), [(name, False) for name in DATA] + [(name, True) for name in SORTED]
)
def test_ranks_of_several_processes_are_those_of_one(name, sort, small_chunks):
    X, labels = DATA[name]()
    both = from_arrays(X, labels), from_arrays(X[:20], labels[:20], X[15:], labels[15:])
    options = {"positions": True, "threads": 1, "sort": sort}
    for problem, size in zip(both, (2, 3), strict=True):
        wanted = count_ranks(problem, block=9, **options)

        def counted(world, problem=problem):
            return count_ranks(problem, block=9 + world.rank, world=world, **options)

        for found in in_threads(size, counted):
            assert_same(found, wanted)


def test_lists_that_do_not_fit_the_memory_are_shared_run_by_run(small_chunks):
    problem = from_arrays(*few_large_classes())
    options = {"positions": True, "threads": 1, "sort": False}
    wanted = count_ranks(problem, **options)
    few = 4_000_000  # bytes: a part of the queries at a time
    assert problem.positive_counts.sum() * BYTES > few // 4
    for found in in_threads(
        3, lambda world: count_ranks(problem, block=64, memory=few, world=world, **options)
    ):
        assert_same(found, wanted)


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


def test_processes_that_read_different_files_are_told():
    X, labels = vectors()
    other = X.copy()
    other[0, 0] += 1

    def work(world):
        problem = from_arrays(other if world.rank == 1 else X, labels)
        with pytest.raises(DmlError, match="different embeddings"):
            score(problem, Settings(nmi=False), world=world)

    in_threads(3, work)
