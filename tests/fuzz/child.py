"""Functions called in a forked child with limits of time and memory, and how that ended.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

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
    """In a child of its own.

    fill: the byte that fresh memory holds, so that what is read before it is written shows.
    """
    return attempts([function], [limits or Limits()], fill)[0]


def attempts(
    functions: Sequence[Callable[[], str]], limits: Sequence[Limits], fill: int | None = None
) -> list[Outcome]:
    """One after another in one child, up to the first that ends it."""
    receive, send = os.pipe()
    said = os.memfd_create("said")
    pid = os.fork()
    if not pid:
        os.close(receive)
        _child(functions, limits, fill, send, said)
    os.close(send)
    try:
        told, late, spent = _listen(pid, receive, [limit.seconds for limit in limits])
        with suppress(ProcessLookupError, PermissionError):  # its own children as well
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        words = os.pread(said, 20_000, max(0, os.fstat(said).st_size - 20_000))
    finally:
        os.close(receive)
        os.close(said)
    found = [_outcome(message, limit) for message, limit in zip(told, limits, strict=False)]
    if len(found) < len(functions):
        found.append(_end(None if late else status, words.decode("utf-8", "replace"), spent))
    elif len(functions) == 1:  # the kernel's figure knows of its own children as well
        peak = (usage.ru_maxrss << 10) - int(told[0]["before"])
        found = [_outcome(told[0] | {"memory": max(peak, int(told[0]["memory"]))}, limits[0])]
    return found


def _child(
    functions: Sequence[Callable[[], str]],
    limits: Sequence[Limits],
    fill: int | None,
    send: int,
    said: int,
) -> None:
    """Never returns."""
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for number, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
            os.dup2(descriptor, number)
        streams = [os.fdopen(n, "w", errors="replace", closefd=False) for n in (1, 2)]
        sys.stdout, sys.stderr = streams
        faulthandler.enable(file=2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = address_space() + max(limit.memory for limit in limits) + GUARD
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        if fill is not None:
            fill_memory(fill)
        for function in functions:
            _send(send, _measured(function))
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        os._exit(0)


def _send(descriptor: int, message: dict[str, object]) -> None:
    rest = json.dumps(message).encode() + b"\n"
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _measured(function: Callable[[], str]) -> dict[str, object]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, began = rss(), monotonic()
    told = _call(function)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line)
    memory = max(0, peak - before)
    return told | {"memory": memory, "before": before, "seconds": monotonic() - began}


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


def _listen(
    pid: int, receive: int, seconds: Sequence[float]
) -> tuple[list[dict[str, Any]], bool, float]:
    """What the child told until it ended, whether it was late, and the time of the last part."""
    descriptor, heard, count = os.pidfd_open(pid), b"", 0
    poll = select.poll()
    poll.register(receive, select.POLLIN)
    poll.register(descriptor, select.POLLIN)
    began, late = monotonic(), False
    try:
        while count < len(seconds):
            left = began + seconds[count] - monotonic()
            ready = dict(poll.poll(max(0.0, 1000 * left)))
            if not ready:
                late = True
                break
            part = os.read(receive, 1 << 20) if receive in ready else b""
            heard += part
            if heard.count(b"\n") > count:
                count, began = heard.count(b"\n"), monotonic()
            if not part and (descriptor in ready or receive in ready):
                break  # all that it told has been read
    finally:
        os.close(descriptor)
    return [json.loads(line) for line in heard.split(b"\n")[:count]], late, monotonic() - began


def _outcome(told: dict[str, Any], limits: Limits) -> Outcome:
    kind, detail, value = told["kind"], told.get("detail", ""), told.get("value", "")
    if told["memory"] > limits.memory and kind in (OK, REFUSED):
        kind, detail = MEMORY, f"{told['memory'] >> 20} MB of {limits.memory >> 20} MB"
    return Outcome(kind, detail, value, told["seconds"], told["memory"])


def _end(status: int | None, words: str, seconds: float) -> Outcome:
    """What kept it from telling."""
    if status is None:
        return Outcome(HANG, "stopped at the limit of time", seconds=seconds)
    if os.WIFSIGNALED(status):
        last = [line for line in words.splitlines() if line.strip()]
        name = signal.Signals(os.WTERMSIG(status)).name
        return Outcome(SIGNAL, f"{name}: {' | '.join(last[:6])[:500]}", seconds=seconds)
    code = os.waitstatus_to_exitcode(status)
    return Outcome(BUG, f"the process ended itself with {code}", seconds=seconds)


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
