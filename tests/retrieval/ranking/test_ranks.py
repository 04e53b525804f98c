"""The counting engine against exact rational arithmetic and float64 brute force."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.errors import DmlError
from retrieval.listed import right_positions
from retrieval.ranking import exact, nearest_positive, tiles
from retrieval.ranking.ranks import count_ranks


def exact_ranks(gallery, gallery_labels, queries=None, query_labels=None, self_ids=None):
    """Ranks and ties by fractions: no rounding anywhere."""
    if queries is None:
        queries, query_labels, self_ids = gallery, gallery_labels, range(len(gallery))
    if self_ids is None:
        self_ids = [-1] * len(queries)
    rows = [[Fraction(float(v)) for v in row] for row in gallery]
    out = {}
    for distance in ("cos", "l2"):
        found = []
        for q, label, own in zip(queries, query_labels, self_ids, strict=True):
            near = [nearness([Fraction(float(v)) for v in q], row, distance) for row in rows]
            right = [s for j, s in enumerate(near) if gallery_labels[j] == label and j != own]
            wrong = [s for j, s in enumerate(near) if gallery_labels[j] != label and j != own]
            best = max(right, default=None)
            found.append(
                (1 + sum(s >= best for s in wrong), sum(s == best for s in wrong))
                if right
                else (0, 0)
            )
        out[distance] = found
    return out


def nearness(q, x, distance):
    if distance == "l2":
        return -sum((a - b) ** 2 for a, b in zip(q, x, strict=True))
    dot, square = sum(a * b for a, b in zip(q, x, strict=True)), sum(b * b for b in x)
    return dot * abs(dot) / square if square else Fraction(0)  # sign(cos) cos^2 times |q|^2


def assert_exact(*args, self_ids=None, **options):
    expected = exact_ranks(*args, self_ids=self_ids)
    result = count_ranks(*args, self_ids=self_ids, **options)
    for distance, pairs in expected.items():
        got = list(zip(result[distance].rank, result[distance].ties, strict=True))
        assert got == pairs, distance


def float64_ranks(X, labels, distance):
    """Leave-one-out in plain NumPy float64, for data without near-ties."""
    X = X.astype(np.float64)
    if distance == "cos":
        X = X / np.linalg.norm(X, axis=1, keepdims=True)
    far = ((X[:, None] - X[None]) ** 2).sum(-1)
    same = labels[:, None] == labels[None]
    np.fill_diagonal(far, np.inf)
    best = np.where(same, far, np.inf).min(axis=1)
    rank = 1 + (~same & (far <= best[:, None])).sum(axis=1)
    return np.where(np.isinf(best), 0, rank)


def hard_cases():
    rng = np.random.default_rng(1)
    N, D = 48, 4
    one = np.full((N, D), 0.3, np.float32)
    normal = rng.standard_normal((N, D))
    base = normal[: N // 3].astype(np.float32)
    return {
        "random float32": normal.astype(np.float32),
        "random float16": normal.astype(np.float16),
        "random float64": normal,
        "int8": rng.integers(-2, 3, (N, D)).astype(np.int8),
        "uint8": rng.integers(0, 256, (N, D)).astype(np.uint8),
        "binary": rng.integers(0, 2, (N, D)).astype(np.float32),
        "normalised signs": np.float32(512**-0.5) * np.sign(normal).astype(np.float32),
        "all equal": one,
        "differ in the last bit": np.where(normal > 0.3, np.nextafter(one, np.float32(1)), one),
        "norms 1e-20 to 1e20": (normal * 10.0 ** rng.integers(-20, 21, (N, 1))).astype(np.float32),
        "norms in float64": normal * 10.0 ** rng.integers(-60, 61, (N, 1)),
        "zero rows": np.where(rng.random((N, 1)) < 0.4, 0, normal).astype(np.float32),
        "duplicated rows": np.repeat(base, 3, axis=0),
        "one live unit": np.where(np.arange(D) == 2, np.abs(normal), 0).astype(np.float32),
        "multiples of 0.1": np.float32(0.1) * rng.integers(-1, 2, (N, D)).astype(np.float32),
        "multiples of 0.1 in float64": 0.1 * rng.choice([-4.0, -1.0, 0.0, 1.0, 2.0], (N, D)),
        "nearly multiples of 0.1": rng.choice([0.1, 0.2, 0.1 + 0.2, 0.3, 0.0], (N, D)),
        "one-hot rows in float64": 0.7 * np.eye(12)[rng.integers(0, 12, N)],
        "sparse rows": np.where(rng.random((N, D)) < 0.3, normal, 0),
        "parallel rows": np.concatenate([base, 3 * base, base * np.float32(1.1)]),
        "opposite rows": np.concatenate([base, -base, 2 * base]),
        "collapsed": (1 + 1e-7 * normal).astype(np.float32),
        "collapsed float64": 1 + 1e-13 * normal,
        "one outlier": np.concatenate([normal[:-1], 1e15 * normal[-1:]]).astype(np.float32),
    }


HARD = hard_cases()


@pytest.mark.parametrize("pairs", [1 << 14, 4], ids=["float32 tiles", "float64 tiles"])
@pytest.mark.parametrize("name", HARD)
def test_ranks_and_ties_are_those_of_exact_arithmetic(name, pairs, monkeypatch, rng):
    monkeypatch.setattr(tiles, "_PAIRS", pairs)  # 4: every tile with doubts is redone in float64
    X = HARD[name]
    assert_exact(X, rng.integers(0, 6, len(X)), block=16)


@pytest.mark.parametrize("name", HARD)
def test_large_classes_give_the_same_exact_ranks(name, monkeypatch, rng):
    monkeypatch.setattr(nearest_positive, "_LARGE", 0)
    X = HARD[name]
    assert_exact(X, rng.integers(0, 3, len(X)), block=16)


@pytest.mark.parametrize("name", HARD)
def test_query_gallery_ranks_are_those_of_exact_arithmetic(name, rng):
    X = HARD[name]
    queries, gallery = X[:20], X[15:]  # some queries are in the gallery, as strangers
    assert_exact(gallery, rng.integers(0, 6, len(gallery)), queries, rng.integers(0, 8, 20))


values = st.sampled_from(
    [
        0.0,
        -0.0,
        1.0,
        -1.0,
        3.0,
        0.1,
        float(np.nextafter(np.float32(0.1), np.float32(1))),
        1e-20,
        1e20,
    ]
)


def exact_places(X, labels, distance):
    """Places within R of every item's right items, by fractions."""
    rows = [[Fraction(float(v)) for v in row] for row in X]
    found = []
    for i, q in enumerate(rows):
        near = [nearness(q, row, distance) for row in rows]
        right = sorted(
            (s for j, s in enumerate(near) if labels[j] == labels[i] and j != i), reverse=True
        )
        wrong = [s for j, s in enumerate(near) if labels[j] != labels[i]]
        places = [m + sum(w >= s for w in wrong) for m, s in enumerate(right, 1)]
        found.append([place for place in places if place <= len(right)])
    return found


