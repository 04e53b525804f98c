"""Start a model for many images: how many batches run at a time, on how many threads each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from exporter.onnx.metadata import Preprocessing
from exporter.onnx.model import Model
from exporter.onnx.providers import NAMES, pick
from exporter.onnx.session import Session
from retrieval.resources import allowed, faster_threads, processors, told_allowed, told_threads
from retrieval.world import World

TRIAL_PIXELS = 8 * 32 * 32  # of a batch
MOST_LANES = 4  # each one holds a batch and the model's intermediate results

Run = Callable[[np.ndarray], np.ndarray]  # uint8 (B, H, W, 3) -> (B, D)


@dataclass(frozen=True)
class Engine:
    """A function that embeds images, and what the embedding file records about it."""

    run: Run
    dim: int
    preprocessing: Preprocessing
    attrs: dict[str, object]
    """model, model_sha256, normalized and backend."""
    why: str = ""
    """One line: what computes, and why it was chosen."""
    lanes: int = 1
    """Threads that may call `run` at the same time."""
    stop: Callable[[], None] | None = None
    """Ends running calls after an interrupt."""


def onnx_engine(
    model: Model,
    provider: str = "auto",
    threads: int | None = None,
    preprocessing: Preprocessing | None = None,
) -> Engine:
    """Start a session for many images.

    `threads` is the total of all lanes. Without it, a short trial on a CPU chooses between one run
    of the model at a time and several.
    """
    on_cpu = pick(provider)[0][0] == NAMES["cpu"]
    lanes, each = lanes_and_threads(threads and allowed(threads)) if on_cpu else (1, None)
    session = Session(model, provider, each, preprocessing=preprocessing)
    why = session.why
    if threads and (told := told_allowed(threads)):
        why += f"; {told}"
    if on_cpu and threads is None and lanes > 1:
        most, (lanes, gain) = lanes, faster_threads(partial(trial, session, lanes), lanes)
        why += f"; {told_threads(lanes, gain, most)}"
    attrs = {
        "model": model.path.name,
        "model_sha256": model.sha256,
        "normalized": model.metadata is not None and model.metadata.normalized,
        "backend": "onnx",
    }
    return Engine(session.run, session.dim, session.preprocessing, attrs, why, lanes, session.stop)


def own_processors(world: World) -> int | None:
    """The threads of one of several processes; None: a process that is alone finds out by trial."""
    return world.processors if world.size > 1 else None


def lanes_and_threads(total: int | None = None) -> tuple[int, int]:
    """Runs of the model at the same time on a CPU, and the threads of each.

    Single threads with a batch each waste nothing. Threads that share a batch wait for one another
    at every layer, and longer when decoding takes a processor away from one of them.
    """
    total = total or processors()
    lanes = min(total, MOST_LANES)
    return lanes, max(1, total // lanes)


def trial(session: Session, batches: int, lanes: int) -> float:
    """Seconds for so many small batches of black images, `lanes` of them at a time."""
    side = session.preprocessing.crop
    batch = np.zeros((max(1, TRIAL_PIXELS // side**2), side, side, 3), np.uint8)
    with pool(lanes, session.stop) as executor:
        began = time.perf_counter()
        for run in [executor.submit(session.run, batch) for _ in range(batches)]:
            run.result()
        return time.perf_counter() - began


@contextmanager
def pool(threads: int, stop: Callable[[], None] | None = None) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that starts no waiting task after an error or an interrupt."""
    executor = ThreadPoolExecutor(threads)
    try:
        yield executor
    except BaseException:
        if stop is not None:
            stop()
        raise
    finally:
        executor.shutdown(cancel_futures=True)
