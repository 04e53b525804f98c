"""`evaluate`: scores by hand and by FAISS, and what must not change them."""

import json
from pathlib import Path

import faiss
import numpy as np
import pytest

from retrieval import DmlError, Embeddings, Split, evaluate, load, save
from retrieval.evaluation import Settings, score, with_nmi
from retrieval.problem import from_arrays
from tests.golden.cases import vectors
from tests.ranks import in_threads


def test_the_result_has_the_documented_shape(clustered):
    result = evaluate(*clustered, recall_at=(1, 5), seeds=2)
    assert result["version"] == 1
    assert result["protocol"] == "leave-one-out"
    assert (result["queries"], result["gallery"], result["classes"], result["dim"]) == (
        60,
        60,
        6,
        8,
    )
    for scores in result["distances"].values():
        assert list(scores["recall"]) == ["1", "5"]
        low, high = scores["recall_ci"]["1"]
        assert low <= scores["recall"]["1"] <= high
        assert len(scores["nmi"]["values"]) == len(scores["ami"]["values"]) == 2
        assert scores["nmi"]["mean"] == pytest.approx(np.mean(scores["nmi"]["values"]))
        assert scores["nmi"]["std"] == pytest.approx(np.std(scores["nmi"]["values"], ddof=1))
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_scores_match_arithmetic_by_hand():
    # On a line: a a b a b. Ranks: 1 (a), 1, then b at 3 has a's at 1 and 1.5 away first.
    X = np.array([[0.0], [1.0], [3.0], [4.5], [7.0]])
    result = evaluate(X, np.array(list("aabab")), distances="l2", recall_at=(1, 2, 3, 4))
    # Nearest right, wrong ones at least as near: a0: 1, 0. a1: 1, 0. b3: 4; 3, 2, 1.5 -> 3.
    # a4.5: 3.5; 1.5, 2.5 -> 2. b7: 4; 2.5 -> 1.
    ranks = np.array([1, 1, 4, 3, 2])
    scores = result["distances"]["l2"]
    assert scores["recall"] == {"1": 0.4, "2": 0.6, "3": 0.8, "4": 1.0}
    assert scores["mrr"] == pytest.approx((1 / ranks).mean())


def test_recall_and_map_at_r_are_those_of_faiss_lists(clustered):
    X, labels = clustered
    split = (X[:20], labels[:20], X[20:], labels[20:])
    for queries, query_labels, gallery, gallery_labels in ((X, labels, X, labels), split):
        alone = gallery is X
        given = (X, labels) if alone else split
        found = evaluate(*given, nmi=False, recall_at=(1, 2, 4, 8))["distances"]
        for d in ("cos", "l2"):
            q, g = (np.ascontiguousarray(x, np.float32) for x in (queries, gallery))
            if d == "cos":
                q, g = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, g))
            _, ids = faiss.knn(q, g, len(g))
            lists = [row[row != n] if alone else row for n, row in enumerate(ids)]
            positive = gallery_labels[np.stack(lists)] == query_labels[:, None]  # (Q, G)
            for k in (1, 2, 4, 8):
                assert found[d]["recall"][str(k)] == positive[:, :k].any(axis=1).mean()
            R = positive.sum(axis=1, keepdims=True)
            precision = positive.cumsum(axis=1) / np.arange(1, positive.shape[1] + 1)
            within = positive & (np.arange(positive.shape[1]) < R)
            expected = ((precision * within).sum(axis=1) / R[:, 0]).mean()
            assert found[d]["map_at_r"] == pytest.approx(expected)


