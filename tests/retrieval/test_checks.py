"""Checks of the data and notes on the scores, counted by hand."""

import numpy as np

from retrieval import evaluate


def test_checks_count_what_is_wrong():
    X = np.array([[1.0, 0], [1, 0], [0, 0], [0, 1], [0, 2], [5, 5]], np.float32)
    result = evaluate(X, np.array([0, 1, 0, 1, 1, 2]), nmi=False, map_at_r=False)
    checks = result["checks"]
    assert checks["zero_norm_rows"] == 1
    assert checks["conflicting_duplicates"] == 2
    assert checks["single_item_classes"] == 1
    assert checks["lone_queries"] == 1
    assert checks["nonfinite_rows"] == 0
    assert checks["tied_queries"] > 0


def test_queries_found_in_the_gallery_are_counted(clustered):
    X, labels = clustered
    result = evaluate(X[:20], labels[:20], X[15:].astype(np.float64), labels[15:], nmi=False)
    assert result["checks"]["queries_in_gallery"] == 5


def test_checks_of_queries_and_gallery_look_at_both():
    gallery = np.array([[1.0, 0], [0, 1], [2, 2], [0, 0]])
    queries = np.array([[1.0, 0], [0, 1], [0, 0], [7, 7]])
    result = evaluate(queries, [0, 5, 3, 4], gallery, [0, 1, 2, 3], nmi=False, map_at_r=False)
    checks = result["checks"]
    assert checks["zero_norm_rows"] == 2
    assert checks["queries_in_gallery"] == 3
    assert checks["conflicting_duplicates"] == 1  # (0, 1) is 5 and 1
    assert checks["single_item_classes"] == 4  # 1, 2, 4, 5
    assert checks["lone_queries"] == 2


def test_a_query_identical_to_rows_of_two_labels_is_a_conflict_too():
    checks = evaluate(np.ones((1, 2)), [0], np.ones((2, 2)), [0, 1], nmi=False)["checks"]
    assert checks["conflicting_duplicates"] == 3


def test_a_tie_under_either_distance_is_counted():
    # Parallel to the positive: tied for cos alone.
    X = np.array([[1.0, 0], [2, 0], [3, 0], [0, 1], [0, 1.5]])
    result = evaluate(X, [0, 0, 1, 2, 2], nmi=False, map_at_r=False)
    assert result["distances"]["l2"]["tied_queries"] == 1  # 2 lies between 1 and 3
    assert result["distances"]["cos"]["tied_queries"] == 2
    assert result["checks"]["tied_queries"] == 2


def test_one_class_is_noted_since_every_score_is_trivial(rng):
    vectors = rng.standard_normal((5, 3))
    note = "there is only one class: no query has a negative, so every score is trivially 100 %"
    assert note in evaluate(vectors, [0] * 5, nmi=False)["notes"]
    assert note in evaluate(vectors, [0] * 5, vectors, [0] * 5, nmi=False)["notes"]
    assert note not in evaluate(vectors, [0, 0, 0, 1, 1], nmi=False)["notes"]


def test_intervals_over_few_classes_are_noted(rng):
    vectors, gallery = rng.standard_normal((2, 14, 3))

    def notes(classes, *more):
        found = evaluate(vectors, np.arange(14) % classes, *more, nmi=False, recall_at=1)
        return found["notes"]

    note = "queries have only {} classes, so intervals are too narrow and p values too small"
    assert notes(2) == [note.format(2)]
    assert notes(5) == [note.format(5)]
    assert notes(6) == []
    assert notes(2, gallery, np.arange(14)) == [
        note.format(2)
    ]  # classes of the gallery do not count


def test_labels_that_all_differ_are_noted(rng):
    vectors = rng.standard_normal((9, 3))
    for labels, told in ((np.arange(9), True), (np.arange(9) % 8, False)):
        notes = evaluate(vectors, labels, nmi=False)["notes"]
        assert any("row numbers" in note for note in notes) == told


def test_a_single_row_has_no_candidates_to_speak_of():
    assert evaluate([[1.0, 2.0]], [0], nmi=False)["notes"] == []


def test_a_single_candidate_is_singular():
    notes = evaluate([[1.0], [2.0]], [0, 1], nmi=False, recall_at=1)["notes"]
    assert notes[-1] == (
        "Recall@1: a query has only 1 candidate, so every one with a positive finds it"
    )
