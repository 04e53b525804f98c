"""python -m benchmarks.evaluate [SECTION ...]: whole commands and hard data, into RESULTS.md.

Sections: million, command, hard. All of them by default. `benchmarks.ranks` compares the ranking of
common shapes with other libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import clustered, machine, record, resident, table
from benchmarks.ranks import PACKAGES


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
    "million": million,
    "command": whole_command,
    "hard": hard,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or SECTIONS:
        if name not in SECTIONS:
            sys.exit(f"no section {name}: {', '.join(SECTIONS)}")
        SECTIONS[name]()
