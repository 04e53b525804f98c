"""The queries that a report shows, and the pairs of its histograms."""

import numpy as np
import pytest

from retrieval.reporting import sampling
from tests.retrieval.made import file, names
from tests.retrieval.reporting.views import view_of


def test_tabs_hold_the_worst_and_the_best_without_lone_queries(clustered):
    X, labels = clustered
    labels = labels.copy()
    labels[0] = 50
    view = view_of(file(X, labels, names(60)))
    ranks = [q["rank"] for q in view["queries"]]
    worst, best = ([ranks[n] for n in view["tabs"][tab]] for tab in ("worst", "best"))
    assert worst == sorted((r for r in ranks if r > 1), reverse=True)
    assert best == [1] * sum(r == 1 for r in ranks)
    assert sorted(view["tabs"]["random"]) == list(range(60))
    assert ranks.count(0) == 1


def test_the_sample_is_bounded_and_reaches_every_class(rng):
    ranks, codes = rng.integers(0, 50, 30_000), np.arange(30_000) % 900
    sample = sampling.choose(ranks, codes, rng.standard_normal(30_000), seed=3)
    assert len(sample.queries) == len(set(sample.queries.tolist())) == sampling.MOST
    assert set(codes[sample.queries].tolist()) == set(range(900))
    assert len(sample.tabs["random"]) == sampling.RANDOM
    again = sampling.choose(ranks, codes, rng.standard_normal(30_000), seed=3)
    assert sample.tabs["random"] == again.tabs["random"]


@pytest.mark.parametrize("most", [200_000, 500])
def test_histograms_are_of_all_pairs_or_of_a_fair_sample(clustered, most, monkeypatch):
    monkeypatch.setattr(sampling, "PAIRS", most)
    X, labels = clustered
    found = view_of(file(X, labels))["histograms"]["l2"]
    apart = np.linalg.norm(X[:, None].astype(float) - X[None], axis=-1)
    same, others = labels[:, None] == labels, ~np.eye(60, dtype=bool)
    edges = np.array(found["edges"])
    middles = (edges[1:] + edges[:-1]) / 2
    for name, pairs in (("positive", same & others), ("negative", ~same)):
        assert sum(found[name]) == pytest.approx(1, abs=1e-4)
        tolerance = 0.01 if most > 500 else 0.05
        assert middles @ found[name] == pytest.approx(apart[pairs].mean(), rel=tolerance)
    assert found["overlap"] == pytest.approx(
        np.minimum(found["positive"], found["negative"]).sum(), abs=1e-4
    )


def test_pairs_of_histograms_are_right_wrong_and_never_the_item_itself(tied):
    from retrieval.problem import from_embeddings

    data, (_, _, q_labels, g_labels), leave_out = tied
    problem = from_embeddings(data)
    right, wrong = sampling._pairs(problem, np.random.default_rng(0))
    same = q_labels[:, None] == g_labels[None]
    if leave_out:
        np.fill_diagonal(same, False)
    assert sorted(zip(*right, strict=True)) == sorted(zip(*np.nonzero(same), strict=True))
    different = q_labels[:, None] != g_labels[None]
    assert sorted(zip(*wrong, strict=True)) == sorted(zip(*np.nonzero(different), strict=True))
