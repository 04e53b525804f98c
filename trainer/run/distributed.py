"""Train in several processes with the loss and gradients of one process.

Every rank embeds its share of a batch, gathers the embeddings of all, and computes the same loss
on them. torchrun starts the ranks, on one machine or several; only its variables are read.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from retrieval.errors import DmlError

T = TypeVar("T")
JOIN = timedelta(seconds=50)
"""All ranks start within this time, or the others stop."""
TIMEOUT = timedelta(minutes=30)
"""The others wait while rank 0 checks images or writes; torchrun ends them if a rank dies."""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
START = "torchrun --nproc-per-node=2 $(which dmltool) train ..."


@dataclass(frozen=True)
class World:
    """The processes of a run. `local_rank` is the place on this machine, and the GPU there."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def join(device_type: str) -> World:
    """Join the processes that torchrun started; without its variables this process is alone."""
    world = from_environment()
    if world.size == 1:
        return world
    if not distributed.is_available():
        raise apart(f"{world.size} processes", "This build of torch has no torch.distributed.")
    backend = backend_for(device_type, world)
    try:
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=JOIN))
        meet(distributed.PrefixStore("dmltool", store), world)
        distributed.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT
        )
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise DmlError(
            f"Rank {world.rank} cannot join the {world.size} processes at {place}.",
            str(error).split("\n")[0],
            f"Start all of them, with a reachable address and a free port: {START}",
        ) from error
    return world


def meet(store: distributed.Store, world: World) -> None:
    """Wait until all ranks are here; RuntimeError names those that did not come in time."""
    store.set(str(world.rank), "here")
    try:
        store.wait([str(rank) for rank in range(world.size)], JOIN)
    except RuntimeError as error:
        missing = [str(rank) for rank in range(world.size) if not store.check([str(rank)])]
        raise RuntimeError(
            f"Not there after {JOIN.seconds} seconds: rank {', '.join(missing)}."
        ) from error


LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe")


@contextmanager
def together(world: World) -> Iterator[None]:
    """Turn the end of another rank into an error of this one; that rank reports why."""
    try:
        yield
    except RuntimeError as error:
        known = isinstance(error, distributed.DistError) or any(w in str(error) for w in LOST)
        if world.size == 1 or not known:
            raise
        raise DmlError(
            f"Rank {world.rank} stops, because another process of this run has ended.",
            "The message of that process says why.",
            "Start all of them again; a run with a checkpoint goes on with --resume.",
        ) from error


def from_environment() -> World:
    """Read the variables that torchrun sets."""
    if not any(name in os.environ for name in ("RANK", "WORLD_SIZE")):
        return World()
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise inconsistent(f"Without a value: {', '.join(missing)}.")
    try:
        rank, size, local_rank = (int(os.environ[name]) for name in VARIABLES[:3])
    except ValueError:
        raise inconsistent("They are whole numbers.") from None
    if not 0 <= local_rank <= rank < size:
        raise inconsistent("0 <= LOCAL_RANK <= RANK < WORLD_SIZE does not hold.")
    return World(rank, size, local_rank)


def inconsistent(why: str) -> DmlError:
    """The error for variables of torchrun that contradict each other."""
    given = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    return DmlError(
        f"The variables of a distributed run do not fit together: {given}.",
        why,
        f"Let torchrun set them: {START}; or unset RANK and WORLD_SIZE.",
    )


def backend_for(device_type: str, world: World) -> str:
    """The backend of torch.distributed for a device; selects the GPU of this rank."""
    if device_type == "cuda":
        found = torch.cuda.device_count()
        if world.local_rank >= found:
            raise DmlError(
                f"Rank {world.rank} has no GPU of its own.",
                f"Its LOCAL_RANK is {world.local_rank}; this machine shows {found} GPUs.",
                f"Start fewer: torchrun --nproc-per-node={max(found, 1)}, or --device cpu",
            )
        if not distributed.is_nccl_available():
            raise apart("Several GPUs", "This build of torch has no NCCL.")
        torch.cuda.set_device(world.local_rank)
        return "nccl"
    if device_type != "cpu":
        raise apart(f"Processes on {device_type}", "Only those on cuda and on cpu can.")
    return "gloo"


def apart(who: str, why: str) -> DmlError:
    """The error for processes that cannot send each other tensors."""
    fix = "Train with one process, or with --device cpu."
    return DmlError(f"{who} cannot work together.", why, fix)


