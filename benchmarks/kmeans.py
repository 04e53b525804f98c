"""python -m benchmarks.kmeans [agreement demo=FOLDER omniglot=FILE] [starts] [speed] [whole]

Whether NMI agrees with scikit-learn's KMeans(n_init=10), what the start gives at thousands of
clusters, how long k-means takes beside faiss.Kmeans from the same start, and how long NMI and AMI
of three seeds take; into RESULTS.md. FOLDER of demo is one that `dmltool demo` has filled; FILE of
omniglot holds embeddings of characters that its network has not seen. Without them these rows are
left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from math import comb
from pathlib import Path

import numpy as np

from benchmarks.measure import alternate, clustered, machine, record, table
from retrieval.clustering import cluster_scores, estimated_seconds, restarts
from retrieval.distances import single_precision
from retrieval.evaluation import Settings
from retrieval.kmeans import ITERATIONS, lloyd, seeding
from retrieval.kmeans.lloyd import short_forms
from retrieval.kmeans.pairs import all_pairs, initial, iterate
from retrieval.metrics import cluster_metrics, nmi
from retrieval.resources import processors, single_blas_thread

PACKAGES = ("numpy", "numba", "faiss-cpu", "scikit-learn")
POOLS = (300, 1000)  # single starts of scikit-learn and dmltool: standard errors of 0.1 to 0.2
GOAL = 0.5  # points of NMI


def embeddings(
    N: int, D: int, C: int, noise: float, rank: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors in classes that differ in `rank` directions, as if a network had learned.

    Rank 0: in all of them, the i-th with a variance of 1 / i.
    """
    if not rank:
        X, labels = clustered(N, D, C, noise)
        X /= np.sqrt(np.arange(1, D + 1, dtype=np.float32))
        return X / np.linalg.norm(X, axis=1, keepdims=True), labels
    low, labels = clustered(N, rank, C, noise)
    basis = np.random.default_rng(1).standard_normal((rank, D), dtype=np.float32)
    X = low @ basis
    return X / np.linalg.norm(X, axis=1, keepdims=True), labels


