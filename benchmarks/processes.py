"""python -m benchmarks.processes: eval and embed in one and two processes, into RESULTS.md.

Every process has one thread, so the table shows what the second process brings on two cores. The
figures that docs/scale.md extrapolates from go to processes.json; `make docs` reads them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.measure import clustered, machine, processor, record, table

MEASURED = Path(__file__).with_name("processes.json")
ROUNDS = 3
ROWS, DIM, CLASSES = 100_000, 256, 10_000
IMAGES, SIDE, BACKBONE = 2000, 128, "resnet18"
COMMAND = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def seconds(processes: int, *words: object) -> float:
    """How long a command takes, from its start to its end, with one thread for each process."""
    start = [*COMMAND, f"--nproc-per-node={processes}"] if processes > 1 else [sys.executable]
    began = time.perf_counter()
    done = subprocess.run(
        [*start, "-m", "cli", *map(str, words), "--threads", "1"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return time.perf_counter() - began


def measured(commands: dict[str, list[object]]) -> dict[str, dict[int, float]]:
    """Median seconds of each command in one and two processes, which take turns."""
    times: dict[str, dict[int, list[float]]] = {name: {1: [], 2: []} for name in commands}
    for _ in range(ROUNDS):
        for name, words in commands.items():
            for processes in (1, 2):
                times[name][processes].append(seconds(processes, *words))
                print(f"  {name}, {processes}: {times[name][processes][-1]:.1f} s", flush=True)
    return {
        name: {count: statistics.median(found) for count, found in each.items()}
        for name, each in times.items()
    }


def count_speed() -> float:
    """Floating-point operations that one core does per second of counting, half of the product."""
    from retrieval.problem import from_arrays
    from retrieval.ranking.ranks import count_ranks

    problem = from_arrays(*clustered(ROWS // 5, DIM, CLASSES // 5, 1.2))
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        count_ranks(problem, positions=True, threads=1, axes=0)
        best = min(best, time.process_time() - began)
    return len(problem.gallery) ** 2 * DIM / best


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        X, labels = clustered(ROWS, DIM, CLASSES, 1.2)
        np.savez(folder / "large.npz", embeddings=X, labels=labels)
        np.savez(folder / "small.npz", embeddings=X[:100], labels=labels[:100] % 10)
        model = write_inputs(folder)
        found = measured(
            {
                f"eval {ROWS:,} x {DIM}, MAP@R, no NMI": ["eval", folder / "large.npz", "--no-nmi"],
                "eval 100 rows: the start": ["eval", folder / "small.npz", "--no-nmi"],
                f"embed {IMAGES:,} images, {BACKBONE}, {SIDE} pixels": [
                    *("embed", model, folder / "photos", "--out", folder / "photos.h5"),
                    *("--provider", "cpu", "--force"),
                ],
            }
        )
    figures = {"processor": processor(), "flops": count_speed(), "dim": DIM}
    MEASURED.write_text(json.dumps(figures, indent=2) + "\n")
    rows = [
        [name, f"{each[1]:.1f} s", f"{each[2]:.1f} s", f"{each[1] / each[2]:.2f}"]
        for name, each in found.items()
    ]
    shown = table(["command, one thread per process", "1 process", "2 processes", "ratio"], rows)
    told = (
        f"Median of {ROUNDS} runs in turns, from the start of the command to its end, importing "
        f"torch included. {machine('numpy', 'torch', 'onnxruntime')}. Counting does "
        f"{figures['flops'] / 1e9:.1f} GFLOP/s on one core."
    )
    record("Several processes", f"{told}\n\n{shown}")


def write_inputs(folder: Path) -> Path:
    """Write photos of noise and a small network; returns the model's path."""
    from exporter.onnx.trace import write_model
    from tests.exporter.networks import properties, settled

    rng = np.random.default_rng(0)
    for n in range(IMAGES):
        path = folder / "photos" / f"{n % 30:02}" / f"{n}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (SIDE * 4, SIDE * 4, 3), np.uint8)).save(path)
    network = settled(BACKBONE, SIDE)
    model = folder / "model.onnx"
    write_model(network, model, size=SIDE, properties=properties(network, SIDE))
    return model


if __name__ == "__main__":
    main()
