"""Classes of a report, measured again by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tests.retrieval.made import file, names
from tests.retrieval.reporting.views import QUICK, shop, view_of


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_classes_are_measured_as_by_hand(clustered, distance):
    X, labels = clustered
    data = shop(X, labels, 20) if distance == "l2" else file(X, labels)
    view = view_of(data, options=replace(QUICK, distance=distance))
    columns = view["classes"]
    X = X.astype(float)
    units = X / np.linalg.norm(X, axis=1, keepdims=True) if distance == "cos" else X
    means = np.stack([units[labels == c].mean(0) for c in range(6)])
    if distance == "cos":
        directions = means / np.linalg.norm(means, axis=1, keepdims=True)
        apart = 1 - directions @ directions.T
        spread = [np.mean(1 - units[labels == c] @ directions[c]) for c in range(6)]
    else:
        apart = np.linalg.norm(means[:, None] - means[None], axis=-1)
        spread = [np.linalg.norm(X[labels == c] - means[c], axis=1).mean() for c in range(6)]
    np.fill_diagonal(apart, np.inf)
    assert columns["spread"] == pytest.approx(spread, rel=1e-3)
    assert columns["nearest"] == apart.argmin(1).tolist()
    assert columns["gap"] == pytest.approx(apart.min(1), rel=1e-3)
    assert columns["items"] == [10] * 6
    assert columns["name"] == list("012345")


def test_confused_pairs_count_what_the_rows_show(clustered):
    X, labels = clustered
    X, labels = np.vstack([X, X[:1]]), np.append(labels, 6)  # the last has nothing to find
    view = view_of(file(X, labels, names(61)))
    items, counted = view["items"]["class"], {}
    for query in view["queries"]:
        if query["rank"] > 1:
            pair = items[query["item"]], items[query["near"][0]]
            counted[pair] = counted.get(pair, 0) + 1
    assert {(p["a"], p["b"]): p["count"] for p in view["confused"]} == counted
    counts = [p["count"] for p in view["confused"]]
    assert counts == sorted(counts, reverse=True)
    rows = {q["item"]: (q["near"][0], q["score"][0]) for q in view["queries"]}
    for pair in view["confused"]:
        assert pair["share"] == pytest.approx(pair["count"] / 10)
        assert len(pair["examples"]) == min(3, pair["count"])
        for item, found, score in pair["examples"]:
            assert (items[item], items[found]) == (pair["a"], pair["b"])
            assert rows[item] == (found, pytest.approx(score, abs=1e-4))


def test_near_duplicates_are_the_nearest_pairs_of_different_classes(rng):
    X = rng.standard_normal((80, 5)).astype(np.float32)
    labels = np.arange(80) % 4
    X[41] = X[10]  # classes 1 and 2
    view = view_of(file(X, labels, names(80)), options=replace(QUICK, distance="l2"))
    rows = view["items"]["row"]
    a, b, score = view["duplicates"][0]
    assert {rows[a], rows[b]} == {10, 41}
    assert score == 0
    pairs = [frozenset((a, b)) for a, b, _ in view["duplicates"]]
    assert len(set(pairs)) == len(pairs)
    scores = [score for _, _, score in view["duplicates"]]
    assert scores == sorted(scores)
