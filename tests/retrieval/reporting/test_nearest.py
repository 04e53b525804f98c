"""The rows of a report against brute force in exact arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from retrieval.reporting import nearest
from tests.retrieval.made import file, names
from tests.retrieval.reporting.views import QUICK, view_of


def brute(queries, gallery, q_labels, g_labels, distance, leave_out):
    """Per query: its rank and all others in order; of equals the wrong ones first."""
    rows, ranks = [], []
    for i, query in enumerate(queries.astype(object)):  # whole numbers of any size
        keys = []
        for j, item in enumerate(gallery.astype(object)):
            if leave_out and i == j:
                continue
            right = q_labels[i] == g_labels[j]
            key = sum((query - item) ** 2) if distance == "l2" else -_cosine(query, item)
            keys.append((key, bool(right), j))
        keys.sort()
        rows.append(keys)
        rights = [key for key, right, _ in keys if right]
        ranks.append(
            1 + sum(not right and key <= rights[0] for key, right, _ in keys) if rights else 0
        )
    return np.array(ranks), rows


def _cosine(a, b):
    """cos^2 times |query|^2 with the sign of the cosine: orders the items of one query exactly."""
    from fractions import Fraction

    dot, length = int(sum(a * b)), int(sum(b * b))
    return Fraction(dot * abs(dot), length) if length else Fraction(0)


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_rows_are_those_of_exact_brute_force_and_ties_never_help(tied, distance):
    data, sides, leave_out = tied
    view = view_of(data, options=replace(QUICK, distance=distance))
    ranks, rows = brute(*sides, distance, leave_out)
    items = view["items"]
    assert view["total_queries"] == len(view["queries"]) == len(ranks)
    assert sorted(items["row"][q["item"]] for q in view["queries"]) == list(range(len(ranks)))
    for query in view["queries"]:
        row = items["row"][query["item"]]
        assert query["rank"] == ranks[row]
        expected = rows[row][:8]
        assert len(query["near"]) == len(expected)
        keys = {j: key for key, _, j in rows[row]}
        assert [keys[items["row"][n]] for n in query["near"]] == [key for key, _, _ in expected]
        mine = items["class"][query["item"]]
        assert [items["class"][n] == mine for n in query["near"]] == [r for _, r, _ in expected]
        assert query["near"] == list(dict.fromkeys(query["near"]))
        assert leave_out is False or query["item"] not in query["near"]
        q, g = sides[0][row].astype(float), sides[1].astype(float)
        near = g[[items["row"][n] for n in query["near"]]]
        if distance == "l2":
            assert query["score"] == pytest.approx(np.linalg.norm(near - q, axis=1), rel=1e-4)
        else:
            lengths = np.linalg.norm(near, axis=1) * np.linalg.norm(q)
            cosine = np.divide(near @ q, lengths, out=np.zeros(len(near)), where=lengths > 0)
            assert query["score"] == pytest.approx(cosine, abs=1e-4)


def test_rows_follow_the_ranks_where_rounding_would_not():
    """Two distances that differ in the last bit only: the engine knows, and the row obeys."""
    row = [[(1.0, 10), (3.0, 11)], [(1.0, 20), (2.0, 21)]]
    assert nearest._merged(*row, rank=1, k=8) == [(1.0, 10), (1.0, 20), (2.0, 21), (3.0, 11)]
    assert nearest._merged(*row, rank=2, k=8) == [(1.0, 20), (1.0, 10), (2.0, 21), (3.0, 11)]
    assert nearest._merged(*row, rank=3, k=8) == [(1.0, 20), (2.0, 21), (1.0, 10), (3.0, 11)]
    assert nearest._merged([], row[1], rank=0, k=1) == [(1.0, 20)]


def test_collapsed_embeddings_show_only_wrong_items(rng):
    view = view_of(file(np.ones((40, 4), np.float32), np.arange(40) % 2, names(40)))
    for query in view["queries"]:
        classes_near = [view["items"]["class"][n] for n in query["near"]]
        assert view["items"]["class"][query["item"]] not in classes_near
    assert view["tabs"]["best"] == []
    assert len(view["tabs"]["worst"]) == 40