def test_recall_counts_ties_against_the_query_when_every_row_is_repeated(rng):
    X = np.repeat(rng.standard_normal((30, 4)), 3, axis=0).astype(np.float32)
    labels = rng.integers(0, 5, 90)
    found = evaluate(X, labels, nmi=False, map_at_r=False)["distances"]
    _, ids = faiss.knn(X, X, 3)
    same_rows = labels.reshape(30, 3)[np.arange(90) // 3]  # (90, 3), with the query itself
    assert np.array_equal(
        np.sort(ids // 3, axis=1), np.repeat(np.arange(90) // 3, 3).reshape(90, 3)
    )
    # Both copies are at distance 0: a hit at 1 needs both to be positives.
    assert found["l2"]["recall"]["1"] == (same_rows == labels[:, None]).all(axis=1).mean()


def test_a_query_that_ties_by_one_distance_is_a_tied_query():
    found = evaluate(np.array([[1.0], [2.0], [4.0]]), np.array([0, 0, 1]), nmi=False)
    assert {d: found["distances"][d]["tied_queries"] for d in ("cos", "l2")} == {"cos": 2, "l2": 0}
    assert found["checks"]["tied_queries"] == 2


def test_the_seed_decides_the_queries_and_the_classes_that_are_drawn(clustered):
    def found(seed, queries):
        return evaluate(*clustered, nmi=False, seed=seed, queries=queries)["distances"]["cos"]

    assert found(1, None)["mrr"] == found(0, None)["mrr"]
    assert found(1, None)["mrr_ci"] != found(0, None)["mrr_ci"]
    assert found(1, 20)["mrr"] != found(0, 20)["mrr"]


@pytest.mark.parametrize("map_at_r", [False, True])
def test_scores_ignore_row_order_and_label_names(clustered, rng, map_at_r):
    X, labels = clustered
    order = rng.permutation(60)
    names = np.array([f"class {c}" for c in rng.permutation(6)])
    before = evaluate(X, labels, nmi=False, map_at_r=map_at_r)["distances"]
    after = evaluate(X[order], names[labels[order]], nmi=False, map_at_r=map_at_r)["distances"]
    for d in ("cos", "l2"):
        for key, value in before[d].items():
            if not key.endswith("_ci"):  # the order of the labels decides which classes are drawn
                assert after[d][key] == value, key
    names = np.array([f"class {c}" for c in range(6)])
    after = evaluate(X[order], names[labels[order]], nmi=False, map_at_r=map_at_r)["distances"]
    for d in ("cos", "l2"):
        assert {k: v for k, v in after[d].items() if k.endswith("_ci")} == {
            k: v for k, v in before[d].items() if k.endswith("_ci")
        }


def test_the_interval_of_a_score_does_not_depend_on_what_else_is_computed(rng):
    # Classes of 2 to 40 items: limits of intervals are then so fine that other draws move them.
    labels = np.repeat(np.arange(39), np.arange(2, 41))
    X = rng.standard_normal((39, 8))[labels] + rng.standard_normal((len(labels), 8))
    full = evaluate(X, labels, nmi=False, recall_at=(1, 2, 3, 5))["distances"]["cos"]
    for options in (
        {"recall_at": 1},
        {"distances": "cos", "recall_at": (5, 1)},
        {"map_at_r": False},
    ):
        some = evaluate(X, labels, nmi=False, **options)["distances"]["cos"]
        for k in some["recall_ci"].keys() & full["recall_ci"].keys():
            assert some["recall_ci"][k] == full["recall_ci"][k]
        assert some["mrr_ci"] == full["mrr_ci"]
        if some["map_at_r"] is not None:
            assert some["map_at_r_ci"] == full["map_at_r_ci"]
            assert some["r_precision_ci"] == full["r_precision_ci"]


def test_recall_grows_with_k_and_stays_within_bounds(clustered):
    result = evaluate(*clustered, nmi=False, recall_at=range(1, 60))
    for scores in result["distances"].values():
        values = list(scores["recall"].values())
        assert values == sorted(values)
        assert values[0] >= 0
        assert values[-1] == 1.0


def test_scaling_all_vectors_changes_nothing(clustered):
    X, labels = clustered
    before, after = (evaluate(x, labels, nmi=False)["distances"] for x in (X, X * 1024))
    assert before == after


@pytest.mark.parametrize("gallery", [False, True])
def test_sampling_queries_changes_neither_checks_nor_clusters(clustered, gallery):
    X, labels = clustered
    X[:10] = 0
    data = (X[:20], labels[:20], X[20:], labels[20:]) if gallery else (X, labels)
    full = evaluate(*data, seeds=1)
    some = evaluate(*data, seeds=1, queries=5)
    assert some["distances"]["cos"]["nmi"] == full["distances"]["cos"]["nmi"]
    assert full["checks"]["zero_norm_rows"] == 10
    for name in ("single_item_classes", "zero_norm_rows", "conflicting_duplicates"):
        assert some["checks"][name] == full["checks"][name]


def test_lone_queries_stay_in_the_denominator():
    X = np.array([[0.0], [0.1], [5.0]])
    result = evaluate(X, [0, 0, 1], nmi=False)
    assert result["distances"]["l2"]["recall"]["1"] == pytest.approx(2 / 3)


def test_settings_that_do_not_work_are_reported_together():
    with pytest.raises(DmlError, match=r"(?s)recall_at.*seeds"):
        Settings(recall_at=(0,), seeds=0)
    several = (
        {"distances": ()},
        {"distances": ("l3",)},
        {"recall_at": (1.5,)},
        {"recall_at": True},
    )
    for wrong in (*several, {"seed": -1}, {"resamples": 0}, {"level": 95}):
        with pytest.raises(DmlError, match=next(iter(wrong))):
            Settings(**wrong)


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ("[1, 3, 5]", [1, 3, 5]),
        ("[2, 1, 2]", [2, 1]),
        ("[0, 1]", [1, 10, 100, 1000]),
        ("[1.5]", [1, 10, 100, 1000]),
        ("[true]", [1, 10, 100, 1000]),
        ("[]", [1, 10, 100, 1000]),
        ("3", [1, 10, 100, 1000]),
        ("[" * 100_000, [1, 10, 100, 1000]),
        (str([*range(1, 1000)]), [1, 10, 100, 1000]),
    ],
)
def test_k_of_recall_is_what_a_file_records_unless_that_is_damaged(clustered, recorded, expected):
    attrs = {"dataset": "sop", "recall_at": recorded}
    data = Embeddings(Path("x.h5"), "hdf5", {"test": Split(*clustered)}, attrs=attrs)
    assert evaluate(data, nmi=False)["settings"]["recall_at"] == expected


