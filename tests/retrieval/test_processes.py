"""Several processes meet, compute together, and end together.

The file is also the script of those processes: `python test_processes.py FOLDER`.
"""

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from retrieval import processes, resources, watchdog
from retrieval.errors import DmlError
from retrieval.processes import World, first_host, tasks_per_node
from tests.ranks import together

SIZE = 3


def join(device_type="cpu"):
    with processes.joined(device_type):
        pass


# three processes


def of_rank(world):
    """What the ranks compute together."""
    mine, parts = np.zeros(7), world.share(range(7))
    mine[parts] = [part / 3 for part in parts]
    sums, low = np.full((2, 3), world.rank + 1), np.array([world.rank, 5 - world.rank])
    big = np.full(5, 1 << 60, np.int64)
    world.add(sums, big)
    world.least(low)
    world.complete(mine)
    flags = (False, world.rank == 1, world.rank == 0)
    return {
        "world": (world.rank, world.size, world.local_rank, world.local_size),
        "parts": list(parts),
        "sums": sums.tolist(),
        "big": big.tolist(),
        "least": low.tolist(),
        "complete": mine.tolist(),
        "agree": [processes.agree(flag, world) for flag in flags],
        "first": processes.from_first(lambda: f"of rank {world.rank}", world),
    }


def main(folder):
    """The last rank is killed while rank 0 computes and rank 1 waits for both."""
    with processes.joined() as world:
        processes.agree(False, world)  # nobody leaves while others still connect
    with processes.joined() as world:  # once more
        found = of_rank(world)
        (folder / f"{world.rank}.json").write_text(json.dumps(found))
        if world.rank == world.size - 1:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        elif world.rank == 0:
            while True:
                np.ones((500, 500)) @ np.ones((500, 500))
        processes.agree(False, world)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder and the outcomes of three ranks."""
    folder = tmp_path_factory.mktemp("job")
    outcomes = together(SIZE, __file__, folder)
    (folder / "over").write_text(str(time.time()))
    return folder, outcomes


@pytest.fixture(scope="module")
def ranks(job):
    return [json.loads((job[0] / f"{rank}.json").read_text()) for rank in range(SIZE)]


def test_ranks_know_their_place(ranks):
    assert [rank["world"] for rank in ranks] == [[n, SIZE, n, SIZE] for n in range(SIZE)]


def test_every_task_is_shared_out_once(ranks):
    assert sorted(part for rank in ranks for part in rank["parts"]) == list(range(7))


def test_sums_and_minima_are_exact_on_every_rank(ranks):
    for rank in ranks:
        assert rank["sums"] == [[6] * 3] * 2
        assert rank["big"] == [3 << 60] * 5
        assert rank["least"] == [0, 3]


def test_floats_of_other_ranks_arrive_bit_for_bit(ranks):
    for rank in ranks:
        assert rank["complete"] == [part / 3 for part in range(7)]


def test_one_yes_is_a_yes_for_all(ranks):
    for rank in ranks:
        assert rank["agree"] == [False, True, True]


def test_all_get_what_rank_0_makes(ranks):
    assert {rank["first"] for rank in ranks} == {"of rank 0"}


def test_a_killed_rank_ends_the_others_soon_with_one_line(job):
    folder, outcomes = job
    assert [outcome.code for outcome in outcomes] == [1, 1, -signal.SIGKILL]
    for rank, outcome in enumerate(outcomes[:2]):
        lines = outcome.stderr.strip().splitlines()
        assert lines[-1].startswith(f"Error: Rank {rank} stops, because rank 2 on "), lines
    times = [float((folder / name).read_text()) for name in ("killed", "over")]
    assert times[1] - times[0] < 60


# one process


@pytest.fixture
def environment(monkeypatch):
    for name in (*processes.VARIABLES, *processes.SLURM):
        monkeypatch.delenv(name, raising=False)
    return lambda **given: [monkeypatch.setenv(name, value) for name, value in given.items()]


def test_without_torchrun_a_process_is_alone(environment):
    environment(MASTER_ADDR="somewhere")  # some clusters set it for everything
    assert processes.from_environment() == World() == World(0, 1, 0)


def test_a_rank_without_the_number_of_processes_is_one_process(environment):
    environment(RANK="3")
    assert processes.from_environment() == World()
    environment(RANK="3", WORLD_SIZE="")
    assert processes.from_environment() == World()
    environment(WORLD_SIZE="1")
    assert processes.from_environment() == World()
    environment(WORLD_SIZE="2")
    with pytest.raises(DmlError, match="WORLD_SIZE=2") as caught:
        processes.from_environment()
    assert "Without a value: LOCAL_RANK" in caught.value.why
    assert "unset WORLD_SIZE" in caught.value.fix


def test_one_process_of_torchrun_needs_no_group(environment):
    environment(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="a", MASTER_PORT="1")
    with processes.joined() as world:
        assert (world.rank, world.size) == (0, 1)
        assert not torch.distributed.is_initialized()


FITTING = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"WORLD_SIZE": "two"}, "whole numbers"),
        ({"LOCAL_RANK": "", "MASTER_ADDR": ""}, "Without a value: LOCAL_RANK, MASTER_ADDR"),
        ({"RANK": "2"}, "LOCAL_RANK <= RANK < WORLD_SIZE"),
        ({"LOCAL_RANK": "-1"}, "0 <= LOCAL_RANK"),
        ({"RANK": "one"}, "whole numbers"),
    ],
)
def test_variables_that_do_not_fit_are_shown(environment, changes, why):
    environment(**FITTING | changes)
    with pytest.raises(DmlError) as caught:
        join()
    assert "MASTER_PORT=29500" in caught.value.what
    assert why in caught.value.why
    assert "torchrun" in caught.value.fix


def test_a_torch_without_distributed_is_named(environment, monkeypatch):
    environment(**FITTING)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(DmlError, match=r"torch\.distributed"):
        join()


def test_devices_that_cannot_be_shared_are_named(environment, monkeypatch):
    environment(**FITTING)
    with pytest.raises(DmlError, match="mps"):
        join("mps")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DmlError, match="nproc-per-node=1"):
        join("cuda")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_never_comes_is_not_waited_for_long(environment, monkeypatch, rank):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment(**FITTING | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port})
    assert timedelta(minutes=1) > processes.JOIN
    monkeypatch.setattr(processes, "JOIN", timedelta(seconds=2))
    began = time.monotonic()
    with pytest.raises(DmlError, match=f"Rank {rank} cannot join the 2 processes"):
        join()
    assert time.monotonic() - began < 30


def test_ranks_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(processes, "JOIN", timedelta(seconds=1))
    with pytest.raises(RuntimeError, match="rank 1, 2"):
        processes.meet(torch.distributed.HashStore(), World(0, 3, 0))


def test_a_port_that_is_taken_is_named(environment):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment(**FITTING | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port})
        with pytest.raises(DmlError, match=f"Rank 0 cannot join the 2 processes at .*:{port}"):
            join()


def test_who_cannot_connect_is_not_watched_any_longer(environment, monkeypatch):
    """The watchdog would end the process before its error is shown."""
    environment(**FITTING)
    place = FITTING["MASTER_ADDR"], int(FITTING["MASTER_PORT"])
    stopped = []
    dog = SimpleNamespace(stop=lambda **how: stopped.append(how))

    def refused(*_args, **_options):
        raise RuntimeError("connection refused")

    monkeypatch.setitem(processes._stores, place, torch.distributed.HashStore())
    monkeypatch.setattr(processes, "meet", lambda store, world: None)
    monkeypatch.setattr(watchdog.Watchdog, "start", lambda *_args: dog)
    monkeypatch.setattr(torch.distributed, "init_process_group", refused)
    with pytest.raises(DmlError, match="cannot join the 2 processes"):
        join()
    assert stopped == [{"failed": True}]


# Slurm

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "8",
}


def test_a_step_of_slurm_is_understood(environment):
    environment(**STEP)
    world = processes.from_environment()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 7, 1, 3)
    assert world.host == "gpu08"
    assert 20_000 <= world.port < 40_000
    environment(SLURM_STEP_ID="3")
    assert processes.from_environment().port != world.port
    environment(MASTER_ADDR="10.0.0.1", MASTER_PORT="5")
    world = processes.from_environment()
    assert (world.host, world.port) == ("10.0.0.1", 5)


@pytest.mark.parametrize("tasks", [None, "1"])
def test_a_shell_of_sbatch_or_salloc_is_alone(environment, tasks, monkeypatch):
    """It has a rank and a number of tasks; what is missing is a step with several."""
    environment(**STEP)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    if tasks:
        environment(SLURM_STEP_NUM_TASKS=tasks)  # srun --pty bash
    assert processes.from_environment() == World()


def test_torchrun_inside_a_step_of_slurm_comes_first(environment):
    environment(**STEP | FITTING)
    assert processes.from_environment().size == 2


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NODELIST"])
def test_a_step_without_rank_or_machine_is_refused(environment, name):
    environment(**STEP | {name: "", "SLURM_JOB_NODELIST": ""})
    with pytest.raises(DmlError, match="SLURM_STEP_NUM_TASKS=7"):
        processes.from_environment()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("gpu[08-11,20],login1", "gpu08"),
        ("gpu[3,5-7]", "gpu3"),
        ("rack[1-2]-node[03-04].site", "rack1-node03.site"),
        ("my-node-7,other", "my-node-7"),
        ("", ""),
    ],
)
def test_the_first_machine_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_tasks_of_each_machine():
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("8") == [8]
    assert tasks_per_node("") == []


def test_processors_are_shared_by_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(resources, "processors", lambda: 16)
    assert World(0, 8, 0, 8).processors == 2
    assert World(0, 64, 0, 64).processors == 1
    bound = World(0, 4, 0, 4, by_slurm=True)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "64")
    assert bound.processors == 16  # srun has bound it to a quarter of the machine
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "16")
    assert bound.processors == 4  # it has not


def test_a_task_of_slurm_that_sees_one_gpu_has_that_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert processes.own_gpu(World(3, 4, 3, 4, by_slurm=True)) == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert processes.own_gpu(World(3, 4, 3, 4, by_slurm=True)) == 3


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except DmlError as error:
        sys.exit(f"Error: {error}")  # as the command line shows it
