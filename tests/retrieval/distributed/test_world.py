"""The variables of torchrun and Slurm, and the processes that they describe."""

import pytest

from retrieval import resources
from retrieval.distributed.world import World, first_host, from_environment, tasks_per_node
from retrieval.errors import DmlError
from tests.ranks import FITTING


def test_without_torchrun_a_process_is_alone(environment):
    environment(MASTER_ADDR="somewhere")  # some clusters set it for everything
    assert from_environment() == World() == World(0, 1, 0)


def test_a_rank_without_the_number_of_processes_is_one_process(environment):
    environment(RANK="3")
    assert from_environment() == World()
    environment(RANK="3", WORLD_SIZE="")
    assert from_environment() == World()
    environment(WORLD_SIZE="1")
    assert from_environment() == World()
    environment(WORLD_SIZE="2")
    with pytest.raises(DmlError, match="WORLD_SIZE=2") as caught:
        from_environment()
    assert "Without a value: LOCAL_RANK" in caught.value.why
    assert "unset WORLD_SIZE" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"WORLD_SIZE": "two"}, "whole numbers"),
        ({"LOCAL_RANK": "", "MASTER_ADDR": ""}, "Without a value: LOCAL_RANK, MASTER_ADDR"),
        ({"RANK": "2"}, "LOCAL_RANK <= RANK < WORLD_SIZE"),
        ({"LOCAL_RANK": "-1"}, "0 <= LOCAL_RANK"),
        ({"RANK": "one"}, "whole numbers"),
        ({"LOCAL_WORLD_SIZE": "0"}, "at least 1"),
    ],
)
def test_variables_that_do_not_fit_are_shown(environment, changes, why):
    environment(**FITTING | changes)
    with pytest.raises(DmlError) as caught:
        from_environment()
    assert "MASTER_PORT=29500" in caught.value.what
    assert why in caught.value.why
    assert "torchrun" in caught.value.fix


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
@pytest.mark.parametrize("by_slurm", [False, True])
def test_a_port_that_cannot_be_is_refused_before_anyone_waits(environment, port, by_slurm):
    environment(**(STEP if by_slurm else FITTING) | {"MASTER_PORT": port})
    with pytest.raises(DmlError, match=f"MASTER_PORT={port} is not a port"):
        from_environment()


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
    world = from_environment()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 7, 1, 3)
    assert world.host == "gpu08"
    assert 20_000 <= world.port < 40_000
    environment(SLURM_STEP_ID="3")
    assert from_environment().port != world.port
    environment(MASTER_ADDR="10.0.0.1", MASTER_PORT="5")
    world = from_environment()
    assert (world.host, world.port) == ("10.0.0.1", 5)


@pytest.mark.parametrize("tasks", [None, "1"])
def test_a_shell_of_sbatch_or_salloc_is_alone(environment, tasks, monkeypatch):
    """It has a rank and a number of tasks; what is missing is a step with several."""
    environment(**STEP)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    if tasks:
        environment(SLURM_STEP_NUM_TASKS=tasks)  # srun --pty bash
    assert from_environment() == World()


def test_a_job_script_that_exports_the_number_of_tasks_leaves_them_to_srun(environment):
    environment(**STEP, WORLD_SIZE="7", MASTER_ADDR="gpu08", MASTER_PORT="29500")
    world = from_environment()
    assert (world.rank, world.size, world.by_slurm) == (5, 7, True)
    assert (world.host, world.port) == ("gpu08", 29500)


@pytest.mark.parametrize("size", ["1", "14"])
def test_a_job_script_that_exports_another_number_is_told_both(environment, size):
    """With 1, every task would do the whole work."""
    environment(**STEP, WORLD_SIZE=size)
    with pytest.raises(DmlError, match=f"WORLD_SIZE={size}, SLURM_STEP_NUM_TASKS=7") as caught:
        from_environment()
    assert caught.value.fix.endswith(": unset WORLD_SIZE")


def test_torchrun_inside_a_step_of_slurm_comes_first(environment):
    environment(**STEP | FITTING)
    assert from_environment().size == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"SLURM_PROCID": ""}, "Without a value: SLURM_PROCID."),
        ({"SLURM_STEP_NODELIST": ""}, "do not name rank and machine"),
        ({"SLURM_NODEID": "one"}, "whole numbers"),
    ],
)
def test_a_step_without_rank_or_machine_is_refused(environment, changes, why):
    environment(**STEP | changes | {"SLURM_JOB_NODELIST": ""})
    with pytest.raises(DmlError, match="SLURM_STEP_NUM_TASKS=7") as caught:
        from_environment()
    assert why in caught.value.why
    assert "Let srun set them: srun " in caught.value.fix
    assert "unset SLURM_STEP_NUM_TASKS" in caught.value.fix


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