@pytest.mark.parametrize(
    ("data_set", "expected"),
    [
        ("sop", (1, 10, 100, 1000)),
        ("inshop", (1, 10, 20, 30, 40, 50)),
        ("cub", (1, 2, 4, 8, 16, 32)),
        ("cars", (1, 2, 4, 8, 16, 32)),
        ("photos", (1, 2, 4, 8)),
        (None, (1, 2, 4, 8)),
    ],
)
def test_k_of_recall_is_that_of_the_data_set_that_an_older_file_names(
    clustered, data_set, expected
):
    attrs = {} if data_set is None else {"dataset": data_set}
    data = Embeddings(Path("x.h5"), "hdf5", {"test": Split(*clustered)}, attrs=attrs)
    result = evaluate(data, nmi=False)
    assert result["settings"]["recall_at"] == list(expected)
    assert list(result["distances"]["l2"]["recall"]) == [str(k) for k in expected]
    assert evaluate(data, nmi=False, recall_at=(1, 3))["settings"]["recall_at"] == [1, 3]


@pytest.mark.parametrize("wrong", [(True,), True, (1.0,), (1, False)])
def test_recall_at_wants_numbers_not_truth(clustered, wrong):
    with pytest.raises(DmlError, match="recall_at"):
        evaluate(*clustered, nmi=False, recall_at=wrong)


def test_arrays_embeddings_and_files_give_the_same_result(clustered, tmp_path):
    X, labels = clustered
    path = tmp_path / "x.h5"
    save(path, Split(X, labels))
    expected = evaluate(X, labels, nmi=False)
    assert evaluate(path, nmi=False) == expected
    assert evaluate(str(path), nmi=False) == expected
    assert evaluate(load(path), nmi=False) == expected
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", labels)
    assert evaluate(tmp_path / "x.npy", tmp_path / "y.npy", nmi=False) == expected


def test_data_without_labels_or_with_two_kinds_of_them_is_an_error(clustered, tmp_path):
    X, labels = clustered
    with pytest.raises(DmlError, match="There are no labels"):
        evaluate(X)
    save(tmp_path / "x.h5", Split(X, labels))
    for mixed in ((tmp_path / "x.h5", labels), (X, "labels.txt"), (X, labels, "x.npy")):
        with pytest.raises(DmlError, match="given together"):
            evaluate(*mixed)
    with pytest.raises(DmlError, match="has its own labels"):
        evaluate(load(tmp_path / "x.h5"), labels)


def test_settings_take_one_distance_or_k_alone():
    found = Settings(distances="l2", recall_at=5)
    assert (found.distances, found.recall_at) == (("l2",), (5,))
    assert Settings(recall_at=[1, 10]).recall_at == (1, 10)


def test_processes_that_read_different_files_are_told():
    X, labels = vectors()
    other = X.copy()
    other[0, 0] += 1

    def work(world):
        problem = from_arrays(other if world.rank == 1 else X, labels)
        with pytest.raises(DmlError, match="different embeddings"):
            score(problem, Settings(nmi=False), world=world)

    in_threads(3, work)


def test_of_several_processes_only_the_first_clusters():
    problem, settings = from_arrays(*vectors()), Settings(distances=("cos",))

    def work(world):
        return with_nmi(score(problem, settings, world=world), problem, settings, world=world)

    found = in_threads(2, work)
    assert ["nmi" in each.result["distances"]["cos"] for each in found] == [True, False]
