from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retrieval import DmlError, compare
from retrieval.embeddings import Embeddings, Split
from retrieval.evaluation import Settings

SETTINGS = Settings(nmi=False, map_at_r=False, distances=("l2",))


def file(vectors, labels, paths=None, name="a.h5"):
    return Embeddings(Path(name), "hdf5", {"test": Split(vectors, np.asarray(labels), paths)})


@pytest.fixture
def items(clustered):
    X, labels = clustered
    return X, labels, np.array([f"{n:03}.jpg" for n in range(len(X))])


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


def test_a_comparison_has_the_notes_of_an_evaluation(items):
    X, labels = (each[items[1] < 5] for each in items[:2])
    few, beyond = compare(file(X, labels), file(X, labels), replace(SETTINGS, recall_at=99))[
        "notes"
    ]
    assert few.startswith("queries have only 5 classes")
    assert beyond.startswith("Recall@99: a query has only 49 candidates")


def test_comparing_b_with_a_mirrors_comparing_a_with_b(items, rng):
    X, labels, paths = items
    settings = replace(SETTINGS, map_at_r=True, distances=("cos", "l2"))
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


def test_rows_are_matched_by_path(items, rng):
    X, labels, paths = items
    order = rng.permutation(60)
    result = compare(file(*items), file(X[order], labels[order], paths[order]), SETTINGS)
    assert result["flipped"]["l2"] == {"gained": [], "lost": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, y, p: (X[:50], y[:50], p[:50]), "Only in a.h5: .* and 7 more"),
        (lambda X, y, p: (X, np.roll(y, 1), None), "labels of test differ"),
        (lambda X, y, p: (X, y, np.char.add("x", p)), "Only in a.h5: .* and 57 more"),
    ],
)
def test_files_of_other_items_are_refused(items, change, message):
    with pytest.raises(DmlError, match=message):
        compare(file(*items), file(*change(*items)), SETTINGS)


def test_paths_that_repeat_in_another_order_are_refused(items):
    X, labels, paths = items
    twice = np.array([*paths[:-1], paths[0]])
    labels = np.zeros(len(X), int)
    compare(file(X, labels, twice), file(X, labels, twice), SETTINGS)
    with pytest.raises(DmlError, match="more than once"):
        compare(file(X, labels, twice), file(X[::-1], labels, twice[::-1]), SETTINGS)


def test_files_without_a_split_to_evaluate_are_refused(items):
    X, labels, paths = items
    train = Embeddings(Path("a"), "npz", {"train": Split(X, labels, paths)})
    with pytest.raises(DmlError, match="has no split to compare"):
        compare(train, train, SETTINGS)


def test_files_of_other_splits_are_refused(items):
    X, labels, paths = items
    split = Split(X, labels, paths)
    shop = Embeddings(Path("b.h5"), "hdf5", {"query": split, "gallery": split})
    with pytest.raises(DmlError, match="different splits"):
        compare(file(*items), shop, SETTINGS)


def test_labels_are_compared_by_name_where_files_name_them(items):
    X, labels, _ = items
    names = np.array([f"class {c}" for c in range(6)])
    order = np.array([3, 1, 0, 2, 5, 4])
    one = replace(file(X, labels), label_names=names)
    same = replace(file(X, np.argsort(order)[labels]), label_names=names[order])
    assert compare(one, same, SETTINGS)["flipped"]["l2"] == {"gained": [], "lost": []}
    other = replace(file(X, labels), label_names=np.char.add("other ", names))
    with pytest.raises(DmlError, match="60 labels of test differ"):
        compare(one, other, SETTINGS)


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
