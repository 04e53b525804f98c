"""Train in several processes with the loss and gradients of one process.

Every rank embeds its share of a batch, gathers the embeddings of all, and computes the same loss
on them. `retrieval.distributed.processes` starts and ends their connection.
"""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from retrieval.distributed.processes import carrier_device, own_gpu
from retrieval.distributed.world import World


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
    return DistributedDataParallel(embedder, device_ids=[own_gpu(world)])


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
