"""Two processes with a share of the batch each give what one process gives with all of it.

The file is also the script of those processes: `python test_distributed.py FOLDER`.
"""

import copy
import os
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from retrieval.errors import DmlError
from trainer.losses import LOSSES, build
from trainer.losses.miners import add_miner
from trainer.run import distributed
from trainer.run.distributed import World

ROOT = Path(__file__).parents[3]
CLASSES, DIM, BATCH, STEPS = 6, 5, 12, 3
MINED = ["margin distance_weighted", "multi_similarity multi_similarity", "triplet semihard"]
NAMES = [*(entry.name for entry in LOSSES), *MINED]
SHARE = 6  # images of each rank
TOTALS = [0, 1, 2, 5, 8]


def make(name):
    """A network without BatchNorm and a loss with a head that is not zero, the same everywhere."""
    torch.manual_seed(len(name))
    network = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, DIM)).double()
    name, _, miner = name.partition(" ")
    loss = build(name, CLASSES, DIM).double()
    if miner:
        add_miner(loss, name, miner, {})
    for parameter in loss.parameters():
        nn.init.normal_(parameter)
    return network, loss


def images(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 7, dtype=torch.float64, generator=generator)
    return x, torch.randperm(BATCH, generator=generator) % 4


def descend(*modules):
    with torch.no_grad():
        for parameter in (p for module in modules for p in module.parameters()):
            parameter -= 0.05 * parameter.grad


def trained_by_one(name):
    """Losses, and the gradients of the last step. No line of the tested code."""
    network, loss = make(name)
    values = []
    for step in range(STEPS):
        x, labels = images(step)
        network.zero_grad()
        loss.zero_grad()
        torch.manual_seed(100 + step)  # anchors and dropout
        value = loss(network(x), labels)
        value.backward()
        values.append(value.item())
        descend(network, loss)
    return values, gradients(network), gradients(loss)


def trained_by_rank(name, world):
    network, loss = make(name)
    wrapped = distributed.wrap(network, world, torch.device("cpu"))
    own = slice(SHARE * world.rank, SHARE * (world.rank + 1))
    values = []
    for step in range(STEPS):
        x, labels = images(step)
        wrapped.zero_grad()
        loss.zero_grad()
        torch.manual_seed(100 + step)
        z, y = distributed.gather_batch(wrapped(x[own]), labels[own], world)
        assert torch.equal(y, labels)
        value = loss(z, y)
        value.backward()
        distributed.average_gradients(loss, world)
        values.append(value.item())
        descend(network, loss)
    return values, gradients(network), gradients(loss)


def gradients(module):
    return [parameter.grad.clone() for parameter in module.parameters()]


def rows(total):
    return torch.arange(3.0 * total).reshape(total, 3)


def mean_of_different_gradients(world):
    module = nn.Linear(3, 2)
    for n, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, n + 4.0 * world.rank)
    module.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    distributed.average_gradients(module, world)
    return [module.weight.grad, module.bias.grad], module.unused.grad


def shared_statistics(world):
    norm = nn.BatchNorm1d(2)
    norm.running_mean.fill_(world.rank + 1)
    norm.num_batches_tracked.fill_(world.rank + 1)
    distributed.share_buffers(norm, world)
    return norm.running_mean.tolist(), norm.num_batches_tracked.item()


def of_rank(world):
    """Everything that the tests below look at."""
    return {
        "world": (world.rank, world.size, world.local_rank),
        "steps": {name: trained_by_rank(name, world) for name in NAMES},
        "rows": [
            distributed.gather_rows(rows(n)[world.rank :: world.size], n, world) for n in TOTALS
        ],
        "labels": distributed.gather_rows(torch.arange(7)[world.rank :: world.size], 7, world),
        "agree": [
            distributed.agree(flag, world) for flag in (False, world.rank == 1, world.rank == 0)
        ],
        "mean": mean_of_different_gradients(world),
        "buffers": shared_statistics(world),
    }


def main(folder):
    warnings.simplefilter("ignore")
    world = distributed.join("cpu")
    torch.save(of_rank(world), Path(folder) / f"{world.rank}.pt")
    distributed.leave(world)


