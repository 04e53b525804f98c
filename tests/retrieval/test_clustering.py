"""k-means against scikit-learn and FAISS, and cases with one answer."""

import sys

import faiss
import numpy as np
import pytest
from sklearn.cluster import KMeans as SklearnKMeans
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from retrieval import DmlError, clustering, evaluate
from retrieval.evaluation import Settings
from retrieval.kmeans import seeding


def blobs(seed: int = 0, N: int = 600, D: int = 8, C: int = 12, noise: float = 0.3):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(N) % C)
    x = rng.normal(size=(C, D))[labels] + noise * rng.normal(size=(N, D))
    return x.astype(np.float32), labels


def kmeans(x: np.ndarray, k: int, seed: int, distance="l2", progress=None, **settings):
    return clustering.kmeans(x, k, distance, [seed], Settings(**settings), progress)[0]


def scores_of(x: np.ndarray, labels: np.ndarray, distance: str, progress=None, **settings):
    return clustering.cluster_scores(x, labels, distance, Settings(**settings), progress)


def squares(x: np.ndarray, assignment: np.ndarray) -> float:
    """Sum of squared distances to the mean of each cluster, in float64."""
    x = x.astype(np.float64)
    groups = [x[assignment == c] for c in np.unique(assignment)]
    return sum(((group - group.mean(axis=0)) ** 2).sum() for group in groups)


@pytest.mark.parametrize("longer", [1, 3])  # than the unit vectors of the gallery
def test_queries_are_clustered_together_with_the_gallery(clustered, longer):
    X, labels = clustered
    X = X / np.linalg.norm(X, axis=1, keepdims=True)
    X[:20] *= longer
    joined = evaluate(X, labels, seeds=1)["distances"]
    apart = evaluate(X[:20], labels[:20], X[20:], labels[20:], seeds=1)["distances"]
    for d in ("l2", "cos"):
        assert apart[d]["nmi"] == joined[d]["nmi"]
    assert (joined["l2"]["nmi"] == joined["cos"]["nmi"]) == (longer == 1)


def test_means_over_seeds_are_those_of_scikit_learn():
    x, labels = blobs(C=30, N=900, noise=0.7)
    theirs = [
        normalized_mutual_info_score(
            labels, SklearnKMeans(30, n_init=10, random_state=s).fit(x).labels_
        )
        for s in range(4)
    ]
    ours = scores_of(x, labels, "l2", seeds=4)
    assert ours["nmi"]["mean"] == pytest.approx(np.mean(theirs), abs=0.01)
    assert len(ours["kmeans_iterations"]) == 4
    assert all(1 <= n < 300 for n in ours["kmeans_iterations"])


@pytest.mark.parametrize("init", ["random", "k-means++"])
def test_single_starts_end_on_average_where_those_of_scikit_learn_end(init):
    x, _ = blobs(C=30, N=900, noise=0.5)
    settings = {"kmeans_init": init, "kmeans_restarts": 1}
    theirs = [SklearnKMeans(30, init=init, n_init=1, random_state=s).fit(x) for s in range(50)]
    expected = np.array([fit.inertia_ for fit in theirs])
    ours = np.array([kmeans(x, 30, seed=s, **settings).objective for s in range(50)])
    error = np.sqrt((expected.var(ddof=1) + ours.var(ddof=1)) / 50)
    assert abs(ours.mean() - expected.mean()) < 3 * error
    assert error < 0.01 * expected.mean()  # random and k-means++ differ by more than three of these


@pytest.mark.parametrize("most", [4, 300])
def test_the_best_of_ten_starts_is_the_best_of_ten_single_ones(most):
    x, _ = blobs(3, C=30, N=900, noise=1.0)
    for seed in range(3):
        ten = {"kmeans_iterations": most}
        single = ten | {"kmeans_restarts": 1}
        runs = [kmeans(x, 30, seed=clustering._derived(seed, n), **single) for n in range(10)]
        best = min(runs, key=lambda run: run.objective)
        found = kmeans(x, 30, seed=seed, **ten)
        assert np.array_equal(found.assignment, best.assignment)
        assert found.objective == pytest.approx(best.objective, rel=1e-5)
        assert found.iterations == best.iterations


