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


def read_image(data: DataSet, spec: Input, row: int) -> np.ndarray:
    """Read one image, resize and crop it as for testing: (crop, crop, 3) uint8."""
    path = data.paths[row]
    try:
        return transforms.for_testing(data.image(row, spec.short_side), spec)
    except DmlError as error:
        if path in error.what:
            raise
        raise DmlError(f"{path}: {error.what}", error.why, error.fix) from error


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

    def decode(split: str, positions: np.ndarray) -> tuple[np.ndarray, Bad]:
        """Images (n, crop, crop, 3); those of bad images hold arbitrary bytes."""
        images, bad = np.empty((len(positions), spec.crop, spec.crop, 3), np.uint8), []
        for n, position in enumerate(positions.tolist()):
            try:
                images[n] = read_image(data, spec, int(rows[split][position]))
            except DmlError as error:
                bad.append((position, error))
        return images, bad

    def compute(task: Task, parts: list[Future]) -> Done:
        split, positions = task
        decoded = [part.result() for part in parts]
        bad = [each for _, found in decoded for each in found]
        images = np.concatenate([images for images, _ in decoded])
        if bad:
            good = ~np.isin(positions, [position for position, _ in bad])
            positions, images = positions[good], images[good]
        return Done(split, positions, engine.run(images) if len(positions) else None, bad)

    running: deque[Future[Done]] = deque()
    with pool(engine.lanes, engine.stop) as models, pool(workers) as decoders:
        for task in tasks:
            split, positions = task
            chunks = (positions[at : at + CHUNK] for at in range(0, len(positions), CHUNK))
            parts = [decoders.submit(decode, split, chunk) for chunk in chunks]
            running.append(models.submit(compute, task, parts))
            if len(running) >= engine.lanes + 2:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
