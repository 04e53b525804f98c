"""Two processes with a share of the batch each give what one process gives with all of it.

The file is also the script of those processes: `python test_distributed.py FOLDER`.
"""

import copy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from retrieval.distributed import processes
from retrieval.distributed.world import World
from tests.ranks import together
from trainer.losses import LOSSES, build
from trainer.losses.miners import add_miner
from trainer.run import distributed

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
        "mean": mean_of_different_gradients(world),
        "buffers": shared_statistics(world),
    }


def main(folder):
    warnings.simplefilter("ignore")
    with processes.joined() as world:
        torch.save(of_rank(world), Path(folder) / f"{world.rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for outcome in together(2, __file__, folder):
        assert outcome.code == 0, outcome.stderr
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


def test_alone_nothing_is_copied():
    world = World()
    z, labels = torch.randn(4, 3), torch.arange(4)
    network = nn.Linear(3, 2)
    assert distributed.gather_batch(z, labels, world) == (z, labels)
    assert distributed.gather_rows(z, 4, world) is z
    assert distributed.wrap(network, world, torch.device("cpu")) is network
    distributed.average_gradients(network, world)
    distributed.share_buffers(network, world)


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
