"""k-means against FAISS run whole, scikit-learn, and cases with one answer."""

import sys

import faiss
import numpy as np
import pytest
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from retrieval import clustering
from retrieval.errors import DmlError


def blobs(seed: int = 0, N: int = 600, D: int = 8, C: int = 12, noise: float = 0.3):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(N) % C)
    x = rng.normal(size=(C, D))[labels] + noise * rng.normal(size=(N, D))
    return x.astype(np.float32), labels


def squares(x: np.ndarray, assignment: np.ndarray) -> float:
    """Sum of squared distances to the mean of each cluster, in float64."""
    x = x.astype(np.float64)
    groups = [x[assignment == c] for c in np.unique(assignment)]
    return sum(((group - group.mean(axis=0)) ** 2).sum() for group in groups)


def test_equals_faiss_run_whole_with_the_same_settings():
    x, _ = blobs(noise=1.0)
    # Small integers about zero: centring and scaling are exact, so that every bit agrees.
    x = np.rint(x * 4)
    x = np.concatenate([x, -x])
    whole = faiss.Kmeans(
        8, 12, niter=20, seed=3, max_points_per_centroid=10**6, min_points_per_centroid=1
    )
    whole.train(x)
    squared, expected = whole.assign(x)
    found, objective = clustering.kmeans(x, 12, seed=3)
    assert np.array_equal(found, expected)
    assert objective == pytest.approx(squared.sum())


def test_all_points_are_used():
    # FAISS alone would take 256 points per centroid: here one in 40, and miss the far ones' pull.
    x = np.zeros((20_000, 1), np.float32)
    x[::2] = 1.0
    x[7] = 5000.0
    _, objective = clustering.kmeans(x, 1, seed=0)
    assert objective == pytest.approx(squares(x, np.zeros(len(x))), rel=1e-5)


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_objective_is_that_of_the_assignment_and_restarts_never_raise_it(distance):
    x, _ = blobs(1)
    rows = x / np.linalg.norm(x, axis=1, keepdims=True) if distance == "cos" else x
    previous = np.inf
    for restarts in (1, 4, 8):
        found, objective = clustering.kmeans(
            x, 12, seed=0, iterations=60, restarts=restarts, distance=distance
        )
        # Converged: centroids are the means of their clusters.
        assert objective == pytest.approx(squares(rows, found), rel=1e-4)
        assert objective <= previous
        previous = objective


def test_separate_blobs_are_found():
    x, labels = blobs(2, noise=0.001, C=4)
    scores = clustering.cluster_scores(x, labels, "l2", [0, 1], restarts=10)
    assert scores["nmi"] == pytest.approx([1, 1])
    assert scores["ami"] == pytest.approx([1, 1])


def test_scores_are_those_of_scikit_learn_on_each_assignment():
    x, labels = blobs(3, noise=1.5)
    scores = clustering.cluster_scores(x, labels, "cos", [5, 6, 7])
    for seed, nmi, ami in zip([5, 6, 7], scores["nmi"], scores["ami"], strict=True):
        found, _ = clustering.kmeans(x, 12, seed=seed, distance="cos")
        assert nmi == normalized_mutual_info_score(labels, found)
        assert ami == adjusted_mutual_info_score(labels, found)
    assert len(set(scores["nmi"])) > 1


def test_the_seed_decides_everything():
    x, _ = blobs(4, noise=1.5)
    first, again, other = (clustering.kmeans(x, 12, seed=seed, restarts=2)[0] for seed in (8, 8, 9))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_cos_ignores_the_lengths_of_rows():
    x, _ = blobs(5)
    stretched = x * 2.0 ** np.random.default_rng(0).integers(-9, 9, (len(x), 1))
    plain, _ = clustering.kmeans(x, 12, seed=0, distance="cos")
    assert np.array_equal(plain, clustering.kmeans(stretched, 12, seed=0, distance="cos")[0])
    assert not np.array_equal(plain, clustering.kmeans(stretched, 12, seed=0, distance="l2")[0])


@pytest.mark.parametrize("size", [1e-18, 1e18])
def test_size_and_place_of_the_rows_do_not_matter_to_l2(size):
    x, labels = blobs(6, noise=0.01, C=4)
    moved = (x.astype(np.float64) + 1e4) * size
    found, objective = clustering.kmeans(moved, 4, seed=1, restarts=10)
    assert normalized_mutual_info_score(labels, found) == pytest.approx(1)
    assert objective / size**2 == pytest.approx(squares(x, labels), rel=1e-3)


@pytest.mark.parametrize("k", [1, 2, 5, 59])
def test_more_clusters_than_distinct_points(k, capfd):
    x = np.repeat(np.array([[0.0, 1.0], [3.0, 0.0]], np.float32), 30, axis=0)
    found, objective = clustering.kmeans(x, k, seed=0)
    assert found.shape == (60,)
    assert found.min() >= 0
    assert found.max() < k
    if k >= 5:  # FAISS splits a cluster by moving its halves a thousandth apart
        assert objective == pytest.approx(0, abs=1e-3)
    assert capfd.readouterr() == ("", "")


def test_as_many_clusters_as_points(capfd):
    x, _ = blobs(7, N=40)
    found, objective = clustering.kmeans(x, 40, seed=0)
    assert sorted(found) == list(range(40))
    assert objective == pytest.approx(0, abs=1e-5)
    scores = clustering.cluster_scores(x, np.arange(40), "cos", [0])
    assert scores["nmi"] == pytest.approx([1])
    assert capfd.readouterr() == ("", "")


def test_one_cluster_holds_all():
    x, _ = blobs(8)
    found, objective = clustering.kmeans(x, 1, seed=0)
    assert not found.any()
    assert objective == pytest.approx(squares(x, found), rel=1e-5)


@pytest.mark.parametrize("distance", ["cos", "l2"])
def test_all_equal_and_zero_rows(distance, capfd):
    for value in (0.0, 2.5):
        found, objective = clustering.kmeans(
            np.full((50, 3), value, np.float32), 4, seed=0, distance=distance
        )
        assert found.shape == (50,)
        assert objective == pytest.approx(0, abs=1e-9)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["float16", "float64", "int8"])
def test_memory_maps_of_other_types_give_what_float32_gives(tmp_path, kind):
    x = np.rint(blobs(9)[0] * 10).astype(kind)
    np.save(tmp_path / "x.npy", x)
    expected = clustering.kmeans(x.astype(np.float32), 12, seed=0)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    found = clustering.kmeans(mapped, 12, seed=0)
    assert np.array_equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_progress_counts_iterations_of_all_restarts_and_can_interrupt():
    x, labels = blobs(10, noise=2.0)
    seen = []
    clustering.kmeans(x, 12, seed=0, restarts=2, progress=lambda *step: seen.append(step))
    assert seen == sorted(seen)
    assert seen[-1] == (40, 40)
    seen.clear()
    clustering.cluster_scores(x, labels, "l2", [0, 1, 2], progress=lambda *s: seen.append(s))
    assert seen[-1] == (60, 60)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        clustering.kmeans(x, 12, seed=0, progress=stop)


@pytest.mark.parametrize("k", [0, 41])
def test_impossible_numbers_of_clusters_are_explained(k):
    with pytest.raises(DmlError, match="clusters of 40"):
        clustering.kmeans(blobs(11, N=40)[0], k, seed=0)


def test_missing_faiss_names_the_extras(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(DmlError, match=r"\.\[cpu\]"):
        clustering.kmeans(np.eye(3), 2, seed=0)
