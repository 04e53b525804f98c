import json
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest

from retrieval import DmlError, Embeddings, Split, clustering, evaluate, load, save
from retrieval.evaluation import Settings, run
from retrieval.problem import from_arrays, sample


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


def test_query_gallery_is_chosen_when_there_is_a_gallery(clustered):
    X, labels = clustered
    result = evaluate(X[:20], labels[:20], X[20:], labels[20:], nmi=False)
    assert result["protocol"] == "query-gallery"
    assert (result["queries"], result["gallery"]) == (20, 40)


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
                assert after[d][key] == (
                    pytest.approx(value) if isinstance(value, float) else value
                )
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


def test_a_tie_under_either_distance_is_counted():
    # Parallel to the positive: tied for cos alone.
    X = np.array([[1.0, 0], [2, 0], [3, 0], [0, 1], [0, 1.5]])
    result = evaluate(X, [0, 0, 1, 2, 2], nmi=False, map_at_r=False)
    assert result["distances"]["l2"]["tied_queries"] == 1  # 2 lies between 1 and 3
    assert result["distances"]["cos"]["tied_queries"] == 2
    assert result["checks"]["tied_queries"] == 2


def test_sampling_queries_changes_neither_checks_nor_clusters(clustered):
    X, labels = clustered
    full = evaluate(X, labels, seeds=1)
    some = evaluate(X, labels, seeds=1, queries=5)
    assert some["distances"]["cos"]["nmi"] == full["distances"]["cos"]["nmi"]
    for name in ("single_item_classes", "zero_norm_rows", "conflicting_duplicates"):
        assert some["checks"][name] == full["checks"][name]


def test_overlapping_calls_leave_blas_as_it_was(clustered):
    from concurrent.futures import ThreadPoolExecutor

    from threadpoolctl import threadpool_info

    before = threadpool_info()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: evaluate(*clustered, nmi=False), range(8)))
    assert all(result == results[0] for result in results)
    assert threadpool_info() == before


def test_nonfinite_rows_are_an_error_unless_dropped(clustered):
    X, labels = clustered
    X[3, 2], X[9, 0] = np.nan, np.inf
    with pytest.raises(DmlError, match=r"2 of 60 .*rows 3, 9"):
        evaluate(X, labels, nmi=False)
    result = evaluate(X, labels, nmi=False, drop_nonfinite=True)
    assert result["queries"] == 58
    assert result["checks"]["nonfinite_rows"] == 2
    with pytest.raises(DmlError, match="All 60"):
        evaluate(np.full_like(X, np.nan), labels, drop_nonfinite=True)


def test_lone_queries_stay_in_the_denominator():
    X = np.array([[0.0], [0.1], [5.0]])
    result = evaluate(X, [0, 0, 1], nmi=False)
    assert result["distances"]["l2"]["recall"]["1"] == pytest.approx(2 / 3)


def test_sampled_queries_are_those_of_the_seed_and_keep_the_gallery(clustered):
    X, labels = clustered
    problem = sample(from_arrays(X, labels), 10, seed=3)
    assert (problem.query_rows == sample(from_arrays(X, labels), 10, seed=3).query_rows).all()
    full = run(from_arrays(X, labels), Settings(nmi=False, map_at_r=False))
    some = run(from_arrays(X, labels), Settings(nmi=False, map_at_r=False, queries=10, seed=3))
    assert some.result["queries"] == 10
    assert some.result["gallery"] == 60
    assert (some.ranks["cos"] == full.ranks["cos"][problem.query_rows]).all()


