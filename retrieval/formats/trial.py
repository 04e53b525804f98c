"""Try a native parser on a file in a child process, so that a crash becomes an error.

HDF5, Arrow and torch are written in C++, and a damaged file can make them end the process, ask for
all memory, or never return. The child opens the file as the reader will; limits of time and memory
are set for it. `DMLTOOL_TRIAL=0` switches this off.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from retrieval.errors import DmlError
from retrieval.formats.arrays import Range, copies, ensure, file_size

SWITCH = "DMLTOOL_TRIAL"
MEMORY_RATIO, MEMORY_BYTES = 10, 200_000_000
CPU_SECONDS, WALL_SECONDS = 1, 60
BYTES_PER_SECOND = 5_000_000  # of a slow disk; the limits of time grow with the file
DAMAGED = "Copy or write the file again, or give it the suffix of its format."


def attempt(work: Callable[[], object], path: Path, format: str) -> None:
    """Call `work` in a child process; raise what it raised, or that it died."""
    # macOS: its own libraries do not survive a fork. Windows has none.
    if os.environ.get(SWITCH) == "0" or not sys.platform.startswith("linux"):
        return
    while missing := _attempt(work, path, format):
        ensure(path, missing)


def _attempt(work: Callable[[], object], path: Path, format: str) -> list[Range]:
    """Call `work` once; return the parts of the file that it misses."""
    size = file_size(path)
    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: see `_child`
            warnings.filterwarnings("ignore", "lance is not fork-safe")  # not used in the child
            child = os.fork()
    except OSError:  # no process or no memory left for it: the file is not at fault
        os.close(reader)
        os.close(writer)
        return []
    if child == 0:
        os.close(reader)
        _child(work, writer, path, size)
    os.close(writer)
    try:
        answer = _listen(reader, WALL_SECONDS + size // BYTES_PER_SECOND)
        if answer is None:
            os.kill(child, signal.SIGKILL)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(reader)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return _judge(answer, status, path, format, size)


def _child(work: Callable[[], object], writer: int, path: Path, size: int) -> NoReturn:
    """Runs only `work`, and no clean-up of the parent's: locks of its threads may be held here."""
    try:
        gc.disable()  # a collection would copy the whole heap of the parent, page by page
        faulthandler.disable()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        silent = os.open(os.devnull, os.O_WRONLY)  # libraries announce their own death
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        _limit(size)
        answer: list[Any] = []
        missing: list[Range] = []
        if copy := copies.get(path):
            copy.missed = missing
        try:
            work()
        except DmlError as error:
            answer = ["DmlError", error.what, error.why, error.fix]
        except MemoryError:
            answer = ["MemoryError"]
        except Exception as error:
            answer = [type(error).__name__, (str(error).strip().splitlines() or [""])[0][:300]]
        if missing:  # whatever a library made of that
            answer = ["Missing", *missing]
        os.write(writer, json.dumps(answer).encode())
    finally:
        os._exit(0)


def _limit(size: int) -> None:
    import resource

    def lower(kind: int, value: int) -> None:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, hard))

    with open("/proc/self/status") as file:
        taken = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    lower(resource.RLIMIT_DATA, taken + MEMORY_RATIO * size + MEMORY_BYTES)
    lower(resource.RLIMIT_CPU, int(time.process_time()) + CPU_SECONDS + size // BYTES_PER_SECOND)
    lower(resource.RLIMIT_CORE, 0)


def _listen(reader: int, seconds: float) -> bytes | None:
    """All that the child says until it ends; None if it does not end in time."""
    end, heard = time.monotonic() + seconds, b""
    while select.select([reader], [], [], max(0, end - time.monotonic()))[0]:
        part = os.read(reader, 1 << 16)
        if not part:
            return heard
        heard += part
    return None


def _judge(answer: bytes | None, status: int, path: Path, format: str, size: int) -> list[Range]:
    """Raise the error that the child met, or that it did not end well; return what it missed."""
    anyway = f" To open it all the same, set {SWITCH}=0."
    what, fix = f"{path} cannot be read as {format}", DAMAGED
    if answer is None or status == -signal.SIGXCPU:
        what, fix = f"{what}: opening it takes too long", DAMAGED + anyway
        why = "A child process that tried it was stopped"
    elif status or not answer:
        name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        what = f"{what}: it crashes the library that reads it"
        why = f"A child process that tried it ended with {name}"
    else:
        kind, *texts = json.loads(answer) or [""]
        if not kind:
            return []
        if kind == "Missing":
            return [(start, stop) for start, stop in texts]
        if kind == "DmlError":
            raise DmlError(*texts)
        why = f"The reader says: {kind}: {''.join(texts).rstrip('.')}"
        if kind == "MemoryError":
            what, fix = f"{what}: it asks for too much memory", DAMAGED + anyway
            why = (
                f"The file has {size:,} bytes; reading it may take {MEMORY_RATIO} times as much "
                f"and {MEMORY_BYTES // 10**6} MB"
            )
    raise DmlError(f"{what}.", f"{why}.", fix)
