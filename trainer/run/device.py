"""Choose the device, the precision and the threads of a run."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from retrieval.errors import DmlError
from retrieval.resources import allowed, faster_threads, told_allowed, told_threads
from trainer.config import Config
from trainer.run.scoring import Embeds, embed

Module = TypeVar("Module", bound=nn.Module)
CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # whoever sets them has decided
PIXELS = 16 * 64 * 64  # of all images of a trial: a fraction of a second for a ResNet-50


def to_input(images: Tensor, device: torch.device) -> Tensor:
    """uint8 (B, 3, H, W) -> float in [0, 1] on the device."""
    return images.to(device, non_blocking=True).float().div_(255)


def in_layout(network: Module, layout: torch.memory_format) -> Module:
    """The network with its weights in this memory format, which torch's types leave out."""
    to: Callable[..., Module] = network.to
    return to(memory_format=layout)


def precision(config: Config, device: torch.device) -> torch.dtype | None:
    """The type of autocast; None: float32 throughout."""
    name = config.run.precision
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def pick_device(name: str) -> torch.device:
    """The device of that name; auto: a GPU if there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DmlError(
            f"There is no device {name!r}.",
            "There are cpu, cuda, cuda:1 and mps, among others.",
            "For an NVIDIA GPU: --device cuda. Leave --device out, and the best one is picked.",
        ) from error
    try:
        torch.empty(1, device=device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise DmlError(
            f"The device {name!r} cannot be used.",
            f"The reason that torch gives: {str(error).splitlines()[0].rstrip('.')}.",
            "Leave --device out: the best one is picked.",
        ) from error


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Refuse operations whose result can differ from run to run, if wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not wanted
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark


def use_threads(network: Embeds, size: int, wanted: int = 0, before: int = 0) -> str:
    """Set the threads of torch; return a note for the user, or nothing.

    size: sides of the images. wanted: by the user, 0: not said. before: those of a run that is
    resumed; others would change the last bits of its result.
    """
    if wanted:
        torch.set_num_threads(allowed(wanted))
        return told_allowed(wanted)
    if before:
        torch.set_num_threads(allowed(before))
        return ""
    if any(os.environ.get(name) for name in CHOSEN):
        return ""
    most = allowed(torch.get_num_threads())
    device = torch.device("cpu")
    images = torch.zeros(max(2, PIXELS // size**2), 3, size, size, dtype=torch.uint8)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        began = time.perf_counter()
        embed(network, [images], lambda batch: to_input(batch, device))
        return time.perf_counter() - began

    if most > 1:
        seconds(most)  # the first run allocates
    threads, gain = faster_threads(seconds, most)
    torch.set_num_threads(threads)
    return told_threads(threads, gain, most) if most > 1 else ""
