"""A function called in a forked child with limits of time and memory, and how that ended.

The parent has imported what is needed, so a child costs milliseconds. It must have no threads of
its own: what they held would stay locked in the child. Linux only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from retrieval.errors import DmlError

OK, REFUSED = "ok", "refused"
BUG, SIGNAL, HANG, MEMORY, UNSTABLE = "exception", "signal", "hang", "memory", "unstable"
KINDS = (OK, REFUSED, BUG, SIGNAL, HANG, MEMORY, UNSTABLE)
FINDINGS = KINDS[2:]
GUARD = 2 << 30  # bytes of address space beyond the limit; what asks for more gets MemoryError
M_PERTURB = -6  # of mallopt: what fresh memory is filled with


@dataclass(frozen=True)
class Limits:
    seconds: float = 20.0
    memory: int = 200 << 20  # bytes beyond the parent's


@dataclass(frozen=True)
class Outcome:
    kind: str
    detail: str = ""
    value: str = ""  # what the function returned
    seconds: float = 0.0
    memory: int = 0  # bytes beyond the parent's


def attempt(
    function: Callable[[], str], limits: Limits | None = None, fill: int | None = None
) -> Outcome:
    """fill: the byte that fresh memory holds, so that what is read before it is written shows."""
    limits = limits or Limits()
    receive, send = os.pipe()
    said = os.memfd_create("said")
    began = monotonic()
    pid = os.fork()
    if not pid:
        os.close(receive)
        _child(function, limits, fill, send, said)
    os.close(send)
    try:
        status, peak = _wait(pid, limits.seconds)
        os.set_blocking(receive, False)  # a grandchild may keep the other end open
        try:
            told = os.read(receive, 1 << 16)
        except BlockingIOError:
            told = b""
        words = os.pread(said, 20_000, max(0, os.fstat(said).st_size - 20_000))
    finally:
        os.close(receive)
        os.close(said)
    before = int.from_bytes(told[:8], "little")
    memory, told = max(0, peak - before), told[8:]
    found = _judge(status, told, words.decode("utf-8", "replace"), memory > limits.memory)
    if found[0] == MEMORY and not found[1]:
        found = (MEMORY, f"{memory >> 20} MB of {limits.memory >> 20} MB", "")
    return Outcome(*found, monotonic() - began, memory)


def _child(
    function: Callable[[], str], limits: Limits, fill: int | None, send: int, said: int
) -> None:
    """Never returns."""
    told: dict[str, str] = {}
    try:
        os.setpgid(0, 0)
        os.write(send, rss().to_bytes(8, "little"))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for number, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = (
            os.fdopen(n, "w", errors="replace", closefd=False) for n in (1, 2)
        )
        faulthandler.enable(file=2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = address_space() + limits.memory + GUARD
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        if fill is not None:
            fill_memory(fill)
        told = _call(function)
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            os.write(send, json.dumps(told).encode()[:60_000])
        os._exit(0 if told else 1)


def _call(function: Callable[[], str]) -> dict[str, str]:
    try:
        return {"kind": OK, "value": function()}
    except DmlError as error:
        return {"kind": REFUSED, "detail": " ".join((error.what, error.why))[:500]}
    except MemoryError as error:
        return {"kind": MEMORY, "detail": f"MemoryError: {error} {_place(error)}"[:500]}
    except BaseException as error:
        return {"kind": BUG, "detail": f"{type(error).__name__}: {error} {_place(error)}"[:500]}


def _place(error: BaseException) -> str:
    """The innermost lines, of our own code if there are."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-4:]))


def _wait(pid: int, seconds: float) -> tuple[int | None, int]:
    """The exit status, None for a hang, and the peak of memory in bytes."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        ended = bool(poll.poll(1000 * seconds))
    finally:
        os.close(descriptor)
        with suppress(ProcessLookupError, PermissionError):  # its own children as well
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return (status if ended else None), usage.ru_maxrss << 10


def _judge(status: int | None, told: bytes, words: str, large: bool) -> tuple[str, str, str]:
    if status is None:
        return HANG, "stopped at the limit of time", ""
    if os.WIFSIGNALED(status):
        last = [line for line in words.splitlines() if line.strip()]
        name = signal.Signals(os.WTERMSIG(status)).name
        return SIGNAL, f"{name}: {' | '.join(last[:6])[:500]}", ""
    try:
        found = json.loads(told)
        kind, detail, value = found["kind"], found.get("detail", ""), found.get("value", "")
    except (ValueError, KeyError):
        return BUG, f"the process ended itself with {os.waitstatus_to_exitcode(status)}", ""
    if large and kind in (OK, REFUSED):
        return MEMORY, "", ""
    return kind, detail, value


def rss() -> int:
    return _statm(1)


def address_space() -> int:
    return _statm(0)


def _statm(column: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")


def fill_memory(byte: int) -> None:
    """glibc fills what malloc gives out; other C libraries leave it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_PERTURB, byte)
