"""Rows of two files are matched by path or position, and files that do not fit are refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retrieval import DmlError, compare
from retrieval.embeddings import Embeddings, Split
from tests.retrieval.made import SETTINGS, file


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