def assert_exact_places(X, labels, **options):
    result = count_ranks(X, labels, places=True, **options)
    for distance in ("cos", "l2"):
        places = result[distance].places
        got = [list(part) for part in np.split(places.positions, places.offsets[1:-1])]
        assert got == exact_places(X, labels, distance), distance


@pytest.mark.parametrize(
    "options",
    [{"block": 16}, {"block": 64, "threads": 1}, {"block": 16, "memory": 20_000}],
    ids=["tiles", "one tile", "chunks of queries"],
)
@pytest.mark.parametrize("name", HARD)
def test_places_of_right_items_are_those_of_exact_arithmetic(name, options, rng):
    assert_exact_places(HARD[name], rng.integers(0, 4, len(HARD[name])), **options)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_places_of_any_small_input_are_exact(data):
    N, D = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 3))
    X = np.array([[data.draw(values) for _ in range(D)] for _ in range(N)]).astype(np.float32)
    labels = np.array([data.draw(st.integers(0, 2)) for _ in range(N)])
    assert_exact_places(X, labels, block=data.draw(st.integers(1, 9)))


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_places_agree_with_neighbour_lists(rng, distance):
    labels = rng.integers(0, 25, 900)
    X = (rng.standard_normal((25, 12))[labels] + rng.standard_normal((900, 12))).astype(np.float32)
    counted = count_ranks(X, labels, places=True, block=128)[distance].places
    listed = right_positions(X, labels, X, labels, distance, self_ids=np.arange(900))
    assert all((a == b).all() for a, b in zip(counted, listed, strict=True))


