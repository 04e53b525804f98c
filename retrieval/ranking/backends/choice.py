"""Choose the device that counts ranks. torch is imported only if there may be a GPU."""

from __future__ import annotations

import logging
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from retrieval.distributed.world import from_environment
from retrieval.errors import DmlError, install
from retrieval.resources import gpu_fault

PATTERN = re.compile(r"auto|cpu|cuda(:\d+)?")
DEVICES = "auto, cpu, cuda or a GPU such as cuda:1"
# Multiplications that a CPU does sooner than torch is imported and a GPU set up.
SMALL = 10**11
# Those that it does sooner than a GPU is tried, once torch is imported: of 1,000 items, say.
TINY = 1 << 32
# Made by NVIDIA's driver on Linux: to look at it takes no time, to ask the driver may take seconds.
DRIVER = Path("/dev/nvidiactl")
# Tests set it to "torch", which then counts on the CPU.
VARIABLE = "DMLTOOL_BACKEND"
NOTES = logging.getLogger("retrieval.device")
"""Gets the note of each choice; the commands show it."""


class Choice(NamedTuple):
    """The devices that count ranks."""

    devices: tuple[str, ...] = ()  # names of torch; none: NumPy on the CPU
    note: str = ""  # which device was chosen and why, where that is worth a line


def choose(device: str, queries: int, gallery: int, dim: int) -> Choice:
    """Choose devices for the ranks of so many queries and gallery items.

    auto takes the GPUs that torch can use and whose trial product is right; a CPU where there are
    none, or where the work is small. A requested GPU that does not work is an error.
    """
    chosen = _chosen(device, queries, gallery, dim)
    if chosen.note:
        NOTES.info(chosen.note)
    return chosen


def _chosen(device: str, queries: int, gallery: int, dim: int) -> Choice:
    if not PATTERN.fullmatch(device):
        raise DmlError(
            f"There is no device {device!r}.",
            f"Ranks are counted on {DEVICES}.",
            "Choose one of these.",
        )
    if device in ("auto", "cpu") and os.environ.get(VARIABLE) == "torch":
        return Choice(("cpu",))
    if device == "cpu":
        return Choice()
    if device != "auto":
        return _requested(device, dim)
    if queries * gallery * dim < (TINY if "torch" in sys.modules else SMALL):
        sooner = "Ranks are counted on the CPU, which is faster for a small problem."
        return Choice((), sooner if DRIVER.exists() else "")
    if gpu_fault() is not None:
        return Choice()
    if missing := _missing():
        return Choice((), f"Ranks are counted on the CPU: {missing}.")
    return _automatic(dim)


def require_device(device: str) -> None:
    """Raise if a requested device cannot be used, before the long work."""
    if device != "auto":
        choose(device, 1, 1, 1)


def _automatic(dim: int) -> Choice:
    """Take all GPUs that work."""
    from retrieval.ranking.backends.trial import cuda_devices, fault_of, title

    devices = _own(cuda_devices())
    if not devices:
        return Choice((), "Ranks are counted on the CPU: torch finds no GPU.")
    faults = {name: fault for name in devices if (fault := fault_of(name, dim))}
    good = tuple(name for name in devices if name not in faults)
    wrong = "; ".join(f"{name} is left out, {fault}" for name, fault in faults.items())
    if not good:
        return Choice((), f"Ranks are counted on the CPU: {wrong}.")
    reason = "its trial product is right" if len(good) == 1 else "their trial products are right"
    taken = f"Ranks are counted on {', '.join(good)} ({title(good[0])}): {reason}"
    return Choice(good, f"{taken}; {wrong}." if wrong else f"{taken}.")


def _requested(device: str, dim: int) -> Choice:
    """Take the requested GPU, or all for `cuda`; an error if one does not work."""
    fix = "Count on the CPU: --device cpu"
    if missing := _missing():
        if fault := gpu_fault():  # another build of torch would not help
            missing = fault
        else:
            fix = f"{install('gpu')}, in an environment of its own"
        raise DmlError(f"The device {device} cannot be used.", f"{_sentence(missing)}.", fix)
    from retrieval.ranking.backends.trial import cuda_devices, fault_of

    devices = cuda_devices()
    if not devices:
        why = gpu_fault() or "torch finds no GPU"
        raise DmlError(f"The device {device} cannot be used.", f"{_sentence(why)}.", fix)
    if device != "cuda" and device not in devices:
        raise DmlError(
            f"There is no device {device}.",
            f"The GPUs that torch finds are {', '.join(devices)}.",
            "Choose one of these.",
        )
    taken = _own(devices) if device == "cuda" else (device,)
    for name in taken:
        if fault := fault_of(name, dim):
            raise DmlError(f"The device {name} cannot be used.", f"{_sentence(fault)}.", fix)
    return Choice(taken)


def _own(devices: tuple[str, ...]) -> tuple[str, ...]:
    """The devices of this process: all, or one of them where a machine has several processes."""
    world = from_environment()
    if world.local_size == 1 or not devices:
        return devices
    return (devices[world.local_rank % len(devices)],)


def _missing() -> str | None:
    """Why torch cannot use a GPU, found out without importing it; None if it may."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return "torch is not installed"
    try:
        text = Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return None
    builds = re.findall(r"^(?:cuda|hip)\b[^=\n]*= *(.+)$", text, re.MULTILINE)
    if builds and all(build.strip() == "None" for build in builds):
        return "the installed torch is a build for CPUs"
    return None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
