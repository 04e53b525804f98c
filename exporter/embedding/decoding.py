"""Decode images in threads, ahead of the model.

Decoders and resampling release Python's lock. Worker processes would have to copy every batch to
this process; on two processors one thread is as fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from exporter.embedding.engine import Engine, pool
from retrieval.errors import DmlError
from retrieval.resources import slices
from trainer.config import Input
from trainer.data import transforms
from trainer.data.datasets.records import DataSet, FileReader

CHUNK = 4  # images in one task: few, so that all threads work on the batch that is needed next
MOST_WORKERS = 8

Task = tuple[str, np.ndarray]  # a split, and positions (B,) in it
Bad = list[tuple[int, DmlError]]  # position in the split, and what is wrong


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
    engine: Engine,
    data: DataSet,
    rows: dict[str, np.ndarray],
    tasks: Iterable[Task],
    workers: int,
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
    with pool(engine.lanes, engine.stop) as models, pool(workers) as decoders:
        for task in tasks:
            wanted = rows[task[0]][task[1]]
            parts = [
                decoders.submit(read_images, data, wanted[chunk], spec)
                for chunk in slices(len(wanted), CHUNK)
            ]
            running.append(models.submit(compute, task, parts))
            if len(running) >= engine.lanes + 2:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
