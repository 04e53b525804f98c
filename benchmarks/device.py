"""Count ranks by NumPy on the CPU and by torch on all GPUs: `python -m benchmarks.device`.

Without a GPU, torch counts on the CPU, a smaller problem, and nothing is recorded.
"""

from __future__ import annotations

import os
from functools import partial

from benchmarks.measure import alternate, clustered, machine, record, table
from retrieval.problem import Problem, from_arrays
from retrieval.ranking.backends.choice import VARIABLE
from retrieval.ranking.backends.trial import cuda_devices, title
from retrieval.ranking.ranks import Ranks, count_ranks

SHAPES = {"CUB": (5_924, 512, 100), "SOP": (60_502, 512, 11_316)}  # items, dimensions, classes


def main() -> None:
    devices = cuda_devices()
    name = f"torch, {len(devices)} x {title(devices[0])}" if devices else "torch, CPU"
    rows = []
    for shape, (N, D, C) in SHAPES.items() if devices else [("small", (3_000, 128, 100))]:
        problem = from_arrays(*clustered(N, D, C, 2.0))
        contenders = {
            "NumPy, CPU": partial(counted, problem, "numpy", "cpu"),
            name: partial(counted, problem, "torch", "cuda" if devices else "cpu"),
        }
        found = alternate(contenders, 3)
        ours, theirs = (each["result"] for each in found.values())
        for d in ours:
            assert (ours[d].rank == theirs[d].rank).all(), d
            assert (ours[d].positions.positions == theirs[d].positions.positions).all(), d
        rows.append(
            [f"{shape}: {N:,} x {D}", *(f"{each['seconds']:.2f}" for each in found.values())]
        )
    text = (
        f"{machine('numpy', 'numba', 'torch')}. Seconds for leave-one-out ranks and positions by "
        "both distances, which are the same.\n\n" + table(["", "NumPy, CPU", name], rows)
    )
    if devices:
        record("Ranks on a GPU", text)
    else:
        print(text)


def counted(problem: Problem, backend: str, device: str) -> dict[str, Ranks]:
    os.environ[VARIABLE] = backend
    return count_ranks(problem, positions=True, device=device)


if __name__ == "__main__":
    main()
