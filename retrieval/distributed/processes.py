"""Connect the processes of a job that torchrun or srun started, and let them work together.

torch connects the processes and is imported when there are several: a process that is alone needs
none.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from retrieval import signals
from retrieval.distributed.interfaces import interface_of
from retrieval.distributed.world import SLURM, World, from_environment
from retrieval.errors import DmlError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from retrieval.distributed.watchdog import Watchdog

T = TypeVar("T")
JOIN = timedelta(seconds=50)
"""All ranks start within this time, or the others stop."""
GRACE = timedelta(seconds=4)
"""How long after that torch may take to say so itself."""
LAST = timedelta(seconds=1)
"""How long the last attempt takes, which finds the reason."""
TIMEOUT = timedelta(days=1)
"""How long ranks wait for one another; the watchdog ends them if one dies."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the network interface of torch's gloo."""
HOW_TO_CONNECT = (
    f"Set {INTERFACE} on every machine to the interface that connects it with the others, such as "
    f"eth0: export {INTERFACE}=eth0"
)
LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe")

_joined = itertools.count()
_stores: dict[tuple[str, int], Store] = {}  # kept: who comes back meets the others there again


def reports_fully() -> bool:
    """Whether this process reports an error in full: rank 0, or one that had joined the others.

    An error before that, such as a wrong option, is the same on every rank that one command
    started: torchrun is started on each machine, and srun once.
    """
    try:
        world = from_environment()
    except DmlError:
        return (os.environ.get("LOCAL_RANK") or os.environ.get(SLURM[0], "0")) == "0"
    first = world.rank if world.by_slurm else world.local_rank
    return bool(_stores) or first == 0


# Join and leave


class OtherRankEnded(DmlError):
    """A rank stops because another one has ended; the other one reports the reason."""

    def __init__(self, rank: int, other: str) -> None:
        super().__init__(f"Rank {rank} stops, because {other or 'another process'} has ended.")


@contextmanager
def joined(device_type: str = "cpu") -> Iterator[World]:
    """Join the other processes of this job, if there are any.

    The others leave after rank 0, which may work on alone for hours, such as on k-means. A rank
    that fails inside ends the others within a minute. Its reason is reported once: the first rank
    to fail raises its own error, the others raise `OtherRankEnded`, which names it.
    """
    world = from_environment()
    if world.size == 1:
        yield world
        return
    from retrieval.distributed.watchdog import INTERRUPTED

    store, dog = _join(world, device_type)
    try:
        yield world
        dog.stop(done=True)
        _disconnect()  # what it holds is free while this rank waits
        if world.rank and (other := dog.wait_for_first()):
            if other == INTERRUPTED:
                raise KeyboardInterrupt
            raise OtherRankEnded(world.rank, other)
    except OtherRankEnded:
        raise
    except Exception as error:
        own = _is_own(error, store)
        other = dog.stop(failed=own)
        if own:
            raise
        raise OtherRankEnded(world.rank, other) from error
    finally:
        dog.stop(failed=True)
        _disconnect()


def _disconnect() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def _is_own(error: Exception, store: Store) -> bool:
    """Whether this rank reports the error: no rank failed before, or it is a command's exit."""
    from click.exceptions import Exit
    from torch.distributed import DistError

    if isinstance(error, Exit | BrokenPipeError):
        return True
    lost = isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)
    if lost or isinstance(error, DistError):
        return False
    try:
        return store.add("failed", 1) == 1
    except RuntimeError:  # the rank that holds the store is gone
        return False


def _join(world: World, device_type: str) -> tuple[Store, Watchdog]:
    from torch import distributed

    if not distributed.is_available():
        raise apart(f"{world.size} processes", "This build of torch has no torch.distributed.")
    from retrieval.distributed.watchdog import Watchdog

    backend = backend_for(device_type, world)
    dog = None
    # torch waits longer than its timeout for a machine that does not answer, and in C++.
    late = threading.Timer((JOIN + GRACE).total_seconds(), _give_up, [world])
    late.daemon = True
    late.start()
    try:
        place = world.host, world.port
        server = _stores.get(place) or _connect(world)
        store = distributed.PrefixStore(f"dmltool/{next(_joined)}", server)
        meet(store, world)
        _stores[place] = server
        dog = Watchdog.start(store, world.rank, world.size, world.host)
        late.cancel()
        if backend == "gloo":
            _choose_interface(dog, store, world)
        distributed.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT
        )
        # Who left at once would seem to have died to those that are still connecting.
        meet(distributed.PrefixStore("connected", store), world)
    except (RuntimeError, ValueError, OSError) as error:
        if dog:  # it would end this process before the error is shown
            dog.stop(failed=True)
        what, fix = _not_joined(world)
        why = str(error).split("\n")[0]
        if "EADDRINUSE" in why:
            why = f"Another program uses the port {world.port} (EADDRINUSE)."
        elif "client socket" in why:  # of torch, which does not say why
            why = _why_silent(world)
        raise DmlError(what, why, HOW_TO_CONNECT if "gloo" in why.lower() else fix) from error
    finally:
        late.cancel()
    return store, dog


