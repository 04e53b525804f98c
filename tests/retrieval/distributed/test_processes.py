"""Several processes meet, compute together, and end together.

The file is also the script of those processes: `python test_processes.py FOLDER`.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from retrieval.distributed import processes, watchdog
from retrieval.distributed.world import World
from retrieval.errors import DmlError
from tests.forks import Forked
from tests.ranks import FITTING, finish, slurm_variables, together, variables

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
        processes.agree(False, world)  # all have written
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


def test_one_process_of_torchrun_needs_no_group(environment):
    environment(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="a", MASTER_PORT="1")
    with processes.joined() as world:
        assert (world.rank, world.size) == (0, 1)
        assert not torch.distributed.is_initialized()


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
    with pytest.raises(RuntimeError, match="after 1 seconds: 1, 2"):
        processes.meet(torch.distributed.HashStore(), World(0, 3, 0))


def test_a_port_that_is_taken_is_named(environment):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment(**FITTING | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port})
        with pytest.raises(DmlError, match=f"Rank 0 cannot join the 2 processes at .*:{port}") as e:
            join()
    assert e.value.why == f"Another program uses the port {port} (EADDRINUSE)."


SHORT = """
from datetime import timedelta
from retrieval.distributed import processes
from retrieval.errors import DmlError
from cli import show_error
processes.JOIN = timedelta(seconds=6)
try:
    with processes.joined(): pass
except DmlError as error:
    show_error(error)
"""


@pytest.mark.parametrize("of", [variables, slurm_variables])
def test_a_rank_that_does_not_come_is_named_once(of):
    """The others wait in the store that rank 0 holds; each says in one line that it ends."""
    given = of(3)
    first, last = finish([Forked("-c", SHORT, env=given[rank]) for rank in (0, 2)])
    assert "Rank 0 cannot join the 3 processes" in first.stderr
    assert "These ranks have not joined after 6 seconds: 1." in first.stderr
    assert ("srun --ntasks" in first.stderr) == (of is slurm_variables)
    assert last.stderr.splitlines()[-1].startswith("Error: Rank 2 cannot join the 3 processes")


@pytest.mark.parametrize(
    ("local_rank", "why"),
    [
        ("0", ["  What listens there does not answer: another program, or a rank that has ended."]),
        ("1", []),  # the first rank of the machine gives the reason
    ],
)
def test_a_port_where_nobody_answers_ends_the_rank(local_rank, why):
    program = (
        "from datetime import timedelta; from retrieval.distributed import processes\n"
        "processes.JOIN, processes.GRACE = timedelta(seconds=1), timedelta(seconds=1)\n"
        "with processes.joined(): pass"
    )
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        port = str(mute.getsockname()[1])
        given = FITTING | {"LOCAL_RANK": local_rank, "MASTER_PORT": port}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | given,
            cwd=Path(__file__).parents[3],
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    told, *rest = done.stderr.splitlines()
    assert told.startswith("Error: Rank 1 cannot join the 2 processes at 127.0.0.1")
    assert rest[:1] == why


def test_a_machine_that_cannot_be_reached_is_not_taken_for_a_mute_one():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        place = World(1, 2, host="127.0.0.1", port=closed.getsockname()[1])
        assert processes._why_silent(place) == "It cannot be reached: Connection refused."


@pytest.mark.parametrize(
    ("given", "fully"),
    [
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, True),  # first of its machine
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, False),
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, False),  # one srun starts all machines
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),  # contradictory, on this machine alone
        ({"WORLD_SIZE": "9", "SLURM_PROCID": "0"}, True),  # contradictory
        ({"WORLD_SIZE": "9", "SLURM_PROCID": "1"}, False),
    ],
)
def test_one_rank_of_each_command_tells_an_early_error(given, fully, environment, monkeypatch):
    monkeypatch.setattr(processes, "_stores", {})
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[1-2]"}
    torchrun = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    environment(**(torchrun if "RANK" in given else slurm), **given)
    assert processes.reports_fully() is fully


def test_who_cannot_connect_is_not_watched_any_longer(environment, monkeypatch):
    """The watchdog would end the process before its error is shown."""
    environment(**FITTING)
    place = FITTING["MASTER_ADDR"], int(FITTING["MASTER_PORT"])
    stopped = []
    dog = SimpleNamespace(stop=lambda **how: stopped.append(how), address="")

    def refused(*_args, **_options):
        raise RuntimeError("Gloo connectFullMesh failed: connection refused")

    monkeypatch.setitem(processes._stores, place, torch.distributed.HashStore())
    monkeypatch.setattr(processes, "meet", lambda store, world: None)
    monkeypatch.setattr(watchdog.Watchdog, "start", lambda *_args: dog)
    monkeypatch.setattr(torch.distributed, "init_process_group", refused)
    monkeypatch.setattr(processes, "_joined", itertools.count())
    torch.distributed.PrefixStore("dmltool/0", processes._stores[place]).set("address", "")
    with pytest.raises(DmlError, match="cannot join the 2 processes") as caught:
        join()
    assert "GLOO_SOCKET_IFNAME=eth0" in caught.value.fix
    assert stopped == [{"failed": True}]


@pytest.mark.parametrize(
    ("address", "of_rank_0", "interface"),
    [("192.0.2.7", "192.0.2.1", "eth7"), ("", "192.0.2.1", "eth1"), ("", "", None)],
)
def test_gloo_listens_where_other_machines_connect(monkeypatch, address, of_rank_0, interface):
    """A rank on the machine of rank 0 has no connection that leaves it."""
    names = {"192.0.2.1": "eth1", "192.0.2.7": "eth7"}
    monkeypatch.setattr(processes, "interface_of", names.get)
    monkeypatch.setenv(processes.INTERFACE, "")  # restored at the end
    monkeypatch.delenv(processes.INTERFACE)
    store = torch.distributed.HashStore()
    processes._choose_interface(SimpleNamespace(address=of_rank_0), store, World(0, 3, 0))
    monkeypatch.delenv(processes.INTERFACE, raising=False)
    processes._choose_interface(SimpleNamespace(address=address), store, World(1, 3, 0))
    assert os.environ.get(processes.INTERFACE) == interface
    monkeypatch.setenv(processes.INTERFACE, "chosen")
    processes._choose_interface(SimpleNamespace(address=address), store, World(1, 3, 0))
    assert os.environ[processes.INTERFACE] == "chosen"


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