def test_integer_labels_of_both_signs_and_widths_meet_without_rounding():
    X = np.eye(3)
    big = np.array([2**63, 2**63 + 1, 5], np.uint64)
    result = evaluate(X, big, X, np.array([-1, 5, 7]), nmi=False, map_at_r=False)
    assert result["classes"] == 5
    beyond = np.array([2**70, 2**70 + 1, 2**70], object)
    assert evaluate(X, beyond, nmi=False, map_at_r=False)["classes"] == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.ones(3), np.ones(3, int)), "shape"),
        ((np.ones((3, 0)), np.ones(3, int)), "shape"),
        ((np.ones((3, 2)), np.ones(2, int)), "3 embeddings but labels"),
        ((np.ones((3, 2)), np.full(3, 1.5)), "must be whole numbers"),
        ((np.ones((3, 2)), [1, "1", 2]), "labels of the types int, str"),
        ((np.ones((3, 2), complex), np.ones(3, int)), "complex128"),
        ((np.ones((3, 2)), np.ones(3, int), np.ones((3, 4)), np.ones(3, int)), "2 dimensions"),
        ((np.ones((3, 2)), np.ones(3, int), np.ones((3, 2))), "come together"),
        (
            (np.ones((3, 2)), np.ones(3, int), np.ones((3, 2)), ["a", "b", "c"]),
            "names and the others are numbers",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(args, message):
    with pytest.raises(DmlError, match=message):
        evaluate(*args)


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


def test_nmi_needs_no_faiss(monkeypatch, clustered):
    with_faiss = evaluate(*clustered, seeds=1)
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert evaluate(*clustered, seeds=1) == with_faiss
    assert with_faiss["distances"]["cos"]["nmi"]["mean"] > 0


def test_rows_of_length_one_are_clustered_once(monkeypatch, clustered):
    X, labels = clustered
    clustered_as = []

    def told(*args, real=clustering.cluster_scores, **options):
        clustered_as.append(args[2])
        return real(*args, **options)

    monkeypatch.setattr(clustering, "cluster_scores", told)
    unit = (X / np.linalg.norm(X, axis=1, keepdims=True)).astype(np.float32)
    both = evaluate(unit, labels, seeds=2)["distances"]
    assert clustered_as == ["cos"]
    assert both["l2"]["nmi"] == both["cos"]["nmi"]
    alone = evaluate(unit, labels, seeds=2, distances="l2")["distances"]["l2"]
    assert alone["nmi"]["mean"] == pytest.approx(both["l2"]["nmi"]["mean"], abs=0.02)
    clustered_as.clear()
    evaluate(unit * np.float32(1.001), labels, seeds=1)
    assert clustered_as == ["l2", "cos"]


def test_the_start_of_k_means_is_chosen_and_recorded(clustered):
    plus, random = (
        evaluate(*clustered, seeds=2, kmeans_init=init, kmeans_restarts=1)
        for init in ("k-means++", "random")
    )
    assert plus["settings"]["kmeans_init"] == "k-means++"
    assert random["settings"]["kmeans_init"] == "random"
    assert plus["settings"]["kmeans_iterations"] == 300
    assert plus["settings"]["kmeans_restarts"] == 1
    assert evaluate(*clustered, seeds=1)["settings"]["kmeans_restarts"] == 10
    used = plus["distances"]["cos"]["kmeans_iterations"]
    assert len(used) == 2
    assert all(1 <= n < 300 for n in used)
    with pytest.raises(DmlError, match="kmeans_init"):
        Settings(kmeans_init="magic")


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
def test_k_of_recall_is_that_of_the_data_set(clustered, data_set, expected):
    attrs = {} if data_set is None else {"dataset": data_set}
    data = Embeddings(Path("x.h5"), "hdf5", {"test": Split(*clustered)}, attrs=attrs)
    result = evaluate(data, nmi=False)
    assert result["settings"]["recall_at"] == list(expected)
    assert list(result["distances"]["l2"]["recall"]) == [str(k) for k in expected]
    assert evaluate(data, nmi=False, recall_at=(1, 3))["settings"]["recall_at"] == [1, 3]


def test_queries_and_gallery_without_a_common_label_are_an_error_not_a_score():
    X = np.eye(4)
    for mine, theirs in [
        ([1, 1, 2, 2], [3, 3, 4, 4]),
        (["a", "a", "b", "b"], ["c", "c", "d", "d"]),
    ]:
        with pytest.raises(DmlError, match="no label in common"):
            evaluate(X, mine, X, theirs, nmi=False)


def test_labels_that_numpy_would_merge_stay_apart_or_are_refused():
    X = np.eye(4)
    for labels in ([1, 1, "1", "1"], np.array([1, 1, "1", "1"], object), (True, True, "1", "1")):
        with pytest.raises(DmlError, match="all integers or all strings"):
            evaluate(X, labels, nmi=False)
    for labels in (["a", "a", "a\0", "a\0"], np.array(["a", "a", "a\0", "a\0"], object)):
        with pytest.raises(DmlError, match="zero character"):
            evaluate(X, labels, nmi=False)
    assert evaluate(X, ["0", "0", "-0", "-0"], nmi=False)["classes"] == 2
    assert evaluate(X, [2**64, 2**64, 2**64 + 1, 2**64 + 1], nmi=False)["classes"] == 2


def test_text_that_writes_integers_matches_integers():
    X = np.random.default_rng(0).standard_normal((8, 3))
    numbers = np.array([1, 1, 2, 10])
    expected = evaluate(X[:4], numbers, X[4:], numbers, nmi=False)
    mixed = evaluate(X[:4], numbers.astype(str), X[4:], numbers, nmi=False)
    assert mixed == expected
    with pytest.raises(DmlError, match="'01' and 1"):
        evaluate(X[:4], ["01", "1", "2", "10"], X[4:], numbers, nmi=False)


def test_matrices_and_masked_arrays_are_converted_or_refused(clustered):
    X, labels = clustered
    expected = evaluate(X, labels, nmi=False)
    assert evaluate(X.view(np.matrix), labels, nmi=False) == expected
    assert evaluate(np.ma.array(X), np.ma.array(labels), nmi=False) == expected
    hole = np.zeros(X.shape, bool)
    hole[3, 1] = True
    with pytest.raises(DmlError, match="1 values of the embeddings are masked"):
        evaluate(np.ma.array(X, mask=hole), labels, nmi=False)
    with pytest.raises(DmlError, match="1 values of the labels"):
        evaluate(X, np.ma.array(labels, mask=hole[:, 1]), nmi=False)


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
