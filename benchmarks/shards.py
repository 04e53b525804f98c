"""python -m benchmarks.shards: `dmltool eval` on 5 GB of shards with 1 GB of memory, to RESULTS.md.

`--items 1000000` takes a tenth of the size; `--dry` records nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import machine, record, resident, table

ITEMS, DIM, SHARD, PER_CLASS, QUERIES, MEMORY = 10_000_000, 256, 250_000, 20, 2000, 1 << 30
BLOCK = 1 << 14


def write_shards(folder: Path, items: int) -> None:
    """float16 vectors around class centres and int64 labels, in shards of equal size."""
    for name in ("x", "y"):
        (folder / name).mkdir()
    classes = items // PER_CLASS
    for n, at in enumerate(range(0, items, SHARD)):
        rng = np.random.default_rng(n)
        labels = rng.integers(0, classes, min(SHARD, items - at))
        vectors = np.empty((len(labels), DIM), np.float16)
        for part in range(0, len(labels), BLOCK):
            some = labels[part : part + BLOCK]
            # A class's centre follows from its number, so that all shards agree on it.
            phase = np.outer(some + 1.0, np.sqrt(np.arange(2, DIM + 2))).astype(np.float32)
            noise = rng.standard_normal((len(some), DIM), dtype=np.float32)
            vectors[part : part + BLOCK] = 1.4 * np.sin(phase % (2 * np.pi)) + 1.2 * noise
        np.save(folder / "x" / f"part-{n}.npy", vectors)
        np.save(folder / "y" / f"part-{n}.npy", labels)


def evaluate(folder: Path) -> tuple[float, int, dict]:
    """Seconds, peak of anonymous resident memory, and the scores."""
    command = [Path(sys.executable).parent / "dmltool", "eval", folder / "x", "--labels"]
    options = [folder / "y", "--queries", str(QUERIES), "--no-nmi", "--json"]
    start, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as out:
        running = subprocess.Popen(
            [*command, *options, "--memory", "1GB", "--recall-at", "1,10"], stdout=out
        )
        while running.poll() is None:
            peak = max(peak, resident(running.pid, "RssAnon"))
            time.sleep(0.05)
        out.seek(0)
        result = json.loads(out.read())
    return time.perf_counter() - start, peak, result


def products(folder: Path) -> tuple[float, float]:
    """Seconds of the float32 products of the queries with all vectors, alone and with reading.

    Reading is that of the mapped files, and the conversion of their float16.
    """
    start, alone = time.perf_counter(), 0.0
    queries = np.load(folder / "x" / "part-0.npy", mmap_mode="r")[:QUERIES].astype(np.float32)
    out = np.empty((QUERIES, BLOCK), np.float32)
    for file in sorted((folder / "x").iterdir()):
        whole = np.load(file, mmap_mode="r")
        for at in range(0, len(whole), BLOCK):
            some = whole[at : at + BLOCK].astype(np.float32)
            before = time.perf_counter()
            np.matmul(queries, some.T, out=out[:, : len(some)])
            alone += time.perf_counter() - before
    return alone, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(folder, arguments.items)
        before = products(folder)
        seconds, peak, result = evaluate(folder)
        alone, read = np.mean([before, products(folder)], axis=0)
    rows = [
        ["dmltool eval, both distances, with its start and the copy of the shards", seconds, 1.0],
        ["the float32 products, with reading and converting the vectors", read, seconds / read],
        ["the float32 products alone", alone, seconds / alone],
    ]
    text = (
        f"{machine('numpy', 'numba')}. {arguments.items:,} x {DIM} float16 in shards of "
        f"{SHARD:,} rows, {QUERIES:,} sampled queries, `--memory 1GB`, with MAP@R. The products "
        "are measured before and after, and the mean is shown. Goal: at most 1.5 times the "
        "products, under 1 GB of memory in addition to mapped pages.\n\n"
        + table(
            ["", "seconds", "dmltool takes, times"],
            [[what, f"{took:.1f}", f"{ratio:.2f}"] for what, took, ratio in rows],
        )
        + f"\nPeak of anonymous resident memory: {peak / 1e6:,.0f} MB "
        f"({'under' if peak < MEMORY else 'over'} 1 GB).\n"
    )
    print(text, json.dumps(result["distances"]), sep="\n")
    if not arguments.dry:
        record(f"Shards: {arguments.items:,} x {DIM}", text)


if __name__ == "__main__":
    main()
