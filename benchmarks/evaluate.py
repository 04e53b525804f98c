"""python -m benchmarks.evaluate [SECTION ...]: evaluation against other tools, into RESULTS.md.

Sections: cub, inshop, sop, falling, few, million, command, hard. All of them by default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.measure import alternate, clustered, machine, record, resident, table

PACKAGES = ("numpy", "numba", "faiss-cpu", "scikit-learn", "pytorch-metric-learning", "torch")
BOTH = ("l2", "cos")
BARE = "the float32 product alone, half of it for leave-one-out"


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


def ours(G, gl, ks, Q=None, ql=None, positions=False):
    from retrieval.problem import from_arrays
    from retrieval.ranking.ranks import count_ranks

    given = (G, gl) if Q is None else (Q, ql, G, gl)
    ranks = count_ranks(from_arrays(*given), positions=positions)
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
        tasks = [(partial(column, part), 1) for part in slices(len(G), block)]
        run_all(tasks[::-1], processors())


def versus(title, ks, goal, data, repeats, libraries=True):
    """Recall@K with both distances: all contenders on one data set."""
    G, gl, *rest = data
    print(title, flush=True)
    ours(G[:500], gl[:500], (1,), positions=True)  # compile
    contenders = {
        "dmltool": lambda: ours(G, gl, ks, *rest),
        "dmltool with MAP@R and R-precision": lambda: ours(G, gl, ks, *rest or (None, None), True),
        BARE: lambda: product(G, *rest[:1]),
        "FAISS IndexFlat, two searches": lambda: faiss_lists(G, gl, ks, *rest),
    }
    others = {
        "pytorch-metric-learning, Precision@1 only": lambda: pml(G, gl, ks, *rest),
        "scikit-learn brute force": lambda: sklearn_lists(G, gl, ks, *rest),
    }
    done = alternate(contenders, repeats) | (alternate(others, 1) if libraries else {})
    base = done["dmltool"]
    rows = [
        [
            name,
            f"{r['seconds']:.2f}",
            f"{r['seconds'] / base['seconds']:.2f}",
            f"{r['memory'] / 2**20:,.0f}",
            *(f"{100 * r['result'][d][1]:.3f}" if r["result"] else "" for d in BOTH),
        ]
        for name, r in done.items()
    ]
    head = [
        "",
        "seconds",
        "relative to dmltool",
        "memory in addition to the data, MB",
        "Recall@1 l2",
        "Recall@1 cos",
    ]
    worst = max(
        abs(base["result"][d][k] - done["FAISS IndexFlat, two searches"]["result"][d][k])
        for d in BOTH
        for k in ks
    )
    record(
        title,
        f"{machine(*PACKAGES)}. Both distances, K = {', '.join(map(str, ks))}. dmltool, the "
        f"product and FAISS run alternately, {repeats} times, and the table shows their medians; "
        f"other libraries run once. Goal: {goal}.\n\n{table(head, rows)}\n"
        f"The largest difference from FAISS in any Recall@K is {100 * worst:.4f} points. "
        "pytorch-metric-learning leaves queries without positives out of the mean. Memory is the "
        "peak above the value at the start of each run. dmltool runs first; memory that an earlier "
        "run has allocated and a later one uses again is not included.",
    )


def cub():
    data = clustered(5924, 2048, 100, 5.0)
    versus(
        "CUB shape: 5,924 x 2048",
        (1, 2, 4, 8, 16, 32),
        "4 times the speed of FAISS, at most 1.35 times the product",
        data,
        5,
    )


def inshop():
    X, labels = clustered(14218 + 12612, 512, 3985, 2.6)
    data = X[14218:], labels[14218:], X[:14218], labels[:14218]
    versus(
        "In-Shop shape: 14,218 queries x 12,612 gallery x 512",
        (1, 10, 20, 30, 40, 50),
        "2.5 times the speed of FAISS, at most 1.35 times the product",
        data,
        5,
    )


def sop():
    data = clustered(60502, 512, 11316, 2.6)
    versus(
        "SOP shape: 60,502 x 512",
        (1, 10, 100, 1000),
        "5 times the speed of FAISS, at most 1.35 times the product, under 1 GB",
        data,
        3,
    )


def falling():
    """The shape of SOP with axes of falling length, as trained embeddings have them."""
    X, labels = clustered(60502, 512, 11316, 0.5)
    X *= np.arange(1, 513, dtype=np.float32) ** np.float32(-0.7)
    X = X @ np.linalg.qr(np.random.default_rng(3).standard_normal((512, 512)))[0]
    versus(
        "SOP shape with a falling spectrum: 60,502 x 512",
        (1, 10, 100, 1000),
        "8 times the speed of FAISS",
        (X.astype(np.float32), labels),
        1,
        libraries=False,
    )


def few_classes():
    """MAP@R where a class has thousands of items."""
    rows = []
    for classes in (2, 10):
        X, labels = clustered(10_000, 128, classes, 3.0)
        ours(X[:500], labels[:500], (1,), positions=True)  # compile
        contenders = {
            "dmltool": lambda X=X, labels=labels: ours(X, labels, (1,), positions=True),
            "pytorch-metric-learning": lambda X=X, labels=labels: pml_map(X, labels),
        }
        done = alternate(contenders, 1)
        rows += [[classes, name, f"{done[name]['seconds']:.1f}"] for name in contenders]
    record(
        "MAP@R with few classes: 10,000 x 128",
        f"{machine(*PACKAGES)}. Both distances, one run each. Goal: half the time of "
        "pytorch-metric-learning.\n\n" + table(["classes", "", "seconds"], rows),
    )


def pml_map(X, labels):
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    names = ("mean_average_precision_at_r", "r_precision")
    calculator = AccuracyCalculator(include=names, k="max_bin_count", device=torch.device("cpu"))
    return [calculator.get_accuracy(x, labels) for x in (X, unit(X))]


def command(*args: str, cache: str | None = None) -> tuple[float, int, dict]:
    """Seconds, peak anonymous memory and JSON of one `dmltool` command."""
    env = dict(os.environ) | ({"NUMBA_CACHE_DIR": cache} if cache else {})
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(
        [Path(sys.executable).parent / "dmltool", *args, "--json"], stdout=subprocess.PIPE, env=env
    )
    while process.poll() is None:
        peak = max(peak, resident(process.pid, "RssAnon"))
        time.sleep(0.01)
    seconds = time.perf_counter() - start
    return seconds, peak, json.loads(process.stdout.read())


def whole_command():
    from retrieval.embeddings import Split
    from retrieval.formats.hdf5.writing import write

    X, labels = clustered(5924, 2048, 100, 5.0)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/cub.h5"
        write(file, {"test": Split(X, labels)})
        recall = ("eval", file, "--no-nmi", "--no-map")
        cold = [command(*recall, cache=f"{folder}/cache{n}")[0] for n in range(3)]
        warm = [command(*recall)[0] for _ in range(6)][1:]
        with_map = [command("eval", file, "--no-nmi")[0] for _ in range(3)]
        everything = [command("eval", file)[0] for _ in range(3)]
    rows = [
        ["recall only, warm", f"{np.median(warm):.2f}", "under 3"],
        ["recall only, first run (kernels compiled)", f"{np.median(cold):.2f}", ""],
        ["first run minus warm run", f"{np.median(cold) - np.median(warm):.2f}", "at most 4"],
        ["with MAP@R and R-precision", f"{np.median(with_map):.2f}", ""],
        ["with k-means NMI and AMI, 3 seeds", f"{np.median(everything):.2f}", ""],
    ]
    record(
        "Whole command: `dmltool eval`, CUB shape",
        f"{machine(*PACKAGES)}. The whole command, both distances. Medians of 5 warm runs; "
        f"medians of 3 for the other rows.\n\n{table(['', 'seconds', 'goal'], rows)}",
    )


def million():
    from retrieval.formats.hdf5.writing import Writer

    N, D, C = 1_000_000, 256, 50_000
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        file = Path(folder) / "million.h5"
        labels = np.random.default_rng(0).integers(0, C, N)
        centres = np.random.default_rng(1).standard_normal((C, D), dtype=np.float32)
        rng = np.random.default_rng(2)
        with Writer(file, {"test": (labels, None)}, dim=D, dtype="float16", attrs={}) as writer:
            for start in range(0, N, 50_000):
                part = slice(start, start + 50_000)
                rows = centres[labels[part]] + 2 * rng.standard_normal((50_000, D), np.float32)
                writer.write("test", start, rows.astype(np.float16))
        rows = []
        for name, extra in (("recall", ("--no-map",)), ("recall and MAP@R", ())):
            seconds, peak, result = command(
                "eval", str(file), "--queries", "5000", "--memory", "1GB", "--no-nmi", *extra
            )
            recall = result["distances"]["cos"]["recall"]["1"]
            rows.append([name, f"{seconds:.1f}", f"{peak / 2**20:,.0f}", f"{100 * recall:.2f}"])
    record(
        "1,000,000 x 256 float16, 5,000 sampled queries, `--memory 1GB`",
        f"{machine(*PACKAGES)}. The peak is the anonymous resident memory of the whole "
        "process; the file is mapped and not included. Goal: under 1,024 MB.\n\n"
        + table(["", "seconds", "peak MB", "Recall@1 cos"], rows),
    )


def hard():
    """Data that float32 cannot decide: what exactness costs at its worst."""
    from retrieval.problem import from_arrays
    from retrieval.ranking.ranks import count_ranks

    N, D, C = 20_000, 128, 2000
    X, labels = clustered(N, D, C, 2.0)
    rng = np.random.default_rng(5)
    cases = {
        "random vectors around class centres": X,
        "all rows equal": np.ones_like(X),
        "every row repeated ten times": np.repeat(X[: N // 10], 10, axis=0),
        "nearly equal rows: differences of 1e-6": 1 + 1e-6 * X,
        "binary codes": (rng.random((N, 64)) < 0.5).astype(np.float32) * 2 - 1,
        "binary codes of length 1": np.sign(X) / np.float32(np.sqrt(D)),
        "all dimensions but one are zero": np.where(np.arange(D) == 3, np.abs(X), 0).astype(
            np.float32
        ),
        "int8": np.clip(X * 20, -127, 127).astype(np.int8),
        "one row in ten is zero": np.where(rng.random((N, 1)) < 0.1, 0, X).astype(np.float32),
    }
    rows = []
    count_ranks(from_arrays(X[:500], labels[:500]))
    for name, vectors in cases.items():
        start = time.perf_counter()
        ranks = count_ranks(from_arrays(vectors, labels))
        seconds = time.perf_counter() - start
        tied = int((ranks["cos"].ties > 0).sum())
        rows.append([name, f"{seconds:.2f}", f"{tied:,}"])
        print(rows[-1], flush=True)
    record(
        "What exactness costs: 20,000 rows, both distances",
        f"{machine(*PACKAGES)}. "
        "Time to rank data with many ties or nearly equal distances, where float32 is not enough. "
        "128 dimensions (binary codes: 64), 2,000 classes.\n\n"
        + table(["", "seconds", "tied queries (cos)"], rows),
    )


SECTIONS = {
    "cub": cub,
    "inshop": inshop,
    "sop": sop,
    "falling": falling,
    "few": few_classes,
    "million": million,
    "command": whole_command,
    "hard": hard,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or SECTIONS:
        if name not in SECTIONS:
            sys.exit(f"no section {name}: {', '.join(SECTIONS)}")
        SECTIONS[name]()