def sets(folders: dict[str, Path]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, vectors and labels of what agreement is measured on."""
    from retrieval.loading.load import load

    files = {}
    if "demo" in folders:
        files = {
            f"demo, {n}": folders["demo"] / n / "embeddings.h5" for n in ("ce", "spce", "group")
        }
    if "omniglot" in folders:
        files["Omniglot"] = folders["omniglot"]
    for name, file in files.items():
        split = load(file).splits["test"]
        yield name, np.asarray(split.vectors), np.unique(split.labels, return_inverse=True)[1]
    for noise in (2.1, 2.6):
        yield f"noisy clusters, noise {noise}", *clustered(5880, 64, 98, noise)


def agreement(folders: dict[str, Path]) -> None:
    """NMI by cos, of single starts and of the best of ten, beside scikit-learn's."""
    rows = []
    for name, vectors, labels in sets(folders):
        k, points = len(np.unique(labels)), single_precision(vectors, "cos")[0]
        pools = [
            starts_of_sklearn(points, labels, k, POOLS[0]),
            starts_of_dmltool(points, labels, k, POOLS[1]),
        ]
        single = [f"{100 * pool[:, 1].mean():.2f}" for pool in pools]
        best = [100 * best_of_ten(pool) for pool in pools]
        error = np.hypot(*(100 * standard_error(pool) for pool in pools))
        found = [*single, *(f"{value:.2f}" for value in best)]
        rows.append(
            [name, f"{len(points):,}", k, *found, f"{best[1] - best[0]:+.2f} ± {error:.2f}"]
        )
        print(rows[-1], flush=True)
    header = ["set", "items", "k", "one start, scikit-learn", "one start, dmltool"]
    header += ["best of ten, scikit-learn", "best of ten, dmltool", "difference ± standard error"]
    record(
        "NMI beside scikit-learn",
        f"{machine(*PACKAGES)}. cos, in points. Goal: dmltool's mean within {GOAL} of "
        f"`KMeans(n_init=10)`. {POOLS[0]} single starts of scikit-learn were run with its "
        f"tolerance, {POOLS[1]} of dmltool until nothing changes. The best of ten by the objective "
        "is the mean over all draws of ten of them; its standard error comes from a bootstrap of "
        "the starts.\n\n" + table(header, rows),
    )


def starts_of_sklearn(points: np.ndarray, labels: np.ndarray, k: int, count: int) -> np.ndarray:
    """Objective and NMI of single starts of scikit-learn, (count, 2)."""
    from sklearn.cluster import KMeans as Theirs

    runs = (Theirs(k, n_init=1, random_state=seed).fit(points) for seed in range(count))
    return np.array([(run.inertia_, nmi(labels, run.labels_)) for run in runs])


def silent(*_: object) -> None:
    """Hear of progress and show none."""


def starts_of_dmltool(points: np.ndarray, labels: np.ndarray, k: int, count: int) -> np.ndarray:
    """Objective and NMI of single starts of dmltool, as it runs ten of them, (count, 2)."""
    found = []
    with single_blas_thread():
        pairs = all_pairs(points, processors())
        for seed in range(count):
            run = initial(pairs, k, int(seeding.trials(0, k)), seed, silent)
            iterate(run, ITERATIONS, silent)
            found.append((run.objective, nmi(labels, run.label)))
    return np.array(found)


def best_of_ten(starts: np.ndarray) -> float:
    """The mean NMI of the start with the least objective over all draws of ten starts."""
    count = len(starts)
    least = [comb(count - 1 - place, 9) / comb(count, 10) for place in range(count)]
    return float(starts[np.argsort(starts[:, 0], kind="stable"), 1] @ least)


def standard_error(starts: np.ndarray, draws: int = 1000) -> float:
    """The standard error of `best_of_ten` by a bootstrap of the starts."""
    rows = np.random.default_rng(0).integers(len(starts), size=(draws, len(starts)))
    return float(np.std([best_of_ten(starts[drawn]) for drawn in rows]))


def starts(_: dict[str, Path]) -> None:
    """One start at thousands of clusters beside plain greedy k-means++ and ten starts."""
    from sklearn.cluster import kmeans_plusplus

    rows = []
    for noise in (0.7, 1.4):
        X, labels = embeddings(10_000, 128, 2000, noise, rank=32)
        points = single_precision(X, "cos")[0]
        for name in (
            "plain greedy k-means++ (scikit-learn)",
            "dmltool, one start",
            "random points",
        ):
            found, seconds = [], []
            for seed in range(3):
                began = time.process_time()
                with single_blas_thread():
                    if name.startswith("plain"):
                        chosen = kmeans_plusplus(points, 2000, random_state=seed)[0]
                        state = lloyd.from_centroids(points, chosen, processors())
                    else:
                        kind = "random" if name.startswith("random") else "k-means++"
                        state = seeding.initial(
                            points, 2000, kind, seed, processors(), lambda _: None
                        )
                    seconds.append(time.process_time() - began)
                    lloyd.iterate(state, 300, lambda: None)
                found.append((state.objective, nmi(labels, state.label)))
            objective, score = np.mean(found, axis=0)
            rows.append(
                [noise, name, f"{np.median(seconds):.2f}", f"{objective:.0f}", f"{100 * score:.2f}"]
            )
            print(rows[-1], flush=True)
    record(
        "Starts of k-means at 2,000 clusters",
        f"{machine(*PACKAGES)}. 10,000 x 128 in 2,000 classes, mean over 3 seeds; seconds are "
        "processor time of the start.\n\n"
        + table(["noise", "start", "seconds", "objective", "NMI"], rows),
    )


def speed(_: dict[str, Path]) -> None:
    """The same iterations from the same centroids by FAISS and by dmltool."""
    rows = []
    for title, N, C, noise, rank, repeats in (
        ("CUB shape, k = 100", 5924, 100, 2.0, 64, 5),
        ("SOP shape, k = 11,316, 64 directions", 60_502, 11_316, 1.0, 64, 1),
        ("SOP shape, k = 11,316, all directions", 60_502, 11_316, 1.0, 0, 1),
    ):
        X, labels = embeddings(N, 512, C, noise, rank)
        rows += compared(title, single_precision(X, "cos")[0], labels, C, repeats)
    header = ["shape", "", "iterations", "seconds", "relative to dmltool"]
    record(
        "k-means beside faiss.Kmeans",
        f"{machine(*PACKAGES)}. The same greedy k-means++ centroids and the same "
        "number of iterations, all points, 512 dimensions; FAISS's time has the last assignment. "
        "Goal: SOP's shape at least 4 times faster, CUB's not slower; objectives within 1e-5.\n\n"
        + table([*header, "objective", "items in other clusters than FAISS's", "NMI"], rows),
    )


def compared(title: str, X: np.ndarray, labels: np.ndarray, k: int, repeats: int) -> list[list]:
    """The rows of one shape: start, our iterations, FAISS's iterations."""
    import faiss

    threads = processors()
    with single_blas_thread():
        lloyd.iterate(seeding.initial(X[:500], 20, "k-means++", 0, threads, lambda _: None), 9, int)
        began = time.perf_counter()
        short = short_forms(X)
        start = seeding.initial(X, k, "k-means++", 0, threads, lambda _: None, short=short)
        seconds = time.perf_counter() - began
        centroids = start.centroids.copy()
        most = lloyd.iterate(start, 300, lambda: None)

    def ours() -> tuple[np.ndarray, float]:
        with single_blas_thread():
            found = lloyd.from_centroids(X, centroids, threads, short_forms(X))
            lloyd.iterate(found, most, lambda: None)
        return found.label, found.objective

    def theirs() -> tuple[np.ndarray, float]:
        run = faiss.Kmeans(
            X.shape[1], k, niter=most, max_points_per_centroid=len(X), min_points_per_centroid=1
        )
        run.train(X, init_centroids=centroids)
        squared, label = run.assign(X)
        return label, float(squared.sum(dtype=np.float64))

    done = alternate({"dmltool": ours, "faiss.Kmeans": theirs}, repeats)
    rows: list[list] = [[title, "dmltool, start", "", f"{seconds:.2f}", "", "", "", ""]]
    expected = done["faiss.Kmeans"]["result"][0]
    for name, r in done.items():
        label, objective = r["result"]
        rows.append(
            [
                title,
                name,
                most,
                f"{r['seconds']:.2f}",
                f"{r['seconds'] / done['dmltool']['seconds']:.2f}",
                f"{objective:.3f}",
                int((label != expected).sum()),
                f"{100 * nmi(labels, label):.2f}",
            ]
        )
        print(rows[-1], flush=True)
    return rows


def whole(_: dict[str, Path]) -> None:
    """NMI and AMI of three seeds, one distance: a single random start, ten starts, scikit-learn."""
    from sklearn.cluster import KMeans as Theirs

    rows: list[list] = []
    shapes = [("CUB", 5924, 100, noise, 3) for noise in (1.0, 2.0)]
    for name, N, k, noise, repeats in [*shapes, ("SOP", 60_502, 11_316, 1.0, 1)]:
        X, labels = embeddings(N, 512, k, noise, 64 if name == "CUB" else 0)
        points = single_precision(X, "cos")[0]
        cluster_scores(X[:900], labels[:900] % 9, "cos", Settings(seeds=1))  # compiles

        def ours(X=X, labels=labels) -> float:
            return cluster_scores(X, labels, "cos", Settings())["nmi"]["mean"]

        def before(points=points, labels=labels, k=k) -> float:
            return np.mean([_scored(labels, _faiss_random(points, k, s)) for s in range(3)])

        def theirs(points=points, labels=labels, k=k) -> float:
            runs = (Theirs(k, n_init=10, random_state=s).fit(points).labels_ for s in range(3))
            return np.mean([_scored(labels, run) for run in runs])

        contenders = {"dmltool": ours, "FAISS, one random start, 20 iterations": before}
        if name == "CUB":
            contenders["scikit-learn, KMeans(n_init=10)"] = theirs
        done = alternate(contenders, repeats)
        estimate = estimated_seconds(N, 512, k, 3 * restarts(Settings(), k))
        for who, r in done.items():
            ratio = r["seconds"] / done["dmltool"]["seconds"]
            guess = f"{estimate:.1f}" if who == "dmltool" else ""
            found = [f"{r['seconds']:.2f}", f"{ratio:.2f}", guess, f"{100 * r['result']:.2f}"]
            rows.append([f"{name}, k = {k:,}, noise {noise}", who, *found])
            print(rows[-1], flush=True)
    record(
        "NMI and AMI of three seeds",
        f"{machine(*PACKAGES)}. Unit rows of 512 dimensions, one distance. FAISS with one random "
        "start is how dmltool clustered before. Goal: SOP's shape at most 120 s, CUB's not slower "
        "than before.\n\n"
        + table(["shape", "", "seconds", "relative to dmltool", "estimate", "NMI"], rows),
    )


def _faiss_random(points: np.ndarray, k: int, seed: int) -> np.ndarray:
    import faiss

    every = {"max_points_per_centroid": len(points), "min_points_per_centroid": 1}
    run = faiss.Kmeans(points.shape[1], k, niter=20, seed=seed, **every)
    run.train(points)
    return run.assign(points)[1]


def _scored(labels: np.ndarray, found: np.ndarray) -> float:
    """NMI; AMI is computed too, because dmltool computes both."""
    return {metric.name: metric.function(labels, found) for metric in cluster_metrics()}["nmi"]


SECTIONS = {"agreement": agreement, "starts": starts, "speed": speed, "whole": whole}

if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if "=" not in word]
    folders = {n: Path(f) for n, _, f in (w.partition("=") for w in sys.argv[1:] if "=" in w)}
    for section in given or SECTIONS:
        if section not in SECTIONS:
            sys.exit(f"no section {section}: {', '.join(SECTIONS)}")
        SECTIONS[section](folders)
