"""Two files of the same items: how much better one of them is, and where."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retrieval import DmlError, compare
from retrieval.embeddings import Embeddings, Split
from tests.retrieval.made import SETTINGS, file


def test_a_file_does_not_differ_from_itself(items):
    result = compare(file(*items), file(*items), SETTINGS)
    for scores in result["distances"]["l2"].values():
        assert scores["difference"] == 0
        assert scores["p"] == 1.0
    assert result["flipped"]["l2"] == {"gained": [], "lost": []}


def test_the_difference_is_b_less_a_and_names_the_flipped_queries(items):
    _, labels, paths = items
    better = np.eye(6, dtype=np.float32)[labels]
    result = compare(file(*items), file(better, labels, paths), SETTINGS)
    scores = result["distances"]["l2"]["recall@1"]
    assert scores["b"] == 1.0
    assert scores["difference"] == pytest.approx(1 - scores["a"])
    assert scores["difference"] > 0
    assert scores["ci"][0] > 0
    assert scores["p"] < 0.05
    gained = result["flipped"]["l2"]["gained"]
    assert len(gained) == round(60 * scores["difference"])
    assert all(paths[flip["row"]] == flip["path"] for flip in gained)
    back = compare(file(better, labels, paths), file(*items), SETTINGS)
    assert back["flipped"]["l2"]["lost"] == gained
    assert back["notes"] == []


def test_k_means_comes_last_because_one_process_does_it_while_the_others_wait(items):
    stages = {}
    settings = replace(SETTINGS, nmi=True, seeds=1, kmeans_restarts=1)
    compare(file(*items), file(*items), settings, lambda stage, *_: stages.setdefault(stage))
    assert list(stages) == ["A: ranks", "B: ranks", "A: k-means (l2)", "B: k-means (l2)"]


def test_a_comparison_has_the_notes_of_an_evaluation(items):
    X, labels = (each[items[1] < 5] for each in items[:2])
    few, beyond = compare(file(X, labels), file(X, labels), replace(SETTINGS, recall_at=99))[
        "notes"
    ]
    assert few.startswith("queries have only 5 classes")
    assert beyond.startswith("Recall@99: a query has only 49 candidates")


@pytest.mark.parametrize("queries", [None, 20])
def test_comparing_b_with_a_mirrors_comparing_a_with_b(items, rng, queries):
    X, labels, paths = items
    settings = replace(SETTINGS, map_at_r=True, distances=("cos", "l2"), queries=queries)
    other = X + rng.normal(0, 0.7, X.shape).astype(np.float32)
    order = rng.permutation(60)
    files = file(X, labels, paths), file(other[order], labels[order], paths[order])
    there = compare(*files, settings)["distances"]
    back = compare(*files[::-1], settings)["distances"]
    for d, scores in there.items():
        for name, s in scores.items():
            low, high = s["ci"]
            assert back[d][name]["ci"] == [-high, -low]
            assert back[d][name]["p"] == s["p"]
            assert back[d][name]["a"] == s["b"]
            assert back[d][name]["difference"] == -s["difference"]


def test_the_queries_that_are_drawn_do_not_depend_on_the_order_of_rows(items, rng):
    first = rng.permutation(60)
    X, labels, paths = (each[first] for each in items)
    settings = replace(SETTINGS, queries=20)
    other = X + rng.normal(0, 0.7, X.shape).astype(np.float32)
    order = rng.permutation(60)
    here, moved = (
        compare(file(X, labels, paths), file(other[rows], labels[rows], paths[rows]), settings)
        for rows in (np.arange(60), order)
    )
    assert moved["distances"] == here["distances"]
    assert moved["flipped"] == here["flipped"]
    twice = paths.copy()
    twice[1] = twice[0]  # these tell items apart no longer: all are drawn by row
    a, b = (file(x, labels, twice) for x in (X, other))
    by_row = compare(*(file(x, labels) for x in (X, other)), settings)
    assert compare(a, b, settings)["distances"] == by_row["distances"]
    assert by_row["distances"] != here["distances"]


def test_the_queries_that_are_drawn_are_those_of_the_rows_that_are_left(items, rng):
    X, labels, paths = items[0].copy(), *items[1:]
    X[::7] = np.nan
    settings, left = replace(SETTINGS, queries=20), np.isfinite(X[:, 0])
    order = rng.permutation(60)
    dropped = compare(
        *(file(each[order], labels[order], paths[order]) for each in (X, items[0])),
        settings,
        drop_nonfinite=True,
    )
    alone = [file(each[left], labels[left], paths[left]) for each in items[:1] * 2]
    whole = compare(*alone, settings)["distances"]
    assert dropped["distances"]["l2"]["recall@1"] == whole["l2"]["recall@1"]


def test_one_class_gives_no_interval_and_no_p_value(items):
    one = file(items[0], np.zeros(60, int))
    for score in compare(one, one, SETTINGS)["distances"]["l2"].values():
        assert score["ci"] is score["p"] is None


@pytest.mark.parametrize("queries", [None, 5])
def test_a_gallery_in_another_order_is_compared_also_if_queries_have_no_paths(items, rng, queries):
    X, labels, paths = items
    settings = replace(SETTINGS, queries=queries)
    order = rng.permutation(50)
    files = [
        Embeddings(
            Path("x.h5"),
            "hdf5",
            {
                "query": Split(X[:10], labels[:10]),
                "gallery": Split(X[10:][rows], labels[10:][rows], paths[10:][rows]),
            },
        )
        for rows in (np.arange(50), order)
    ]
    found = compare(*files, settings)
    assert found["queries"] == (queries or 10)
    assert {s["difference"] for s in found["distances"]["l2"].values()} == {0}


def test_rows_with_nan_in_either_file_are_refused_or_left_out_of_both(items, rng):
    X, labels, paths = items
    Y = rng.permuted(X, axis=0)
    kept = np.ones(60, bool)
    kept[[3, 50]] = False
    fine = [file(x[kept], labels[kept], paths[kept]) for x in (X, Y)]
    X[3], Y[50] = np.nan, np.inf
    Y[3, 0] = np.nan
    both = file(X, labels, paths), file(Y, labels, paths)
    with pytest.raises(DmlError, match="1 of 60 embeddings holds NaN or Inf"):
        compare(*both, SETTINGS)
    found, expected = compare(*both, SETTINGS, drop_nonfinite=True), compare(*fine, SETTINGS)
    assert found["distances"] == expected["distances"]
    counts = [found["checks"][name]["nonfinite_rows"] for name in "ab"]
    assert counts == [1, 2]  # each file's own, of the two items
    assert found["notes"] == ["items with NaN or Inf in A or B, left out: 2"]
    for kind, flips in found["flipped"]["l2"].items():
        assert all(paths[flip["row"]] == flip["path"] for flip in flips)
        of_fine = expected["flipped"]["l2"][kind]
        assert [flip["path"] for flip in flips] == [flip["path"] for flip in of_fine]


def test_a_train_split_before_the_test_split_changes_nothing(items):
    X, labels, paths = items
    better = np.eye(6, dtype=np.float32)[labels]
    train = Split(X[:3], labels[:3] + 100)
    a, b = (
        Embeddings(Path("a"), "npz", {"train": train, "test": Split(x, labels, paths)})
        for x in (X, better)
    )
    gained = compare(a, b, SETTINGS)["flipped"]["l2"]["gained"]
    assert gained
    assert all(flip["label"] == labels[flip["row"]] for flip in gained)
