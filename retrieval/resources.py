"""Use the machine: memory, processors, threads, blocks of rows, loops in machine code."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import islice, product
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from retrieval.number_format import counted

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], None]  # done, total
StageProgress = Callable[[str, int, int], None]  # stage, done, total
TRIALS = 3

_blas_lock = threading.Lock()
_blas_users: list[Any] = []  # threadpoolctl has no public name for the type of limits


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """Run BLAS on one thread inside; of overlapping blocks, the last to end restores it."""
    with _blas_lock:
        _blas_users.append(_blas_users[0] if _blas_users else _limited_blas())
    try:
        yield
    finally:
        with _blas_lock:
            limits = _blas_users.pop()
            if not _blas_users:
                limits.restore_original_limits()


def _limited_blas() -> Any:
    # A BLAS comes with an import; to look for it among all loaded libraries takes milliseconds.
    return _loaded_libraries(len(sys.modules)).limit(limits=1, user_api="blas")


@lru_cache(maxsize=1)
def _loaded_libraries(modules: int) -> ThreadpoolController:
    return ThreadpoolController()


def stage(progress: StageProgress | None, name: str) -> Progress | None:
    """The progress of one stage."""
    return progress and partial(progress, name)


def of_file(progress: StageProgress | None, file: str) -> StageProgress | None:
    """The progress of work on one of several files, with its name before each stage."""
    return progress and (lambda stage, *count: progress(f"{file}: {stage}", *count))


CGROUP = Path("/sys/fs/cgroup")
_CACHED = ("active", "inactive")
# Of a control group: its folder, the limit, what is used of it, and how names of cached files begin
# in memory.stat. Version 2, then version 1.
_MEMORY_FILES = (
    ("", "memory.max", "memory.current", ""),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def available_memory(cgroup: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process may still take: of the machine, or of its container or job if less.

    Cached files count as used there, but give way when memory is wanted.
    """
    limits = []
    with suppress(OSError, ValueError):
        limits.append(1024 * _value_of(Path("/proc/meminfo"), "MemAvailable:"))
    for group, (folder, most, used, prefix) in product(_groups(membership), _MEMORY_FILES):
        at = cgroup / folder / group
        with suppress(OSError, ValueError):  # no such group, or "max"
            left = int((at / most).read_text()) - int((at / used).read_text())
            cached = (_value_of(at / "memory.stat", f"{prefix}{kind}_file") for kind in _CACHED)
            limits.append(left + sum(cached))
    with suppress(OSError, ValueError, AttributeError):  # macOS, which tells the whole memory only
        limits = limits or [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    return max(0, min(limits, default=1 << 31))


def _groups(membership: Path) -> set[str]:
    """The control groups of this process and all above them; a container shows its own as "."."""
    groups = {"."}
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                own = PurePosixPath(path.lstrip("/"))
                groups |= {str(one) for one in (own, *own.parents)}
    return groups


def _value_of(file: Path, name: str) -> int:
    """The number behind a name in a file of such lines; ValueError if the name is not there."""
    for line in file.read_text().splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    raise ValueError(name)


def processors_if_limited() -> int:
    """The number of processors that this process is limited to; 0 if it may use all."""
    allowed = processors()
    return allowed if allowed < (os.cpu_count() or 1) else 0


def processors() -> int:
    """The number of processors that this process may use, not all of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def allowed(threads: int) -> int:
    """No more threads than processors: others would wait, and thousands of them crash."""
    return min(threads, processors())


def told_allowed(threads: int) -> str:
    """A note if more threads are requested than there are processors, else empty."""
    most = allowed(threads)
    return "" if most == threads else f"--threads {threads}: {most} are used, one per processor"


def faster_threads(seconds: Callable[[int], float], most: int) -> tuple[int, float]:
    """How many threads to work with, found by a trial, and how many times faster than `most`.

    seconds: the time that the same work takes with so many threads. Where other programs use the
    processors too, threads that wait for each other can take several times as long as one alone.
    All of them are taken unless fewer are faster by a tenth: a trial is not that exact.
    """
    counts = sorted({most, max(1, most // 2), 1}, reverse=True)
    if len(counts) == 1:
        return most, 1.0
    times = dict.fromkeys(counts, float("inf"))
    for _ in range(TRIALS):  # in turn: a busy moment hits all alike
        for count in counts:
            times[count] = min(times[count], seconds(count))
    best = min(counts, key=lambda count: times[count])
    if times[best] > 0.9 * times[most]:
        return most, 1.0
    return best, times[most] / times[best]


def told_threads(count: int, gain: float, most: int) -> str:
    """The result of a trial, in one line."""
    many = counted(count, "thread")
    if count == most:
        return f"{many}: fewer are not faster in a trial"
    return f"{many}: {gain:.1f} times as fast as {most} in a trial"


def gpu_fault() -> str | None:
    """Why no NVIDIA GPU can be used, according to the driver; None if there is one."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return f"no NVIDIA driver was found ({name})"
    status = driver.cuInit(0)
    if status == 100:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        extra = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden!r})"
        return f"the NVIDIA driver sees no GPU{extra}"
    if status != 0:
        return f"the NVIDIA driver does not start (cuInit: error {status})"
    count = ctypes.c_int(0)
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value < 1:
        return "the NVIDIA driver sees no GPU"
    return None