def _connect(world: World) -> Store:
    """The store of this job, which rank 0 or torchrun holds. `meet` waits for the other ranks."""
    from torch.distributed import TCPStore

    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not world.by_slurm
    return TCPStore(
        world.host,
        world.port,
        world.size,
        is_master=world.rank == 0 and not held,
        timeout=JOIN,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _not_joined(world: World) -> tuple[str, str]:
    """For errors: what this rank cannot do, and how to mend it."""
    where = f"{world.host}:{world.port}"
    return (
        f"Rank {world.rank} cannot join the {world.size} processes at {where}.",
        "Start all of them, with a reachable MASTER_ADDR and a free MASTER_PORT: "
        f"{world.how_to_start}",
    )


def _choose_interface(dog: Watchdog, store: Store, world: World) -> None:
    """Let gloo listen where the ranks of other machines reach this one."""
    if world.rank == 0:
        store.set("address", dog.address)
    if INTERFACE not in os.environ:
        address = dog.address or store.get("address").decode()
        if address and (name := interface_of(address)):
            os.environ[INTERFACE] = name


def _give_up(world: World) -> None:
    """End this process, whose main thread waits in torch for an answer."""
    what, fix = _not_joined(world)
    lines = [f"Error: {what}"]
    if reports_fully():
        lines += [f"  {_why_silent(world)}", f"  Fix: {fix}"]
    signals.say("\n".join([*lines, ""]))
    os._exit(1)


def _why_silent(world: World) -> str:
    """What is wrong with the place where the ranks meet, after a last attempt."""
    try:
        socket.create_connection((world.host, world.port), LAST.total_seconds()).close()
    except OSError as error:
        return f"It cannot be reached: {error.strerror or error}."
    return "What listens there does not answer: another program, or a rank that has ended."


def meet(store: Store, world: World) -> None:
    """Wait until all ranks are here; RuntimeError names those that did not come in time."""
    ranks = [str(rank) for rank in range(world.size)]
    store.set(str(world.rank), "here")
    try:
        store.wait(ranks, JOIN)
    except RuntimeError as error:
        missing = ", ".join(rank for rank in ranks if not store.check([rank]))
        raise RuntimeError(
            f"These ranks have not joined after {JOIN.seconds} seconds: {missing}."
        ) from error


def backend_for(device_type: str, world: World) -> str:
    """The backend of torch.distributed for a device; selects the GPU of this rank."""
    from torch import cuda, distributed

    if device_type == "cuda":
        if not distributed.is_nccl_available():
            raise apart("Several GPUs", "This build of torch has no NCCL.")
        cuda.set_device(own_gpu(world))
        return "nccl"
    if device_type != "cpu":
        raise apart(f"Processes on {device_type}", "Only those on cuda and on cpu can.")
    return "gloo"


def own_gpu(world: World) -> int:
    """The number of this rank's GPU; srun may show each task only its own, as number 0."""
    from torch import cuda

    found = cuda.device_count()
    if world.by_slurm and found == 1:
        return 0
    if world.local_rank >= found:
        raise DmlError(
            f"Rank {world.rank} has no GPU of its own.",
            f"Its LOCAL_RANK is {world.local_rank}; this machine shows {found} GPUs.",
            f"Start fewer: torchrun --nproc-per-node={max(found, 1)}, or --device cpu",
        )
    return world.local_rank


def apart(who: str, why: str) -> DmlError:
    """The error for processes that cannot send each other tensors."""
    fix = "Start one process, or use --device cpu."
    return DmlError(f"{who} cannot work together.", why, fix)


# Work together


def require_same_options(options: Mapping[str, object], world: World, may_differ: str) -> None:
    """Raise unless all ranks were started with these options and values.

    may_differ: for the error, the names of the options that are not compared.
    """
    first, *others = gather({name: repr(value) for name, value in options.items()}, world)
    for rank, other in enumerate(others, 1):
        for name in first | other:
            here, there = (given.get(name, "not there") for given in (first, other))
            if here != there:
                raise DmlError(
                    "The processes were started with different options.",
                    f"{name} is {there} for rank {rank}, and {here} for rank 0.",
                    "Start all of them by the same command. These may differ: names of files "
                    f"and folders, {may_differ}.",
                )


def agree(flag: bool, world: World) -> bool:
    """Whether the flag of any rank is true; all ranks wait here for each other."""
    return any(gather(flag, world))


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
    from torch import distributed

    box: list[Any] = [make() if world.rank == 0 else None]
    distributed.broadcast_object_list(box, src=0, device=carrier_device(world))
    return box[0]


def gather(value: T, world: World) -> list[T]:
    """The values of all ranks in order, on every rank; all of them wait here for each other."""
    if world.size == 1:
        return [value]
    from torch import distributed

    box: list[Any] = [None] * world.size
    distributed.all_gather_object(box, value)
    return box


def carrier_device(world: World) -> torch.device:
    """The device that tensors have to be on to be sent between ranks."""
    import torch

    if torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", own_gpu(world))
    return torch.device("cpu")
