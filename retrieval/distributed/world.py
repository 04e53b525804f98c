"""The processes of a job, as the environment variables of torchrun or srun describe them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from retrieval.errors import DmlError

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
BY_TORCHRUN = "torchrun --nproc-per-node=2 -m cli COMMAND ..."
BY_SRUN = "srun --ntasks=2 dmltool COMMAND ..."
WHOLE = "Not all of them are whole numbers."
MOST = 1 << 26  # numbers in one collective


@dataclass(frozen=True)
class World:
    """The processes of a job. `local_rank` is the place on this machine, and the GPU there."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    """The machine of rank 0."""
    port: int = 0
    """Where rank 0 or torchrun listens there."""
    by_slurm: bool = False

    @property
    def how_to_start(self) -> str:
        """For errors: a command that starts several processes, and how to start one."""
        command, variable = (BY_SRUN, SLURM[1]) if self.by_slurm else (BY_TORCHRUN, VARIABLES[1])
        return f"{command}; or start one process: unset {variable}."

    @property
    def processors(self) -> int:
        """The processors for this process; srun usually binds its tasks to some, torchrun not."""
        from retrieval import resources

        machine = resources.processors()
        if not self.by_slurm:
            return max(1, machine // self.local_size)
        found = os.environ.get("SLURM_CPUS_ON_NODE", "")
        share = int(found) // self.local_size if found.isdecimal() else machine
        return max(1, min(machine, share))

    def share(self, tasks: Sequence[T], before: int = 0) -> Sequence[T]:
        """The tasks of this rank: every size-th one.

        `before` is the number of tasks in earlier lists: all lists together are shared evenly.
        """
        return tasks[(self.rank - before) % self.size :: self.size]

    def add(self, *arrays: np.ndarray) -> None:
        """Replace integer arrays by their sums over all ranks, in place."""
        self._reduce("SUM", arrays)

    def least(self, *arrays: np.ndarray) -> None:
        """Replace integer arrays by their element-wise minima over all ranks, in place."""
        self._reduce("MIN", arrays)

    def complete(self, *arrays: np.ndarray) -> None:
        """Fill in what other ranks have computed: every element is zero on all ranks but one.

        The bits are added, so that floats stay as they are.
        """
        self._reduce("SUM", [array.view(f"i{array.itemsize}") for array in arrays])

    def require_same(self, number: int, what: str) -> None:
        """Raise unless all ranks have the same number, a checksum of what they read."""
        import numpy as np

        both = np.array([number, -number])
        self.least(both)
        if both[0] != -both[1]:
            raise DmlError(
                f"The processes have read different {what}.",
                "They share the work on one problem, so all of them need the same file.",
                "Copy the file to every machine, or put it on a disk that all of them share.",
            )

    def _reduce(self, operation: str, arrays: Sequence[np.ndarray]) -> None:
        if self.size == 1:
            return
        import torch
        from torch import distributed

        for array in arrays:
            assert array.dtype.kind == "i", "sums of floats depend on their order"
            assert array.flags.c_contiguous, "a copy would be changed"
            flat = array.reshape(-1)
            for start in range(0, len(flat), MOST):
                part = torch.from_numpy(flat[start : start + MOST])
                distributed.all_reduce(part, getattr(distributed.ReduceOp, operation))


ALONE = World()


def from_environment() -> World:
    """Read the variables of torchrun, or those of a Slurm step with several tasks.

    RANK alone, which some shells and job systems set for purposes of their own, says nothing. Job
    scripts of Slurm often export WORLD_SIZE, and srun then starts the tasks.
    """
    size = os.environ.get("WORLD_SIZE", "").strip()
    tasks = os.environ.get(SLURM[1], "1")
    if tasks != "1" and not (size and os.environ.get("RANK")):
        if size not in ("", tasks):
            why = "srun has started another number of tasks."
            raise inconsistent(("WORLD_SIZE", SLURM[1]), why, "Do not set it: unset WORLD_SIZE")
        return _of_slurm(os.environ)
    return ALONE if size in ("", "1") else _of_torchrun(os.environ)


def refuse_several(command: str) -> None:
    """Raise if there are several processes, for a command that one process runs."""
    if from_environment().size > 1:
        raise DmlError(
            f"`dmltool {command}` runs in one process.",
            "Several were started, by torchrun or srun, and would do the same work.",
            f"Start it without them: dmltool {command} ...",
        )


def _of_torchrun(given: Mapping[str, str]) -> World:
    _require(VARIABLES, given)
    try:
        rank, size, local_rank = (int(given[name]) for name in VARIABLES[:3])
        port = int(given["MASTER_PORT"])
        local_size = int(given.get("LOCAL_WORLD_SIZE") or 1)
    except ValueError:
        raise inconsistent(VARIABLES, WHOLE) from None
    if not 0 <= local_rank <= rank < size:
        raise inconsistent(VARIABLES, "0 <= LOCAL_RANK <= RANK < WORLD_SIZE does not hold.")
    if local_size < 1:
        raise inconsistent(("LOCAL_WORLD_SIZE", *VARIABLES), "LOCAL_WORLD_SIZE is at least 1.")
    _check_port(port)
    return World(rank, size, local_rank, local_size, given["MASTER_ADDR"], port)


def _of_slurm(given: Mapping[str, str]) -> World:
    """Read the variables of a Slurm step; a shell of sbatch or salloc has only some of them."""
    _require(SLURM, given)
    others = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "MASTER_PORT")
    try:
        rank, size, local_rank = (int(given[name]) for name in SLURM)
        job, step, node, port = (int(given.get(name) or 0) for name in others)
    except ValueError:
        raise inconsistent((*SLURM, *others), WHOLE) from None
    if given.get("MASTER_PORT"):
        _check_port(port)
    port = port or 20_000 + (job * 7 + step) % 20_000
    nodes = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or ""
    host = given.get("MASTER_ADDR") or first_host(nodes)
    if not host or not 0 <= local_rank <= rank < size:
        raise inconsistent((*SLURM, "SLURM_STEP_NODELIST"), "They do not name rank and machine.")
    each = tasks_per_node(given.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_size = each[node] if 0 <= node < len(each) else 1
    return World(rank, size, local_rank, local_size, host, port, True)


def _require(names: Sequence[str], given: Mapping[str, str]) -> None:
    if missing := [name for name in names if not given.get(name)]:
        raise inconsistent(names, f"Without a value: {', '.join(missing)}.")


def _check_port(port: int) -> None:
    if not 0 < port < 1 << 16:
        raise DmlError(
            f"MASTER_PORT={port} is not a port.",
            "Ports are numbers from 1 to 65535.",
            "Use a free one on the machine of rank 0: export MASTER_PORT=29500",
        )


def first_host(nodes: str) -> str:
    """The first of a list of machines as Slurm writes it: `gpu[08-11,20],login1` -> `gpu08`."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).partition(",")[0]


def tasks_per_node(text: str) -> list[int]:
    """The tasks of each machine as Slurm writes them: `4(x2),3` -> 4, 4, 3."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def inconsistent(names: Sequence[str], why: str, fix: str = "") -> DmlError:
    """The error for variables of a launcher that contradict each other."""
    given = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    by_slurm = SLURM[0] in names
    sets = f"Let {'srun' if by_slurm else 'torchrun'} set them"
    return DmlError(
        f"The variables of several processes do not fit together: {given}.",
        why,
        fix or f"{sets}: {World(by_slurm=by_slurm).how_to_start}",
    )
