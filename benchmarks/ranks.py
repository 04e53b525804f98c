"""python -m benchmarks.ranks [--small] [SECTION ...]: ranks against other tools, into RESULTS.md.

Sections: cub, inshop, sop, falling, few, extreme. All of them by default, in about a quarter of an
hour on two cores. NAME=FILE is a section too: the shape of Stanford Online Products with the
spectrum of an embedding file. `--small` tries them on a few rows and prints what it would record.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_info

from benchmarks.measure import alternate, clustered, machine, record, table

PACKAGES = ("numpy", "numba", "faiss-cpu", "scikit-learn", "pytorch-metric-learning", "torch")
BOTH = ("l2", "cos")
OURS, FAISS = "dmltool", "FAISS IndexFlat, two searches"
BARE = "the float32 product alone, half of it for leave-one-out"
SMALL = "--small" in sys.argv


def unit(X: np.ndarray) -> np.ndarray:
    return X / np.linalg.norm(X, axis=1, keepdims=True)


def hits(ids: np.ndarray, labels, gallery_labels, ks, own=None) -> dict[int, float]:
    """Recall@K from neighbour lists; the query itself, if listed, is left out."""
    right = gallery_labels[ids] == labels[:, None]
    if own is not None:
        mine = ids == own[:, None]
        mine[~mine.any(axis=1), -1] = True  # an identical row took its place: drop the last
        right = right[~mine].reshape(len(ids), -1)
    return {k: float(right[:, :k].any(axis=1).mean()) for k in ks}


def faiss_lists(G, gl, ks, Q=None, ql=None):
    import faiss

    own = None if Q is not None else np.arange(len(G))
    Q, ql = (G, gl) if Q is None else (Q, ql)
    out = {}
    for d in BOTH:
        index = faiss.IndexFlatL2(G.shape[1]) if d == "l2" else faiss.IndexFlatIP(G.shape[1])
        index.add(G if d == "l2" else unit(G))
        k = min(max(ks) + (own is not None), len(G))
        out[d] = hits(index.search(Q if d == "l2" else unit(Q), k)[1], ql, gl, ks, own)
    return out


def sklearn_lists(G, gl, ks, Q=None, ql=None):
    from sklearn.neighbors import NearestNeighbors

    own = None if Q is not None else np.arange(len(G))
    Q, ql = (G, gl) if Q is None else (Q, ql)
    out = {}
    for d in BOTH:
        g, q = (G, Q) if d == "l2" else (unit(G), unit(Q))
        k = min(max(ks) + (own is not None), len(G))
        finder = NearestNeighbors(n_neighbors=k, algorithm="brute", n_jobs=-1).fit(g)
        out[d] = hits(finder.kneighbors(q, return_distance=False), ql, gl, ks, own)
    return out


def pml(G, gl, ks, Q=None, ql=None):
    """Precision@1 is all of Recall@K that it offers."""
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    calculator = AccuracyCalculator(include=("precision_at_1",), k=1, device=torch.device("cpu"))
    out = {}
    for d in BOTH:
        g, q = (G, Q) if d == "l2" else (unit(G), None if Q is None else unit(Q))
        args = (g, gl) if Q is None else (q, ql, g, gl)
        out[d] = {1: calculator.get_accuracy(*args)["precision_at_1"]}
    return out


def pml_map(X, labels):
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    names = ("mean_average_precision_at_r", "r_precision")
    calculator = AccuracyCalculator(include=names, k="max_bin_count", device=torch.device("cpu"))
    return [calculator.get_accuracy(x, labels) for x in (X, unit(X))]


def ours(G, gl, ks, Q=None, ql=None, **options):
    from retrieval.problem import from_arrays
    from retrieval.ranking.ranks import count_ranks

    given = (G, gl) if Q is None else (Q, ql, G, gl)
    ranks = count_ranks(from_arrays(*given), **options)
    return {
        d: {k: float(((r.rank > 0) & (r.rank <= k)).mean()) for k in ks} for d, r in ranks.items()
    }


def product(G, Q=None, block=1024):
    """The bare float32 product that ranks need, in tiles; half of it for leave-one-out."""
    from retrieval.resources import processors, run_all, single_blas_thread, slices

    def column(part: slice) -> None:
        for other in slices(len(G if Q is None else Q), block):
            if Q is not None or other.start <= part.start:
                np.matmul((G if Q is None else Q)[other], G[part].T)

    with single_blas_thread():
        run_all(column, list(slices(len(G), block))[::-1], processors())


def rows_of(count: int) -> int:
    """The rows of a shape, a twentieth of them for a trial."""
    return count // 20 if SMALL else count


def tell(title: str, text: str) -> None:
    """Record a section; a trial prints it."""
    if SMALL:
        print(f"## {title}\n\n{text}\n", flush=True)
    else:
        record(title, text)


def blas() -> str:
    """The libraries that multiply."""
    found = [one for one in threadpool_info() if one["user_api"] == "blas"]
    names = (
        f"{one['internal_api']} {one['version']} for {one.get('architecture')}" for one in found
    )
    return ", ".join(sorted(set(names)))


def versus(title, ks, goal, data, repeats, libraries=True, about=""):
    """Recall@K with both distances: all contenders on one data set, which `about` describes."""
    G, gl, *rest = data
    print(title, flush=True)
    ours(G[:500], gl[:500], (1,), positions=True, sort=False)  # compile
    if libraries:
        pml(G[:500], gl[:500], (1,))  # import
    contenders: dict[str, Callable[[], object]] = {
        OURS: lambda: ours(G, gl, ks, *rest),
        "dmltool, cos only": lambda: ours(G, gl, ks, *rest, distances=("cos",)),
        "dmltool, l2 only": lambda: ours(G, gl, ks, *rest, distances=("l2",)),
        "dmltool with MAP@R and R-precision": lambda: ours(G, gl, ks, *rest, positions=True),
        BARE: lambda: product(G, *rest[:1]),
        FAISS: lambda: faiss_lists(G, gl, ks, *rest),
    }
    others: dict[str, Callable[[], object]] = {
        "pytorch-metric-learning, Precision@1 only": lambda: pml(G, gl, ks, *rest),
        "scikit-learn brute force": lambda: sklearn_lists(G, gl, ks, *rest),
    }
    if not rest:
        others["pytorch-metric-learning, MAP@R and R-precision"] = lambda: pml_map(G, gl)
    done = alternate(contenders, repeats) | (alternate(others, 1) if libraries else {})
    base, bare = done[OURS], done[BARE]["seconds"]
    pairs = len(G) ** 2 / 2 if not rest else len(G) * len(rest[0])
    rows = [
        [
            name,
            f"{r['seconds']:.2f}",
            f"{r['seconds'] / base['seconds']:.2f}",
            f"{r['seconds'] / bare:.2f}",
            f"{r['memory'] / 2**20:,.0f}",
            *(recall_at_1(r["result"], d) for d in BOTH),
        ]
        for name, r in done.items()
    ]
    head = [
        "",
        "seconds",
        "relative to dmltool",
        "relative to the product",
        "memory in addition to the data, MB",
        "Recall@1 l2",
        "Recall@1 cos",
    ]
    worst = max(abs(base["result"][d][k] - done[FAISS]["result"][d][k]) for d in BOTH for k in ks)
    tell(
        title,
        f"{machine(*PACKAGES)}; {blas()}. {about}Both distances, "
        f"K = {', '.join(map(str, ks))}. dmltool, the product and FAISS run "
        f"alternately, {repeats} times, and the table shows their medians"
        f"{'; other libraries run once' * libraries}. Goal: {goal}.\n\n{table(head, rows)}\n"
        f"The product runs at {2e-9 * pairs * G.shape[1] / bare:.0f} GFLOPS (multiplications and "
        "additions, half of all pairs for leave-one-out). "
        f"The largest difference from FAISS in any Recall@K is {100 * worst:.4f} points. "
        + "pytorch-metric-learning leaves queries without positives out of the mean. "
        * libraries
        + "Memory is the peak above the value at the start of each run. dmltool runs first; memory "
        "that an earlier run has allocated and a later one uses again is not included.",
    )


def recall_at_1(result, d: str) -> str:
    return f"{100 * result[d][1]:.3f}" if isinstance(result, dict) and d in result else ""


def cub():
    versus(
        "CUB shape: 5,924 x 2048",
        (1, 2, 4, 8, 16, 32),
        "4 times the speed of FAISS, at most 1.35 times the product; MAP@R adds at most 25 %",
        clustered(rows_of(5924), 2048, 100, 5.0),
        5,
    )


def inshop():
    Q, G = rows_of(14218), rows_of(12612)
    X, labels = clustered(Q + G, 512, rows_of(3985), 2.6)
    versus(
        "In-Shop shape: 14,218 queries x 12,612 gallery x 512",
        (1, 10, 20, 30, 40, 50),
        "2.5 times the speed of FAISS, at most 1.35 times the product; MAP@R adds at most 25 %",
        (X[Q:], labels[Q:], X[:Q], labels[:Q]),
        5,
    )


def sop():
    versus(
        "SOP shape: 60,502 x 512",
        (1, 10, 100, 1000),
        "5 times the speed of FAISS, at most 1.35 times the product, under 1 GB; MAP@R adds at "
        "most 25 %",
        clustered(rows_of(60502), 512, rows_of(11316), 2.6),
        2,
        libraries=False,
    )


def falling():
    """The shape of SOP with axes of falling length, as trained embeddings have them."""
    X, labels = clustered(rows_of(60502), 512, rows_of(11316), 0.5)
    X *= np.arange(1, 513, dtype=np.float32) ** np.float32(-0.7)
    X = X @ np.linalg.qr(np.random.default_rng(3).standard_normal((512, 512)))[0]
    versus(
        "SOP shape with a falling spectrum: 60,502 x 512",
        (1, 10, 100, 1000),
        "8 times the speed of FAISS",
        (X.astype(np.float32), labels),
        2,
        libraries=False,
    )


def like(X: np.ndarray, labels: np.ndarray, N: int, D: int, C: int):
    """N vectors of C classes with the covariances of a file, in and between its classes: (N, D).

    The axes are the D along which the vectors of the file are longest, rotated at random.
    """
    rng = np.random.default_rng(0)
    axes = np.linalg.svd(X.astype(np.float64), full_matrices=False)[2][:D].T  # (D', D)
    Y = X @ axes
    _, code = np.unique(labels, return_inverse=True)
    means = np.stack([Y[code == c].mean(axis=0) for c in range(code.max() + 1)])
    own = rng.permutation(np.arange(N) % C)

    def drawn(rows: np.ndarray, count: int) -> np.ndarray:
        """Normal vectors with the covariance of the rows, which may be fewer than the axes."""
        root = np.linalg.qr((rows - rows.mean(axis=0)) / np.sqrt(len(rows) - 1), mode="r")
        return rng.standard_normal((count, len(root))) @ root

    new = means.mean(axis=0) + drawn(means, C)[own] + drawn(Y - means[code], N)
    rotation = np.linalg.qr(rng.standard_normal((new.shape[1],) * 2))[0]
    return (new @ rotation).astype(np.float32), own


def spectrum(name: str, file: str):
    """The shape of SOP with the spectrum of an embedding file."""
    from retrieval import load

    split = load(file).splits.get("test")
    if split is None:
        sys.exit(f"{file} has no split `test`")
    data = like(split.vectors, split.labels, rows_of(60502), 512, rows_of(11316))
    versus(
        f"SOP shape with the spectrum of {name}: {len(data[0]):,} x {data[0].shape[1]}",
        (1, 10, 100, 1000),
        "8 times the speed of FAISS",
        data,
        2,
        libraries=False,
        about=f"Vectors drawn at random with the covariances of the embeddings of {name}, in and "
        "between classes. ",
    )


def few_classes():
    """MAP@R where a class has thousands of items."""
    rows = []
    for classes in (2, 10):
        X, labels = clustered(rows_of(10_000), 128, classes, 3.0)
        ours(X[:500], labels[:500], (1,), positions=True)  # compile
        done = alternate(
            {
                OURS: lambda X=X, labels=labels: ours(X, labels, (1,), positions=True),
                "pytorch-metric-learning": lambda X=X, labels=labels: pml_map(X, labels),
            },
            2,
        )
        base = done[OURS]["seconds"]
        rows += [
            [classes, name, f"{r['seconds']:.1f}", f"{r['seconds'] / base:.2f}"]
            for name, r in done.items()
        ]
    tell(
        "MAP@R with few classes: 10,000 x 128",
        f"{machine(*PACKAGES)}. Both distances, two runs each in turn, the mean. Goal: half the "
        "time of pytorch-metric-learning.\n\n"
        + table(["classes", "", "seconds", "relative to dmltool"], rows),
    )


def extreme():
    """One row that is far longer than the others."""
    X, labels = clustered(rows_of(20_000), 512, rows_of(4_000), 2.6)
    huge = X.copy()
    huge[17] *= np.float32(1e17)
    ours(X[:500], labels[:500], (1,))  # compile
    cases = {"all rows of similar length": X, "one row 1e17 times as long": huge}
    done = alternate(
        {
            name: lambda rows=rows: ours(rows, labels, (1,), distances=("l2",))
            for name, rows in cases.items()
        },
        5,
    )
    base = next(iter(done.values()))["seconds"]
    rows = [[name, f"{r['seconds']:.2f}", f"{r['seconds'] / base:.2f}"] for name, r in done.items()]
    tell(
        "One extreme row: 20,000 x 512, l2",
        f"{machine(*PACKAGES)}. Medians of 5 runs in turn. Goal: at most 2 times.\n\n"
        + table(["", "seconds", "relative"], rows),
    )


SECTIONS = {
    "cub": cub,
    "inshop": inshop,
    "sop": sop,
    "falling": falling,
    "few": few_classes,
    "extreme": extreme,
}

if __name__ == "__main__":
    if "OMP_NUM_THREADS" in os.environ and not SMALL:
        sys.exit("unset OMP_NUM_THREADS: FAISS shall use all processors, as dmltool does")
    for name in [name for name in sys.argv[1:] if name != "--small"] or SECTIONS:
        if "=" in name:
            spectrum(*name.split("=", 1))
        elif name in SECTIONS:
            SECTIONS[name]()
        else:
            sys.exit(f"no section {name}: {', '.join(SECTIONS)}, NAME=FILE")