@contextmanager
def pool(threads: int, stop: Callable[[], object] | None = None) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that starts no waiting task after an error or an interrupt.

    stop: tells the running tasks that there was one.
    """
    executor = ThreadPoolExecutor(threads)
    try:
        yield executor
    except BaseException:
        if stop is not None:
            stop()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def run_all(
    function: Callable[[T], object],
    items: Iterable[T],
    threads: int,
    progress: Progress | None = None,
    stop: Callable[[], object] | None = None,
    weights: Sequence[int] = (),
) -> None:
    """Call a function with each item, in order, on several threads.

    weights: of the items in the progress; equal by default.
    stop: tells the running calls that one has failed.
    """
    items = list(items)
    if progress is None and 1 in (threads, len(items)):  # starting a thread takes time
        for item in items:
            function(item)
        return
    weights = weights or [1] * len(items)
    done, total = 0, sum(weights)
    # A queue: `futures.wait` looks at all tasks each time that one of thousands ends.
    finished: SimpleQueue[Future[object]] = SimpleQueue()
    with pool(threads, stop) as executor:
        running = {executor.submit(function, x): w for x, w in zip(items, weights, strict=True)}
        for future in running:
            future.add_done_callback(finished.put)
        while running:
            with suppress(Empty):
                future = finished.get(timeout=0.5)
                done += running.pop(future)
                future.result()
            if progress:
                progress(done, total)


def results_of(
    function: Callable[[T], R], items: Iterable[T], threads: int
) -> Generator[R, None, None]:
    """Call a function with each item on several threads, and yield the results in order.

    Few run ahead, so that memory does not fill up.
    """
    waiting = iter(items)
    with pool(threads) as executor:
        running = deque(executor.submit(function, item) for item in islice(waiting, 16 * threads))
        while running:
            yield running.popleft().result()
            running.extend(executor.submit(function, item) for item in islice(waiting, 1))


def cache_bytes(level: int, folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The size of the first processor's cache of this level, 0 if it is not known."""
    for cache in sorted(folder.glob("index*")):
        with suppress(OSError, ValueError):
            size = (cache / "size").read_text().strip()
            if int((cache / "level").read_text()) == level:
                return int(size.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(size[-1], 0)
    return 0


def tile_rows(items: int, threads: int) -> int:
    """Rows and columns of a tile of float32 numbers that stays in the cache while it is counted.

    A tile takes half of the second cache or of a thread's share of the third. Every thread gets
    several columns of tiles, and no tile is too small for a product at full speed. The rows of a
    tile of 1024 would lie at multiples of 4 KB, where they push each other out of the cache.
    """
    room = max(cache_bytes(2), cache_bytes(3) // threads, 1 << 20) // 2
    rows = int((room / 4) ** 0.5) // 64 * 64
    return max(256, min(1008, rows, -(-items // (4 * threads))))


_BLOCK = 1 << 21  # numbers converted at a time


def slices(n: int, size: int) -> Iterator[slice]:
    """Iterate over slices of `size` rows that cover range(n); the last one may be shorter."""
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def slices_of(part: slice, size: int) -> Iterator[slice]:
    """Iterate over slices of `size` rows that cover a slice."""
    moved = slices(part.stop - part.start, size)
    return (slice(part.start + some.start, part.start + some.stop) for some in moved)


def blocks(vectors: np.ndarray) -> Iterator[slice]:
    """Iterate over slices of rows that hold about two million numbers each."""
    return slices(len(vectors), max(1, _BLOCK // max(1, vectors.shape[1])))


SUMS = {"reassoc", "contract", "nsz"}
"""Sums may be added up in any order, so they use vector registers; NaN still compares false."""


def compiled(
    function: Callable[..., Any] | None = None,
    *,
    fastmath: bool | set[str] = SUMS,
    inline: bool = False,
) -> Any:
    """Compile a function that releases the GIL; cache the code on disk where that is allowed.

    inline: put it into the loops that call it. A call counts the arrays of a named tuple in and
    out, which takes longer than a short function.
    """
    from numba import njit

    if function is None:
        return partial(compiled, fastmath=fastmath, inline=inline)
    how: dict[str, Any] = {
        "nogil": True,
        "fastmath": fastmath,
        "inline": "always" if inline else "never",
    }
    try:
        return njit(cache=True, **how)(function)
    except RuntimeError:  # no folder can be written: compiled anew in every process
        return njit(**how)(function)