@settings(max_examples=150, deadline=None)
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
    result = count_ranks(X, labels, block=7)
    for distance in ("cos", "l2"):
        assert (result[distance].rank == float64_ranks(X, labels, distance)).all()


def test_ranks_do_not_depend_on_block_threads_or_row_order(rng):
    labels = rng.integers(0, 9, 300)
    X = np.repeat(rng.standard_normal((100, 8)), 3, axis=0).astype(np.float32)  # many ties
    reference = count_ranks(X, labels)
    order = rng.permutation(300)
    for options in ({"block": 13}, {"threads": 1}, {"block": 64, "threads": 5}, {"memory": 1}):
        shuffled = count_ranks(X[order], labels[order], **options)
        for distance in ("cos", "l2"):
            assert (shuffled[distance].rank == reference[distance].rank[order]).all()
            assert (shuffled[distance].ties == reference[distance].ties[order]).all()


def test_sampled_queries_get_the_ranks_they_have_among_all(rng):
    X, labels = rng.standard_normal((200, 6)).astype(np.float16), rng.integers(0, 9, 200)
    some = rng.choice(200, 31, replace=False)
    every = count_ranks(X, labels)
    sampled = count_ranks(X, labels, X[some], labels[some], self_ids=some, block=32)
    for distance in ("cos", "l2"):
        assert (sampled[distance].rank == every[distance].rank[some]).all()


@pytest.mark.parametrize(
    "X", [0.1 * np.eye(60), np.diag(np.linspace(1, 2, 60))], ids=["equal", "of any length"]
)
def test_ties_of_float64_rows_need_no_arithmetic_of_long_integers(X, monkeypatch):
    def slow(*_):
        raise AssertionError("compared pair by pair")

    monkeypatch.setattr(exact, "_compare_one", slow)
    found = count_ranks(X, np.arange(60) % 6, distances=("cos",), places=True)["cos"]
    assert (found.rank == 51).all()
    assert (found.ties == 50).all()


def test_self_is_left_out_by_identity_when_embeddings_repeat():
    X = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    result = count_ranks(X, np.array([0, 1, 0, 1]))
    assert result["l2"].rank.tolist() == [3, 3, 3, 3]  # own copy nearer, other wrong one tied


def test_all_equal_embeddings_score_the_floor():
    result = count_ranks(np.ones((10, 3), np.float32), np.arange(10) // 2)
    assert result["cos"].rank.tolist() == result["l2"].rank.tolist() == [9] * 10
    assert (result["cos"].ties == 8).all()


def test_a_query_without_right_item_has_rank_zero():
    result = count_ranks(np.eye(3, dtype=np.float32), np.array([0, 0, 1]))
    assert result["cos"].rank.tolist()[2] == 0
    assert result["cos"].nearest.tolist() == [1, 0, -1]


def test_labels_above_2_to_24_stay_apart():
    labels = np.array([2**60, 2**60 + 1, 2**60, 2**60 + 1])
    result = count_ranks(np.array([[0.0], [1], [0.1], [1.1]], np.float32), labels)
    assert result["l2"].rank.tolist() == [1, 1, 1, 1]


def test_a_mapped_file_gives_the_same_ranks_as_memory(tmp_path, rng):
    X, labels = rng.standard_normal((90, 5)).astype(np.float32), rng.integers(0, 5, 90)
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert (count_ranks(mapped, labels)["l2"].rank == count_ranks(X, labels)["l2"].rank).all()


def test_progress_reaches_the_total(rng):
    seen = []
    count_ranks(
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
        count_ranks(rng.standard_normal((500, 3)), np.arange(500) % 5, block=8, progress=interrupt)


def test_vectors_outside_the_range_of_float64_squares_are_refused():
    for size in (1e200, 1.2e154, 1e141, 1e-141, 1e-200):
        with pytest.raises(DmlError, match="cannot be compared"):
            count_ranks(np.array([[size], [1.0]]), np.array([0, 0]))
