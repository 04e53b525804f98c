"""Arrays become a problem, or are refused."""

import numpy as np
import pytest

from retrieval import DmlError, evaluate, resources
from retrieval.evaluation import Settings, run
from retrieval.problem import from_arrays, sample
from retrieval.rows import scan as row_scan


def test_query_gallery_is_chosen_when_there_is_a_gallery(clustered):
    X, labels = clustered
    result = evaluate(X[:20], labels[:20], X[20:], labels[20:], nmi=False)
    assert result["protocol"] == "query-gallery"
    assert (result["queries"], result["gallery"]) == (20, 40)


def test_nonfinite_rows_are_an_error_unless_dropped(clustered):
    X, labels = clustered
    X[3, 2], X[9, 0] = np.nan, np.inf
    with pytest.raises(DmlError, match=r"2 of 60 .*rows 3, 9"):
        evaluate(X, labels, nmi=False)
    result = evaluate(X, labels, nmi=False, drop_nonfinite=True)
    assert result["queries"] == 58
    assert result["checks"]["nonfinite_rows"] == 2
    with pytest.raises(DmlError, match="All 60"):
        evaluate(np.full_like(X, np.nan), labels, drop_nonfinite=True)


def test_sampled_queries_are_those_of_the_seed_and_keep_the_gallery(clustered):
    X, labels = clustered
    problem = sample(from_arrays(X, labels), 10, seed=3)
    assert (problem.query_rows == sample(from_arrays(X, labels), 10, seed=3).query_rows).all()
    full = run(from_arrays(X, labels), Settings(nmi=False, map_at_r=False))
    some = run(from_arrays(X, labels), Settings(nmi=False, map_at_r=False, queries=10, seed=3))
    assert some.result["queries"] == 10
    assert some.result["gallery"] == 60
    assert (some.ranks["cos"] == full.ranks["cos"][problem.query_rows]).all()


def test_integer_labels_of_both_signs_and_widths_meet_without_rounding():
    X = np.eye(3)
    big = np.array([2**63, 2**63 + 1, 5], np.uint64)
    result = evaluate(X, big, X, np.array([-1, 5, 7]), nmi=False, map_at_r=False)
    assert result["classes"] == 5
    beyond = np.array([2**70, 2**70 + 1, 2**70], object)
    assert evaluate(X, beyond, nmi=False, map_at_r=False)["classes"] == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.ones(3), np.ones(3, int)), "shape"),
        ((np.ones((3, 0)), np.ones(3, int)), "shape"),
        ((np.ones((3, 2)), np.ones(2, int)), "3 embeddings but labels"),
        ((np.ones((3, 2)), np.full(3, 1.5)), "must be whole numbers"),
        ((np.ones((3, 2)), [1, "1", 2]), "labels of the types int, str"),
        ((np.ones((3, 2), complex), np.ones(3, int)), "complex128"),
        ((np.ones((3, 2)), np.ones(3, int), np.ones((3, 4)), np.ones(3, int)), "2 dimensions"),
        ((np.ones((3, 2)), np.ones(3, int), np.ones((3, 2))), "come together"),
        (
            (np.ones((3, 2)), np.ones(3, int), np.ones((3, 2)), ["a", "b", "c"]),
            "names and the others are numbers",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(args, message):
    with pytest.raises(DmlError, match=message):
        evaluate(*args)


def test_queries_and_gallery_without_a_common_label_are_an_error_not_a_score():
    X = np.eye(4)
    for mine, theirs in [
        ([1, 1, 2, 2], [3, 3, 4, 4]),
        (["a", "a", "b", "b"], ["c", "c", "d", "d"]),
    ]:
        with pytest.raises(DmlError, match="no label in common"):
            evaluate(X, mine, X, theirs, nmi=False)


def test_labels_that_numpy_would_merge_stay_apart_or_are_refused():
    X = np.eye(4)
    for labels in ([1, 1, "1", "1"], np.array([1, 1, "1", "1"], object), (True, True, "1", "1")):
        with pytest.raises(DmlError, match="all integers or all strings"):
            evaluate(X, labels, nmi=False)
    for labels in (["a", "a", "a\0", "a\0"], np.array(["a", "a", "a\0", "a\0"], object)):
        with pytest.raises(DmlError, match="zero character"):
            evaluate(X, labels, nmi=False)
    assert evaluate(X, ["0", "0", "-0", "-0"], nmi=False)["classes"] == 2
    assert evaluate(X, [2**64, 2**64, 2**64 + 1, 2**64 + 1], nmi=False)["classes"] == 2


def test_text_that_writes_integers_matches_integers():
    X = np.random.default_rng(0).standard_normal((8, 3))
    numbers = np.array([1, 1, 2, 10])
    expected = evaluate(X[:4], numbers, X[4:], numbers, nmi=False)
    mixed = evaluate(X[:4], numbers.astype(str), X[4:], numbers, nmi=False)
    assert mixed == expected
    with pytest.raises(DmlError, match="'01' and 1"):
        evaluate(X[:4], ["01", "1", "2", "10"], X[4:], numbers, nmi=False)


def test_matrices_and_masked_arrays_are_converted_or_refused(clustered):
    X, labels = clustered
    expected = evaluate(X, labels, nmi=False)
    assert evaluate(X.view(np.matrix), labels, nmi=False) == expected
    assert evaluate(np.ma.array(X), np.ma.array(labels), nmi=False) == expected
    hole = np.zeros(X.shape, bool)
    hole[3, 1] = True
    with pytest.raises(DmlError, match="1 values of the embeddings are masked"):
        evaluate(np.ma.array(X, mask=hole), labels, nmi=False)
    with pytest.raises(DmlError, match="1 values of the labels"):
        evaluate(X, np.ma.array(labels, mask=hole[:, 1]), nmi=False)


def test_dropped_rows_leave_the_scan_of_the_others(rng):
    X = rng.standard_normal((10, 4)).astype(np.float16)
    X[[2, 5], 1] = np.nan, np.inf
    found = from_arrays(X, np.arange(10) % 2, drop_nonfinite=True)
    wanted = row_scan.scan(np.delete(X, [2, 5], axis=0))
    np.testing.assert_array_equal(found.gallery_scan.hashes, wanted.hashes)
    assert found.query_rows.tolist() == [0, 1, 3, 4, 6, 7, 8, 9]


def test_the_checksum_covers_every_number(rng, monkeypatch):
    monkeypatch.setattr(resources, "_BLOCK", 3000)  # numbers: five blocks
    X, labels = rng.standard_normal((5000, 3)).astype(np.float32), np.arange(5000) % 7
    known = from_arrays(X, labels).checksum()
    assert known == from_arrays(X.copy(), labels).checksum()
    changed = X.copy()
    changed[4321, 1] += 1
    assert known != from_arrays(changed, labels).checksum()
    pair = from_arrays(X[:9], labels[:9], X, labels).checksum()
    assert pair != from_arrays(X[:9], labels[:9], changed, labels).checksum()
    assert pair != from_arrays(X[:9], labels[:9], X, labels[::-1]).checksum()
    assert pair != from_arrays(changed[:9] + 1, labels[:9], X, labels).checksum()
