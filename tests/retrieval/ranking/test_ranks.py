"""Ranks against exact arithmetic and float64 brute force; several processes count as one."""

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.problem import from_arrays
from retrieval.ranking import nearest_positive, ranks, sorted_rows
from retrieval.ranking.positions import BYTES, memory_of
from retrieval.ranking.ranks import count_ranks
from tests.golden.cases import vectors, whole
from tests.ranks import in_threads
from tests.retrieval.ranking.references import HARD, assert_exact, float64_ranks, ranks_of, values


@pytest.mark.parametrize("name", HARD)
def test_query_gallery_ranks_are_those_of_exact_arithmetic(name, rng):
    X = HARD[name]
    queries, gallery = X[:20], X[15:]  # some queries are in the gallery, as strangers
    assert_exact(gallery, rng.integers(0, 6, len(gallery)), queries, rng.integers(0, 8, 20))


@settings(max_examples=75, deadline=None)
@given(st.data())
def test_any_small_input_is_ranked_exactly(data):
    N, D = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    X = np.array([[data.draw(values) for _ in range(D)] for _ in range(N)]).astype(dtype)
    labels = np.array([data.draw(st.integers(0, 2)) for _ in range(N)])
    assert_exact(
        X, labels, block=data.draw(st.integers(1, 9)), threads=data.draw(st.integers(1, 3))
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 24))
def test_ranks_equal_float64_brute_force(seed, N, D):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((N, D)).astype(np.float32)
    labels = rng.integers(0, 4, N)
    result = ranks_of(X, labels, block=7)
    for distance in ("cos", "l2"):
        assert (result[distance].rank == float64_ranks(X, labels, distance)).all()


def test_sampled_queries_get_the_ranks_they_have_among_all(rng):
    X, labels = rng.standard_normal((200, 6)).astype(np.float16), rng.integers(0, 9, 200)
    some = rng.choice(200, 31, replace=False)
    every = ranks_of(X, labels)
    sampled = ranks_of(X, labels, X[some], labels[some], self_ids=some, block=32)
    for distance in ("cos", "l2"):
        assert (sampled[distance].rank == every[distance].rank[some]).all()


def test_self_is_left_out_by_identity_when_embeddings_repeat():
    X = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    result = ranks_of(X, np.array([0, 1, 0, 1]))
    assert result["l2"].rank.tolist() == [3, 3, 3, 3]  # own copy nearer, other wrong one tied


def test_all_equal_embeddings_score_the_floor():
    result = ranks_of(np.ones((10, 3), np.float32), np.arange(10) // 2)
    assert result["cos"].rank.tolist() == result["l2"].rank.tolist() == [9] * 10
    assert (result["cos"].ties == 8).all()


def test_labels_above_2_to_24_stay_apart():
    labels = np.array([2**60, 2**60 + 1, 2**60, 2**60 + 1])
    result = ranks_of(np.array([[0.0], [1], [0.1], [1.1]], np.float32), labels)
    assert result["l2"].rank.tolist() == [1, 1, 1, 1]


def test_leaving_out_by_id_where_dropping_the_first_column_flatters():
    x = np.array([[0.0], [0.0], [1.0], [1.1]], np.float32)
    labels = np.array([0, 1, 2, 2])
    _, ids = faiss.knn(x, x, 2)
    dropped = (labels[ids[:, 1]] == labels) | (ids[:, 1] == np.arange(4))
    assert dropped.mean() == 0.75  # one of the twins finds itself in the second column
    assert (ranks_of(x, labels)["l2"].rank == 1).mean() == 0.5


def test_recall_ignores_self_when_embeddings_repeat():
    x = np.repeat(np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32), 2, axis=0)
    found = ranks_of(x, np.arange(60))  # every row a class of its own: a hit would be itself
    assert not found["l2"].rank.any()
    assert not found["cos"].rank.any()


def test_copies_of_one_class_are_no_tie_with_others():
    x = np.array([[0.0]] * 30 + [[5.0]] * 90, np.float32)
    ranks = ranks_of(x, np.array([0] * 30 + [1, 2] * 45))["l2"].rank
    assert (ranks[:30] == 1).all()
    assert (ranks[30:] == 46).all()


def test_query_labels_that_the_gallery_lacks_are_lone():
    x = np.eye(4, dtype=np.float32)
    ranks = ranks_of(x, np.array([1, 0, 0, 1]), x, np.array([0, 1, 7, 9]))["cos"].rank
    # Query 0 is gallery item 0, a negative; its positives, 1 and 2, tie with the negative 3.
    assert ranks.tolist() == [3, 3, 0, 0]


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
        if wanted[d].positions is not None:
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


@pytest.mark.parametrize("positions", [False, True])
def test_processes_with_other_numbers_of_threads_share_the_same_tasks(
    positions, small_chunks, monkeypatch
):
    monkeypatch.setattr(nearest_positive, "_SMALL", 0)
    problem = from_arrays(*few_large_classes())
    options = {"positions": positions, "sort": False, "block": 64}
    wanted = count_ranks(problem, threads=1, **options)
    for found in in_threads(
        3, lambda world: count_ranks(problem, threads=1 + world.rank, world=world, **options)
    ):
        assert_same(found, wanted)


def test_lists_that_do_not_fit_the_memory_are_shared_run_by_run(small_chunks):
    problem = from_arrays(*few_large_classes())
    options = {"positions": True, "threads": 1, "sort": False}
    wanted = count_ranks(problem, **options)
    few = 4_000_000  # bytes: a part of the queries at a time
    assert problem.positive_counts.sum() * BYTES > few // 2
    for found in in_threads(
        3, lambda world: count_ranks(problem, block=64, memory=few, world=world, **options)
    ):
        assert_same(found, wanted)


@pytest.mark.parametrize(("gallery", "share"), [(False, 2), (True, 4)])
def test_lists_that_fit_their_share_of_the_memory_are_counted_in_one_run(
    gallery, share, rng, monkeypatch
):
    given = rng.standard_normal((60, 8)).astype(np.float32), np.arange(60) % 20
    problem = from_arrays(*given, *given) if gallery else from_arrays(*given)
    lists = int(memory_of(problem.positive_counts).sum())
    counted, real = [], ranks._counted
    monkeypatch.setattr(
        ranks, "_counted", lambda part, how, tell: counted.append(part) or real(part, how, tell)
    )
    wanted = count_ranks(problem, positions=True, sort=False, memory=share * lists)
    assert [len(part.query_codes) for part in counted] == [60]
    few = share * (lists - 1)
    assert_same(count_ranks(problem, positions=True, sort=False, memory=few), wanted)
    assert len(counted) > 2