def test_ten_restarts_up_to_a_thousand_clusters():
    assert [clustering.restarts(Settings(), k) for k in (1, 1000, 1001)] == [10, 10, 1]
    assert clustering.restarts(Settings(kmeans_restarts=3), 5000) == 3


def test_the_path_of_a_gpu_gives_the_clusters_of_the_processor():
    x, _ = blobs(12, noise=0.5)
    expected = kmeans(x, 12, seed=0, kmeans_restarts=1)
    points = x - x.mean(axis=0)
    start = seeding.initial(points, 12, "k-means++", 0, 1, lambda _: None)
    found = clustering._on_gpu(faiss, points, start.centroids, 300, lambda: None)
    assert normalized_mutual_info_score(found.assignment, expected.assignment) == pytest.approx(1)
    assert found.objective == pytest.approx(expected.objective, rel=1e-4)


def test_all_points_are_used():
    # FAISS alone would take 256 points per centroid: here one in 40, and miss the far ones' pull.
    x = np.zeros((20_000, 1), np.float32)
    x[::2] = 1.0
    x[7] = 5000.0
    objective = kmeans(x, 1, seed=0).objective
    assert objective == pytest.approx(squares(x, np.zeros(len(x))), rel=1e-5)


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_objective_is_that_of_the_assignment_and_restarts_never_raise_it(distance):
    x, _ = blobs(1)
    rows = x / np.linalg.norm(x, axis=1, keepdims=True) if distance == "cos" else x
    previous = np.inf
    for restarts in (1, 4, 8):
        found = kmeans(x, 12, seed=0, kmeans_restarts=restarts, distance=distance)
        # Converged: centroids are the means of their clusters.
        assert found.objective == pytest.approx(squares(rows, found.assignment), rel=1e-4)
        assert found.objective <= previous
        previous = found.objective


def test_separate_blobs_are_found():
    x, labels = blobs(2, noise=0.001, C=4)
    scores = scores_of(x, labels, "l2", seeds=2)
    assert scores["nmi"]["values"] == pytest.approx([1, 1])
    assert scores["ami"]["values"] == pytest.approx([1, 1])


def test_scores_are_those_of_scikit_learn_on_each_assignment():
    x, labels = blobs(3, noise=1.5)
    scores = scores_of(x, labels, "cos", kmeans_restarts=1)
    both = zip(scores["nmi"]["values"], scores["ami"]["values"], strict=True)
    for seed, (nmi, ami) in enumerate(both):
        found = kmeans(x, 12, seed=seed, distance="cos", kmeans_restarts=1).assignment
        assert nmi == normalized_mutual_info_score(labels, found)
        assert ami == pytest.approx(adjusted_mutual_info_score(labels, found), abs=1e-12)
    assert len(set(scores["nmi"]["values"])) > 1


