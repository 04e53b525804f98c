"""What evaluating 10 million to a billion vectors takes on 1 to 64 machines: arithmetic only.

`make docs` writes the tables into docs/scale.md. The speed of a core is measured
(`benchmarks.processes`); the machines are assumed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from benchmarks.measure import table
from benchmarks.processes import MEASURED
from retrieval.number_format import size

VECTORS = (10**7, 10**8, 10**9)
MACHINES = (1, 4, 16, 64)
POSITIVES = 10  # of each query
SAMPLED = 10_000  # queries of --queries
BLOCK = 320  # rows of a tile, with 1 MB of cache for each of 32 threads: resources.tile_rows


@dataclass(frozen=True)
class Machine:
    """An assumed machine; the speed of its cores is that of a core measured here."""

    cores: int = 32
    memory: float = 256e9  # bytes
    read: float = 1e9  # bytes a second, from its disk or a shared one
    send: float = 1e9  # bytes a second to the other machines


@dataclass(frozen=True)
class Plan:
    """The cost of one evaluation; bytes and seconds are those of each machine."""

    flops: float
    read: float
    sent: float
    seconds: float


def plan(
    vectors: int,
    machines: int,
    queries: int | None = None,
    *,
    flops_per_core: float,
    dim: int = 256,
    itemsize: int = 2,
    machine: Machine | None = None,
    block: int = BLOCK,
) -> Plan:
    """Cost of Recall@K and MAP@R by both distances, leave-one-out or for sampled queries.

    - One process on each machine, with a thread for each core.
    - Half of the product for leave-one-out, as (i, j) serves both rows; all of it for a sample.
    - Every machine reads the whole file for lengths and identical rows, and once more if there are
      several, which compare what they have read.
    - The machines share the positives of all queries, which are all rows in leave-one-out.
    - Every machine reads the gallery blocks of its tiles: all of them, unless there are fewer
      blocks of queries than machines. If the file does not fit the memory, every tile of
      leave-one-out reads its block of queries again, at most.
    - Thresholds (4 numbers), counts (2) and MAP@R's lists (6 for each positive) of each query are
      added up, for two distances, 8 bytes each; a ring sends nearly twice as much as it adds.
    """
    machine = machine or Machine()
    asked = vectors if queries is None else queries
    flops = float(vectors) * vectors * dim if queries is None else 2.0 * queries * vectors * dim
    size = float(vectors) * dim * itemsize
    whole = 1 if machines == 1 else 2
    positives = min(1.0, asked * POSITIVES / vectors) / machines
    galleries = min(1.0, math.ceil(asked / block) / machines)
    once, again = (whole + positives + galleries) * size, 0.0
    if size > machine.memory and queries is None:
        tiles = (vectors / block) ** 2 / 2 / machines
        again = tiles * block * dim * itemsize
    sent = 2 * (machines - 1) / machines * asked * 2 * 8 * (4 + 2 + 6 * POSITIVES)
    counting = flops / (machines * machine.cores * flops_per_core)
    waiting = once / machine.read + sent / machine.send
    # Blocks of tiles are read while others are counted: the slower of the two decides.
    return Plan(flops, once + again, sent, max(counting, again / machine.read) + waiting)


def measured() -> tuple[float, str]:
    """Operations per second of a core that counts, and which processor that was."""
    found = json.loads(MEASURED.read_text())
    return found["flops"], found["processor"]


def scale_tables() -> str:
    """The tables of docs/scale.md, with the figures that they start from."""
    speed, processor = measured()
    machine = Machine()
    parts = [
        f"Measured: one core of {processor} counts {speed / 1e9:.0f} GFLOP/s (both distances, "
        f"MAP@R). Assumed: machines of {machine.cores} such cores and "
        f"{machine.memory / 1e9:.0f} GB, {machine.read / 1e9:.0f} GB/s from the disk and "
        f"{machine.send / 1e9:.0f} GB/s between them, with one process each; 256 dimensions in "
        f"float16, {POSITIVES} positives for each query.\n"
    ]
    for title, queries in (("All queries", None), (f"--queries {SAMPLED}", SAMPLED)):
        rows = []
        for vectors in VECTORS:
            for machines in MACHINES:
                cost = plan(vectors, machines, queries, flops_per_core=speed)
                rows.append(
                    [
                        f"{vectors / 1e6:,.0f} M",
                        machines,
                        f"{cost.flops:.1e}",
                        size(cost.read),
                        size(cost.sent) if cost.sent else 0,
                        _minutes(cost.seconds),
                    ]
                )
        head = ["vectors", "machines", "operations", "read by each", "sent by each", "minutes"]
        parts.append(f"{title}:\n\n{table(head, rows)}")
    return "\n".join(parts)


def _minutes(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.1f}" if minutes < 10 else f"{minutes:,.0f}"