def launch(folder, size):
    """The errors of the ranks that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [text for text, rank in zip(errors, ranks, strict=True) if rank.returncode]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    failed = launch(folder, 2)
    if any("EADDRINUSE" in text for text in failed):  # another program took the port meanwhile
        failed = launch(folder, 2)
    assert not failed, "\n".join(failed)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


# two processes


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_have_the_loss_and_gradients_of_one(ranks, name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the lambda of", UserWarning)  # pce of a small batch
        values, of_network, of_loss = trained_by_one(name)
    assert any(gradient.abs().max() > 1e-6 for gradient in of_network)
    for rank in ranks:
        found = rank["steps"][name]
        assert found[0] == pytest.approx(values, rel=1e-10, abs=1e-10)
        torch.testing.assert_close(found[1], of_network, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found[2], of_loss, rtol=1e-10, atol=1e-10)


def test_ranks_know_their_place(ranks):
    assert [rank["world"] for rank in ranks] == [(0, 2, 0), (1, 2, 1)]


def test_rows_of_any_number_come_back_in_order_on_every_rank(ranks):
    for rank in ranks:
        for total, found in zip(TOTALS, rank["rows"], strict=True):
            assert torch.equal(found, rows(total))
        assert rank["labels"].tolist() == list(range(7))


def test_one_yes_is_a_yes_for_all(ranks):
    for rank in ranks:
        assert rank["agree"] == [False, True, True]


def test_gradients_are_averaged_and_missing_ones_stay_missing(ranks):
    for rank in ranks:
        (weight, bias), unused = rank["mean"]
        assert weight.unique().tolist() == [2.0]
        assert bias.unique().tolist() == [3.0]
        assert unused is None


def test_statistics_of_rank_0_are_shared(ranks):
    for rank in ranks:
        assert rank["buffers"] == ([1.0, 1.0], 1)


# one process


@pytest.fixture
def environment(monkeypatch):
    for name in distributed.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return lambda **given: [monkeypatch.setenv(name, value) for name, value in given.items()]


def test_without_torchrun_a_process_is_alone(environment):
    environment(MASTER_ADDR="somewhere")  # some clusters set it for everything
    assert distributed.join("cpu") == World() == World(0, 1, 0)


def test_one_process_of_torchrun_needs_no_group(environment):
    environment(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="a", MASTER_PORT="1")
    assert distributed.join("cpu") == World(0, 1, 0)
    assert not torch.distributed.is_initialized()


def test_alone_nothing_is_copied():
    world = World()
    z, labels = torch.randn(4, 3), torch.arange(4)
    network = nn.Linear(3, 2)
    assert distributed.gather_batch(z, labels, world) == (z, labels)
    assert distributed.gather_rows(z, 4, world) is z
    assert distributed.wrap(network, world, torch.device("cpu")) is network
    assert [distributed.agree(flag, world) for flag in (True, False)] == [True, False]
    distributed.average_gradients(network, world)
    distributed.share_buffers(network, world)
    distributed.leave(world)


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
        ({"WORLD_SIZE": ""}, "Without a value: WORLD_SIZE"),
        ({"LOCAL_RANK": "", "MASTER_ADDR": ""}, "Without a value: LOCAL_RANK, MASTER_ADDR"),
        ({"RANK": "2"}, "LOCAL_RANK <= RANK < WORLD_SIZE"),
        ({"LOCAL_RANK": "-1"}, "0 <= LOCAL_RANK"),
        ({"RANK": "one"}, "whole numbers"),
    ],
)
def test_variables_that_do_not_fit_are_shown(environment, changes, why):
    environment(**FITTING | changes)
    with pytest.raises(DmlError) as caught:
        distributed.join("cpu")
    assert "MASTER_PORT=29500" in caught.value.what
    assert why in caught.value.why
    assert "torchrun" in caught.value.fix


def test_a_torch_without_distributed_is_named(environment, monkeypatch):
    environment(**FITTING)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(DmlError, match=r"torch\.distributed"):
        distributed.join("cpu")


def test_devices_that_cannot_be_shared_are_named(environment, monkeypatch):
    environment(**FITTING)
    with pytest.raises(DmlError, match="mps"):
        distributed.join("mps")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DmlError, match="nproc-per-node=1"):
        distributed.join("cuda")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_never_comes_is_not_waited_for_long(environment, monkeypatch, rank):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment(**FITTING | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port})
    assert timedelta(minutes=1) > distributed.JOIN
    monkeypatch.setattr(distributed, "JOIN", timedelta(seconds=2))
    began = time.monotonic()
    with pytest.raises(DmlError, match=f"Rank {rank} cannot join the 2 processes"):
        distributed.join("cpu")
    assert time.monotonic() - began < 30


def test_ranks_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(distributed, "JOIN", timedelta(seconds=1))
    with pytest.raises(RuntimeError, match="rank 1, 2"):
        distributed.meet(torch.distributed.HashStore(), World(0, 3, 0))


def test_only_the_end_of_another_rank_is_told_as_such():
    ended = pytest.raises(DmlError, match="another process of this run has ended")
    with ended, distributed.together(World(1, 2, 1)):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    for world in (World(1, 2, 1), World()):
        with pytest.raises(RuntimeError, match="shapes"), distributed.together(world):
            raise RuntimeError("shapes do not fit")


def test_a_port_that_is_taken_is_named(environment):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        environment(**FITTING | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port})
        with pytest.raises(DmlError, match=f"Rank 0 cannot join the 2 processes at .*:{port}"):
            distributed.join("cpu")


class FrozenBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.norm = nn.BatchNorm1d(4, affine=False)

    def train(self, mode=True):
        super().train(mode)
        self.backbone[1].eval()
        return self


def test_only_batchnorm_that_learns_is_synchronised():
    network = FrozenBackbone().eval()
    network.norm.running_mean.fill_(3)
    weights = copy.deepcopy(network.state_dict())
    distributed.synchronise_batchnorm(network)
    assert type(network.backbone[1]) is nn.BatchNorm2d
    assert type(network.norm) is nn.SyncBatchNorm
    assert not network.norm.training
    assert network.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[key]) for key, value in network.state_dict().items())


if __name__ == "__main__":
    main(sys.argv[1])
