"""Check in a child process whether this CPU really computes in half precision.

A virtual machine may advertise instructions (AMX) that it does not let programs use. oneDNN, which
computes for torch, believes the processor, and the first bf16 layer ends the process.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import nn

from retrieval.errors import DmlError
from trainer.run.device import in_layout

VARIABLE, LIMIT = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
SECONDS = 60.0  # of a child that takes some hundredths of one

Attempt = Callable[[torch.dtype], None]


def allow_half(dtype: torch.dtype, attempt: Attempt | None = None) -> str | None:
    """Make half precision safe on the CPU, or raise; a note where oneDNN had to be limited.

    The child is a fork: oneDNN reads its limit at its first use and keeps it, and a fork is in the
    same state as this process.
    """
    if sys.platform != "linux":  # elsewhere a fork may not compute
        return None
    attempt = attempt or train_layers
    fault = fault_of(dtype, attempt)
    if fault is None:
        return None
    fix = "Train in float32: --precision fp32"
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = LIMIT
        if fault_of(dtype, attempt) is None:
            return f"{fault}: oneDNN is limited to {LIMIT} ({VARIABLE})"
        del os.environ[VARIABLE]
        fix += f"; or set {VARIABLE}={LIMIT} before the program starts"
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    raise DmlError(f"This CPU cannot compute in {name}.", f"{fault}.", f"{fix}.")


def fault_of(dtype: torch.dtype, attempt: Attempt) -> str | None:
    """What happens to a child process that computes in half precision; None: it succeeds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(dtype, attempt, theirs), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child.start()
    theirs.close()
    try:
        child.join(SECONDS)
        if child.exitcode is None:
            return f"Half precision did not end within {SECONDS:.0f} seconds in a trial"
        if child.exitcode < 0:
            name = signal.strsignal(-child.exitcode) or f"signal {-child.exitcode}"
            return f"Half precision ended a trial process with {name!r}"
        if child.exitcode > 0:
            return f"A trial process of half precision ended with exit code {child.exitcode}"
        return ours.recv()
    finally:
        ours.close()
        if child.exitcode is None:
            child.kill()
            child.join()
        child.close()


def _in_child(dtype: torch.dtype, attempt: Attempt, told: Connection) -> None:
    """Compute in silence: no traceback of the signal, no core file."""
    import resource  # which Windows does not have

    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)  # the threads of the parent are not here
    try:
        attempt(dtype)
        told.send(None)
    except Exception as error:
        told.send(str(error).split("\n", 1)[0].rstrip("."))


def train_layers(dtype: torch.dtype) -> None:
    """A training step of a convolution and a linear layer that fill several tiles of AMX."""
    for layout in (torch.contiguous_format, torch.channels_last):
        convolution = in_layout(nn.Conv2d(32, 64, 3, padding=1), layout)
        network = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(64 * 8 * 8, 256))
        images = torch.rand(32, 32, 8, 8).to(memory_format=layout)
        with torch.autocast("cpu", dtype):
            loss = network(images).float().square().mean()
        loss.backward()
