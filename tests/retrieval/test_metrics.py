"""Scores against arithmetic by hand and against scikit-learn."""

import math
import subprocess
import sys

import numpy as np
import pytest

from retrieval import metrics
from retrieval.metrics import PositivePositions

RANKS = np.array([1, 3, 0, 2, 1, 10])


def places(*per_query: list[int], counts: list[int]) -> PositivePositions:
    offsets = np.cumsum([0, *map(len, per_query)])
    flat = np.array([p for query in per_query for p in query], dtype=np.int64)
    return PositivePositions(np.array(counts), offsets, flat)


def test_recall_by_hand_keeps_lone_queries_in_the_denominator():
    assert metrics.recall_at(RANKS, [1, 2, 4, 10]) == {1: 2 / 6, 2: 3 / 6, 4: 4 / 6, 10: 5 / 6}


def test_recall_never_falls_with_k_and_stays_below_the_share_of_queries_with_a_right_item():
    recall = metrics.recall_at(np.random.default_rng(0).integers(0, 50, 300), range(1, 60))
    values = list(recall.values())
    assert values == sorted(values)
    assert 0 <= values[0] <= values[-1] < 1


def test_reciprocal_rank_by_hand():
    assert metrics.mean_reciprocal_rank(RANKS) == pytest.approx((1 + 1 / 3 + 0 + 0.5 + 1 + 0.1) / 6)


def test_scores_of_no_queries_are_nan():
    none = np.empty(0, np.int64)
    assert math.isnan(metrics.recall_at(none, [1])[1])
    assert math.isnan(metrics.mean_reciprocal_rank(none))


def test_per_class_recall_by_hand():
    classes, recall, counts = metrics.per_class_recall(RANKS, np.array([7, 7, 7, 2, 2, 9]), k=2)
    assert classes.tolist() == [2, 7, 9]
    assert recall.tolist() == [1.0, 1 / 3, 0.0]
    assert counts.tolist() == [2, 3, 1]


def test_per_class_recall_weighted_by_counts_is_recall():
    rng = np.random.default_rng(1)
    ranks, labels = rng.integers(0, 6, 200), rng.integers(0, 9, 200)
    _, recall, counts = metrics.per_class_recall(ranks, labels, k=3)
    assert recall @ counts / counts.sum() == pytest.approx(metrics.recall_at(ranks, [3])[3])


def test_r_precision_and_map_at_r_by_hand():
    # R = 4, right items at 1, 3, 4; a lone query; R = 2, none within 2; R = 1, at once.
    right = places([1, 3, 4], [], [], [1], counts=[4, 0, 2, 1])
    mean, each = metrics.r_precision(right)
    assert each.tolist() == [3 / 4, 0, 0, 1]
    assert mean == pytest.approx(1.75 / 4)
    mean, each = metrics.map_at_r(right)
    assert each == pytest.approx([(1 + 2 / 3 + 3 / 4) / 4, 0, 0, 1])
    assert mean == pytest.approx(each.sum() / 4)


def test_positions_beyond_r_do_not_count():
    near, far = places([1], counts=[2]), places([1, 5], counts=[2])
    assert metrics.r_precision(near)[0] == metrics.r_precision(far)[0] == 0.5
    assert metrics.map_at_r(near)[0] == metrics.map_at_r(far)[0] == 0.5


def test_perfect_retrieval_scores_one():
    right = places([1, 2, 3], [1], counts=[3, 1])
    assert metrics.r_precision(right)[0] == metrics.map_at_r(right)[0] == 1.0


def test_nmi_is_mutual_information_over_the_mean_entropy():
    labels, assignment = np.array([0, 0, 0, 1, 1, 2]), np.array([5, 5, 6, 6, 6, 6])

    def entropy(*names: np.ndarray) -> float:
        _, counts = np.unique(np.stack(names), axis=1, return_counts=True)
        share = counts / counts.sum()
        return float(-(share * np.log(share)).sum())

    one, two, both = entropy(labels), entropy(assignment), entropy(labels, assignment)
    expected = (one + two - both) / ((one + two) / 2)
    assert metrics.nmi(labels, assignment) == pytest.approx(expected)


def test_clustering_scores_reach_their_bounds():
    labels = np.repeat(np.arange(20), 10)
    assert metrics.nmi(labels, 19 - labels) == pytest.approx(1)
    assert metrics.ami(labels, 19 - labels) == pytest.approx(1)
    assert metrics.nmi(labels, np.zeros(200, int)) == 0
    shuffled = np.random.default_rng(0).permutation(labels)
    # NMI rewards many clusters even at random; AMI is adjusted for that.
    assert metrics.nmi(labels, shuffled) > 0.3
    assert abs(metrics.ami(labels, shuffled)) < 0.05


def test_recall_alone_does_not_load_sklearn():
    code = "import sys, numpy, retrieval.metrics as m; m.recall_at(numpy.ones(3), [1])\n"
    code += "sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