def test_the_seed_decides_everything():
    x, _ = blobs(4, noise=1.5)
    first, again, other = (
        kmeans(x, 12, seed=seed, kmeans_restarts=2).assignment for seed in (8, 8, 9)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_cos_ignores_the_lengths_of_rows():
    x, _ = blobs(5)
    stretched = x * 2.0 ** np.random.default_rng(0).integers(-9, 9, (len(x), 1))
    plain, same, other = (
        kmeans(rows, 12, seed=0, distance=d).assignment
        for rows, d in ((x, "cos"), (stretched, "cos"), (stretched, "l2"))
    )
    assert np.array_equal(plain, same)
    assert not np.array_equal(plain, other)


@pytest.mark.parametrize("size", [1e-18, 1e18])
def test_size_and_place_of_the_rows_do_not_matter_to_l2(size):
    x, labels = blobs(6, noise=0.01, C=4)
    moved = (x.astype(np.float64) + 1e4) * size
    found = kmeans(moved, 4, seed=1)
    assert normalized_mutual_info_score(labels, found.assignment) == pytest.approx(1)
    assert found.objective / size**2 == pytest.approx(squares(x, labels), rel=1e-3)


@pytest.mark.parametrize("k", [1, 2, 5, 59])
def test_more_clusters_than_distinct_points(k, capfd):
    x = np.repeat(np.array([[0.0, 1.0], [3.0, 0.0]], np.float32), 30, axis=0)
    found = kmeans(x, k, seed=0)
    assert len(np.unique(found.assignment)) == min(k, 2)  # identical rows stay together
    assert found.objective == pytest.approx(0 if k > 1 else 150, abs=1e-5)
    assert capfd.readouterr() == ("", "")


def test_as_many_clusters_as_points(capfd):
    x, _ = blobs(7, N=40)
    found = kmeans(x, 40, seed=0)
    assert sorted(found.assignment) == list(range(40))
    assert found.objective == pytest.approx(0, abs=1e-5)
    scores = scores_of(x, np.arange(40), "cos", seeds=1)
    assert scores["nmi"]["values"] == pytest.approx([1])
    assert capfd.readouterr() == ("", "")


def test_one_cluster_holds_all():
    x, _ = blobs(8)
    found = kmeans(x, 1, seed=0)
    assert not found.assignment.any()
    assert found.objective == pytest.approx(squares(x, found.assignment), rel=1e-5)


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_all_equal_and_zero_rows(distance, capfd):
    for value in (0.0, 2.5):
        found = kmeans(np.full((50, 3), value, np.float32), 4, seed=0, distance=distance)
        assert found.assignment.shape == (50,)
        assert found.objective == pytest.approx(0, abs=1e-9)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["float16", "float64", "int8"])
def test_memory_maps_of_other_types_give_what_float32_gives(tmp_path, kind):
    x = np.rint(blobs(9)[0] * 10).astype(kind)
    np.save(tmp_path / "x.npy", x)
    expected = kmeans(x.astype(np.float32), 12, seed=0)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    found = kmeans(mapped, 12, seed=0)
    assert np.array_equal(found.assignment, expected.assignment)
    assert found.objective == expected.objective


def test_progress_reaches_its_total_over_all_restarts_and_can_interrupt():
    x, labels = blobs(10, noise=2.0)
    for work in (
        lambda told: kmeans(x, 12, seed=0, kmeans_restarts=2, progress=told),
        lambda told: scores_of(x, labels, "l2", progress=told),
    ):
        seen = []
        work(lambda *step, seen=seen: seen.append(step))
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] == seen[0][1]
        assert len(seen) > 20

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kmeans(x, 12, seed=0, progress=stop)


def test_progress_moves_while_iterations_are_computed():
    x, _ = blobs(N=900, noise=1.5)
    told: list[tuple[int, int]] = []
    kmeans(x, 60, seed=0, kmeans_restarts=1, progress=lambda *count: told.append(count))
    between = {done for done, total in told if 60 < done < total}
    assert len(between) > 1, told


def test_k_means_of_sop_is_waited_for_if_one_clustering_serves_both_distances():
    seconds, sop = clustering.estimated_seconds, (60_502, 512, 11_316)
    assert seconds(*sop, runs=3) < clustering.LONG < seconds(*sop, runs=6)
    assert seconds(8_131, 2048, 98, runs=60) < clustering.LONG


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


@pytest.mark.parametrize("distance", ["l2", "cos"])
def test_identical_rows_share_a_cluster_where_there_are_fewer_than_classes(distance, rng):
    labels = np.repeat(np.arange(100), 4)
    equal = evaluate(np.ones((400, 8), np.float32), labels, nmi=True)["distances"][distance]
    assert equal["nmi"]["mean"] == equal["ami"]["mean"] == 0
    X = rng.standard_normal((10, 8)).astype(np.float32)[rng.integers(0, 10, 400)]
    found = evaluate(X, labels, nmi=True)["distances"][distance]["nmi"]["mean"]
    own = np.unique(X, axis=0, return_inverse=True)[1]
    assert found == pytest.approx(normalized_mutual_info_score(labels, own))