def leave(world: World) -> None:
    """End the connection to the other processes."""
    if world.size > 1 and distributed.is_initialized():
        distributed.destroy_process_group()


def wrap(embedder: nn.Module, world: World, device: torch.device) -> nn.Module:
    """Wrap a network so that its gradients are averaged; one process gets the network itself.

    On GPUs, BatchNorm layers that learn statistics in training take them from all ranks. torch has
    no such layer for the CPU: there each rank normalises with its own share of the batch, and the
    result is not that of a single process.
    """
    if world.size == 1:
        return embedder
    if device.type != "cuda":
        return DistributedDataParallel(embedder)
    synchronise_batchnorm(embedder)
    return DistributedDataParallel(embedder, device_ids=[world.local_rank])


def synchronise_batchnorm(network: nn.Module) -> None:
    """Convert the BatchNorm layers that learn, in place; frozen ones stay in evaluation mode."""
    was_training = network.training
    network.train()
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and child.training:
                setattr(parent, name, nn.SyncBatchNorm.convert_sync_batchnorm(child))
    network.train(was_training)


def share_buffers(module: nn.Module, world: World) -> None:
    """Give all ranks the buffers of rank 0, such as BatchNorm's statistics."""
    if world.size > 1:
        for buffer in module.buffers():
            distributed.broadcast(buffer, src=0)


def gather_batch(embeddings: Tensor, labels: Tensor, world: World) -> tuple[Tensor, Tensor]:
    """Join the shares of all ranks, which have the same size: (b, D), (b,) -> (B, D), (B,).

    All ranks have to compute the same loss on the result, from the same state of torch's
    generators. Then no gradient needs to be sent: each rank has the one of its own rows. It is
    multiplied by the number of ranks, which DistributedDataParallel divides by.
    """
    if world.size == 1:
        return embeddings, labels
    return _Gather.apply(embeddings, world), torch.cat(all_gather(labels, world))


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, world: World) -> Tensor:
        ctx.size = world.size
        ctx.start = world.rank * len(own)
        ctx.end = ctx.start + len(own)
        return torch.cat(all_gather(own, world))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.size * gradient[ctx.start : ctx.end], None


def gather_rows(own: Tensor, total: int, world: World) -> Tensor:
    """Join rows in order on every rank; rank r holds the rows r, r + size, ... of `total`."""
    assert len(own) == len(range(world.rank, total, world.size))
    if world.size == 1:
        return own
    most = -(-total // world.size)  # collectives take the same number of rows from each rank
    padded = own.new_zeros(most, *own.shape[1:], device=carrier_device(world))
    padded[: len(own)] = own
    return torch.stack(all_gather(padded, world), dim=1).flatten(0, 1)[:total].to(own.device)


def all_gather(own: Tensor, world: World) -> list[Tensor]:
    """The tensors of all ranks, which have the same shape."""
    own = own.detach().contiguous()
    shares = [torch.empty_like(own) for _ in range(world.size)]
    distributed.all_gather(shares, own)
    return shares


def average_gradients(module: nn.Module, world: World) -> None:
    """Average the gradients of the loss's parameters, which DistributedDataParallel does not see.

    Every rank has the same gradient already, but for the rounding of GPUs; so they stay in step.
    """
    for parameter in module.parameters() if world.size > 1 else ():
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad)
            parameter.grad /= world.size


def agree(flag: bool, world: World) -> bool:
    """Whether the flag of any rank is true; all ranks wait here for each other."""
    if world.size == 1:
        return flag
    votes = torch.tensor([int(flag)], device=carrier_device(world))
    distributed.all_reduce(votes, distributed.ReduceOp.MAX)
    return bool(votes.item())


@contextmanager
def first_alone(world: World) -> Iterator[None]:
    """Let the first process of each machine go ahead; the others find its files on the disk."""
    if world.local_rank:
        agree(False, world)
    yield
    if world.local_rank == 0:
        agree(False, world)


def from_first(make: Callable[[], T], world: World) -> T:
    """Call `make` on rank 0 and return its result on every rank; the others wait for it."""
    if world.size == 1:
        return make()
    box: list[Any] = [make() if world.rank == 0 else None]
    distributed.broadcast_object_list(box, src=0, device=carrier_device(world))
    return box[0]


def carrier_device(world: World) -> torch.device:
    """The device that tensors have to be on to be sent between ranks."""
    if distributed.get_backend() == "nccl":
        return torch.device("cuda", world.local_rank)
    return torch.device("cpu")
