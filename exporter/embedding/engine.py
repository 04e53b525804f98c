"""Start a model for many images, and run batches of them that are decoded ahead of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from exporter.onnx.metadata import Preprocessing
from exporter.onnx.model import Model
from exporter.onnx.providers import NAMES, pick
from exporter.onnx.session import Session
from retrieval import resources
from retrieval.distributed.world import World
from retrieval.errors import DmlError
from trainer.config import Input
from trainer.data import transforms
from trainer.data.datasets.records import DataSet, FileReader

TRIAL_PIXELS = 8 * 32 * 32  # of a batch
MOST_LANES = 4  # each one holds a batch and the model's intermediate results
CHUNK = 4  # images in one task: few, so that all threads work on the batch that is needed next
MOST_WORKERS = 8

Rows = dict[str, np.ndarray]  # by split: rows (N,) of a data set, or positions in a split
Task = tuple[str, np.ndarray]  # a split, and positions (B,) in it
Bad = list[tuple[int, DmlError]]  # position in the split, and what is wrong
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
    lanes, each = lanes_and_threads(threads and resources.allowed(threads)) if on_cpu else (1, None)
    session = Session(model, provider, each, preprocessing=preprocessing)
    why = session.why
    if threads and (told := resources.told_allowed(threads)):
        why += f"; {told}"
    if on_cpu and threads is None and lanes > 1:
        most, (lanes, gain) = lanes, resources.faster_threads(partial(trial, session, lanes), lanes)
        why += f"; {resources.told_threads(lanes, gain, most)}"
    attrs = {
        "model": model.path.name,
        "model_sha256": model.sha256,
        "normalized": model.metadata is not None and model.metadata.normalized,
        "backend": "onnx",
    }
    return Engine(session.run, session.dim, session.preprocessing, attrs, why, lanes, session.stop)


def own_processors(world: World) -> int | None:
    """Threads of one of several processes; None: a single process chooses by a trial."""
    return world.processors if world.size > 1 else None


def lanes_and_threads(total: int | None = None) -> tuple[int, int]:
    """Runs of the model at the same time on a CPU, and the threads of each.

    Single threads with a batch each waste nothing. Threads that share a batch wait for one another
    at every layer, and longer when decoding takes a processor away from one of them.
    """
    total = total or resources.processors()
    lanes = min(total, MOST_LANES)
    return lanes, max(1, total // lanes)


def trial(session: Session, batches: int, lanes: int) -> float:
    """Seconds that small batches of black images take, `lanes` of them at a time."""
    side = session.preprocessing.crop
    batch = np.zeros((max(1, TRIAL_PIXELS // side**2), side, side, 3), np.uint8)
    with resources.pool(lanes, session.stop) as executor:
        began = time.perf_counter()
        for run in [executor.submit(session.run, batch) for _ in range(batches)]:
            run.result()
        return time.perf_counter() - began


# Images are decoded in threads: decoders and resampling release Python's lock. Worker processes
# would have to copy every batch to this process; on two processors one thread is as fast.


@dataclass(frozen=True)
class Done:
    """The result of one batch; `positions` are the positions of the images that could be read."""

    split: str
    positions: np.ndarray  # (b,)
    vectors: np.ndarray | None  # (b, D); None if no image could be read
    bad: Bad


def chosen_workers(data: DataSet, processors: int) -> int:
    """Number of decoding threads: all processors but one, or one if the reader has shared state."""
    if not isinstance(data.reader, FileReader):
        return 1
    return min(max(1, processors - 1), MOST_WORKERS)


def read_images(
    data: DataSet, rows: np.ndarray, spec: Input
) -> tuple[np.ndarray, list[DmlError | None]]:
    """Read images, resize and crop them as for testing: (n, crop, crop, 3) uint8.

    The second result says for each image why it cannot be read; its pixels are arbitrary then.
    """
    images = np.empty((len(rows), spec.crop, spec.crop, 3), np.uint8)
    errors: list[DmlError | None] = [None] * len(rows)
    for n, row in enumerate(rows.tolist()):
        try:
            images[n] = transforms.for_testing(data.image(row, spec.short_side), spec)
        except DmlError as error:
            if data.paths[row] not in error.what:
                error = DmlError(f"{data.paths[row]}: {error.what}", error.why, error.fix)
            errors[n] = error
    return images, errors


def run_batches(
    engine: Engine, data: DataSet, rows: Rows, tasks: Iterable[Task], workers: int
) -> Iterator[Done]:
    """Yield the results of the tasks in order.

    `rows` are the rows of the data set in each split. `engine.lanes` batches are in the model at a
    time and two more are being decoded.
    """
    spec = engine.preprocessing.spec()

    def compute(task: Task, parts: list[Future]) -> Done:
        split, positions = task
        decoded = [part.result() for part in parts]
        images = np.concatenate([images for images, _ in decoded])
        errors = [error for _, found in decoded for error in found]
        bad = [(n, error) for n, error in zip(positions.tolist(), errors, strict=True) if error]
        if bad:
            good = [error is None for error in errors]
            positions, images = positions[good], images[good]
        return Done(split, positions, engine.run(images) if len(positions) else None, bad)

    running: deque[Future[Done]] = deque()
    with (
        resources.pool(engine.lanes, engine.stop) as models,
        resources.pool(workers) as decoders,
    ):
        for task in tasks:
            wanted = rows[task[0]][task[1]]
            parts = [
                decoders.submit(read_images, data, wanted[chunk], spec)
                for chunk in resources.slices(len(wanted), CHUNK)
            ]
            running.append(models.submit(compute, task, parts))
            if len(running) >= engine.lanes + 2:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
