"""Start the processes of a job as torchrun does, and run commands in them.

One start serves many commands: the file is also the script of those processes,
`python -m tests.ranks FOLDER`, with the commands in FOLDER.
"""

import json
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrieval.distributed.world import World
from tests.forks import Forked

ROOT = Path(__file__).parents[1]
FITTING = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""The variables that torchrun sets for the second of two processes."""


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str


def variables(size):
    """The variables of each rank, with a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": port}
    shared |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def slurm_variables(size):
    """The variables of each task of a step, as srun sets them on one machine."""
    port = variables(1)[0]["MASTER_PORT"]
    shared = {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": str(size)}
    shared |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}
    shared |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return [shared | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in range(size)]


def start(size, *arguments, variables=variables):
    """A Python with these arguments for each rank."""
    return [Forked(*arguments, env=given) for given in variables(size)]


def finish(ranks, timeout=120):
    """Wait for all ranks: an `Outcome` each."""
    try:
        return [Outcome(*rank.end(timeout)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def together(size, *arguments):
    """Run a Python as every rank; once more if another program took the port meanwhile."""
    outcomes = finish(start(size, *arguments))
    if any("EADDRINUSE" in outcome.stderr for outcome in outcomes):
        outcomes = finish(start(size, *arguments))
    return outcomes


def run_commands(size, commands, folder):
    """Run commands one after another in the same processes: the outcomes of each by rank."""
    (folder / "commands.json").write_text(json.dumps([list(map(str, args)) for args in commands]))
    for outcome in together(size, "-m", "tests.ranks", folder):
        assert outcome.code == 0, outcome.stderr
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return [[Outcome(**outcome) for outcome in ranks] for ranks in zip(*found, strict=True)]


@dataclass(frozen=True)
class ThreadWorld(World):
    """A rank that is a thread of the test: collectives without new processes."""

    barrier: threading.Barrier | None = None
    given: list | None = None

    def _reduce(self, operation, arrays):
        reduce = {"SUM": np.add, "MIN": np.minimum}[operation].reduce
        for array in arrays:
            self.given[self.rank] = array.copy()
            self.barrier.wait(30)
            array[...] = reduce(self.given)
            self.barrier.wait(30)


def in_threads(size, work):
    """What work(world) returns for each rank of a world of threads."""
    barrier, given = threading.Barrier(size), [None] * size
    worlds = [ThreadWorld(n, size, n, size, barrier=barrier, given=given) for n in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, worlds))


def main(folder):
    from tests.commands import call

    commands = json.loads((folder / "commands.json").read_text())
    done = [call(*command) for command in commands]
    kept = [{"code": r.exit_code, "stdout": r.stdout, "stderr": r.stderr} for r in done]
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(kept))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
