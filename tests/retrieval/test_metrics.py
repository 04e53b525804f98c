"""Scores against arithmetic by hand and against scikit-learn."""

import io
import json
import math
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from sklearn.metrics import adjusted_mutual_info_score

from cli import main
from retrieval import metrics
from retrieval.embeddings import Split
from retrieval.formats.hdf5.writing import write
from retrieval.metrics import Metric, PositivePositions
from retrieval.problem import from_arrays
from retrieval.ranking.ranks import count_ranks
from trainer.tables import result_table

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
    assert metrics.reciprocal_ranks(RANKS) == pytest.approx([1, 1 / 3, 0, 0.5, 1, 0.1])


def test_scores_of_no_queries_are_nan():
    none = np.empty(0, np.int64)
    assert math.isnan(metrics.recall_at(none, [1])[1])


def test_per_class_recall_by_hand():
    classes, recall, counts = metrics.per_class_recall(RANKS, np.array([7, 7, 7, 2, 2, 9]))
    assert classes.tolist() == [2, 7, 9]
    assert recall.tolist() == [0.5, 1 / 3, 0.0]
    assert counts.tolist() == [2, 3, 1]


def test_per_class_recall_weighted_by_counts_is_recall():
    rng = np.random.default_rng(1)
    ranks, labels = rng.integers(0, 6, 200), rng.integers(0, 9, 200)
    _, recall, counts = metrics.per_class_recall(ranks, labels)
    assert recall @ counts / counts.sum() == pytest.approx(metrics.recall_at(ranks, [1])[1])


def test_r_precision_and_map_at_r_by_hand():
    # R = 4, positives at 1, 3, 4; a lone query; R = 2, none within 2; R = 1, at once.
    right = places([1, 3, 4], [], [], [1], counts=[4, 0, 2, 1])
    each = metrics.r_precision(right)
    assert each.tolist() == [3 / 4, 0, 0, 1]
    assert each.mean() == pytest.approx(1.75 / 4)
    each = metrics.map_at_r(right)
    assert each == pytest.approx([(1 + 2 / 3 + 3 / 4) / 4, 0, 0, 1])
    assert each.mean() == pytest.approx(each.sum() / 4)


def test_positions_beyond_r_do_not_count():
    near, far = places([1], counts=[2]), places([1, 5], counts=[2])
    assert metrics.r_precision(near).mean() == metrics.r_precision(far).mean() == 0.5
    assert metrics.map_at_r(near).mean() == metrics.map_at_r(far).mean() == 0.5


def test_perfect_retrieval_scores_one():
    right = places([1, 2, 3], [1], counts=[3, 1])
    assert metrics.r_precision(right).mean() == metrics.map_at_r(right).mean() == 1.0


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
    for seed in range(40):
        labels = np.random.default_rng(seed).integers(0, 30, 500)
        assert metrics.ami(labels, 30 - labels) <= 1
    labels = np.repeat(np.arange(20), 10)
    assert metrics.nmi(labels, np.zeros(200, int)) == 0
    shuffled = np.random.default_rng(0).permutation(labels)
    # NMI rewards many clusters even at random; AMI is adjusted for that.
    assert metrics.nmi(labels, shuffled) > 0.3
    assert abs(metrics.ami(labels, shuffled)) < 0.05


@pytest.mark.parametrize("seed", range(30))
def test_ami_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    N = int(rng.integers(2, 300))
    labels, other = (rng.integers(0, rng.integers(1, N + 1), N) for _ in range(2))
    assignment = np.where(rng.random(N) < rng.random(), labels, other)
    expected = adjusted_mutual_info_score(labels, assignment)
    assert metrics.ami(labels, assignment) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize(
    ("labels", "assignment"),
    [
        ([0] * 5, [0] * 5),
        ([0] * 5, [0, 1, 2, 3, 4]),
        ([0] * 5, [0, 0, 1, 1, 1]),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ([0, 1, 2, 3, 4], [0, 0, 1, 1, 1]),
        ([0, 0, 1, 1], [0, 1, 0, 1]),
    ],
)
def test_ami_of_groups_that_tell_nothing_is_that_of_scikit_learn(labels, assignment):
    expected = adjusted_mutual_info_score(labels, assignment)
    assert metrics.ami(np.array(labels), np.array(assignment)) == pytest.approx(expected, abs=1e-9)


def test_ami_of_thousands_of_clusters_takes_a_moment():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 11_000, 60_000)
    began = time.process_time()
    assert 0.4 < metrics.ami(labels, np.where(rng.random(60_000) < 0.8, labels, 0)) < 1
    assert time.process_time() - began < 5  # scikit-learn: 40 seconds


def test_recall_alone_does_not_load_sklearn():
    code = "import sys, numpy, retrieval.metrics as m; m.recall_at(numpy.ones(3), [1])\n"
    code += "sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_metric_has_a_title_a_sentence_and_a_function_of_what_it_reads():
    found = places([1], [2, 3], counts=[1, 2])
    reads = {"ranks": (RANKS,), "positions": (found,), "clusters": (RANKS, RANKS)}
    for metric in metrics.METRICS:
        assert metric.help.endswith(".")
        assert ("{k}" in metric.title) == metric.at_k
        values = metric.function(*reads[metric.reads], *[2] * metric.at_k)
        if metric.reads == "clusters":
            assert isinstance(values, float)
        else:
            assert len(values) == (len(RANKS) if metric.reads == "ranks" else 2)
    names = [metric.name for metric in metrics.METRICS]
    assert len(set(names)) == len(names)


def test_a_metric_is_one_entry_and_shows_in_json_console_comparison_and_report(
    clustered, tmp_path, monkeypatch
):
    """Also in the table at the end of a training; without any other change."""
    X, labels = clustered
    write(tmp_path / "a.h5", {"test": Split(X, labels)})
    entry = Metric("dcg", "DCG", "Mean of 1 / log2(1 + rank).", discounted, "ranks")
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, entry))

    def run(*args):
        done = CliRunner().invoke(main, [*args, "--no-nmi"])
        assert done.exit_code == 0, done.output
        return done.stdout

    file = str(tmp_path / "a.h5")
    result = json.loads(run("eval", file, "--json"))
    scores = result["distances"]["cos"]
    ranks = count_ranks(from_arrays(X, labels))["cos"].rank
    assert scores["dcg"] == pytest.approx(discounted(ranks).mean())
    assert scores["dcg_ci"][0] < scores["dcg"] < scores["dcg_ci"][1]
    value = f"{100 * scores['dcg']:.2f}"
    assert re.search(rf"DCG .* {value} ", run("eval", file))
    assert re.search(rf"DCG +{value} +{value} +\+0.00", run("compare", file, file))
    page = tmp_path / "r.html"
    run("report", file, "--map", "none", "--out", str(page))
    html = page.read_text()
    assert '<th scope="row">DCG</th><td><span class="value">' in html
    assert value in html
    assert "<dt>DCG</dt><dd>Mean of 1 / log2(1 + rank).</dd>" in html
    trained = {"run": "r", "best_epoch": 1, "epochs": 1, "select": "val", "scores": {}}
    console = Console(file=io.StringIO(), width=100)
    console.print(result_table(trained | {"baselines": {}, "test": result}))
    assert re.search(rf"DCG \(test\) .* {value}", console.file.getvalue())


def discounted(ranks):
    return np.where(ranks > 0, 1 / np.log2(1 + np.maximum(ranks, 1)), 0.0)


def test_occurrences_count_earlier_items_of_the_same_label():
    assert metrics.occurrences(np.array([5, 2, 5, 5, 2])).tolist() == [0, 0, 1, 2, 1]
