"""Images decoded ahead of the model, by threads: decoders and resampling run outside Python's lock.

Worker processes would have to hand every batch over; on two cores one thread does as well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from exporter.onnx.metadata import Preprocessing
from exporter.onnx.session import Model, Session, pick
from retrieval.errors import DmlError
from retrieval.resources import (
    allowed,
    faster_threads,
    processors,
    told_allowed,
    told_threads,
)
from trainer.config import Input
from trainer.data import transforms
from trainer.data.datasets.records import FileReader

if TYPE_CHECKING:  # it imports torch, which embedding needs not
    from trainer.data.source import Source

CHUNK = 4  # images in one task: small, so that all threads work on the batch that comes next
MOST_WORKERS = 8
TRIAL_PIXELS = 8 * 32 * 32  # of a batch
MOST_LANES = 4  # each holds a batch and what the model makes of it

Run = Callable[[np.ndarray], np.ndarray]  # uint8 (B, H, W, 3) -> (B, D)
Task = tuple[str, np.ndarray]  # a split, and places (B,) in it
Bad = list[tuple[int, DmlError]]  # place in the split, and what is wrong


@dataclass(frozen=True)
class Done:
    """What came of one batch; `places` are those of its images that could be read."""

    split: str
    places: np.ndarray  # (b,)
    vectors: np.ndarray | None  # (b, D); None if no image could be read
    bad: Bad


def chosen_workers(source: Source) -> int:
    """One core is left to the model; readers that are not of files need not bear threads."""
    if source.store is not None or not isinstance(source.data.reader, FileReader):
        return 1
    return min(max(1, processors() - 1), MOST_WORKERS)


def lanes_and_threads(provider: str, total: int | None = None) -> tuple[int, int | None]:
    """Runs of the model side by side, and threads of each; total: of all together.

    On a processor, single threads with a batch each waste nothing: threads that share a batch wait
    for one another at every layer, the more so when decoding takes a core away from one of them.
    """
    if provider != "cpu":
        return 1, None
    total = total or processors()
    lanes = min(total, MOST_LANES)
    return lanes, max(1, total // lanes)


def side_by_side(
    model: Model,
    provider: str,
    preprocessing: Preprocessing | None = None,
    threads: int | None = None,
) -> tuple[Session, int]:
    """A session for many images, and how many threads should call it at once.

    threads: of all together; without a number, a short trial on a CPU chooses between one run of
    the model at a time and several.
    """
    chain, _ = pick(provider)
    on = "cpu" if chain[0] == "CPUExecutionProvider" else "gpu"
    lanes, each = lanes_and_threads(on, threads and allowed(threads))
    session = Session(model, provider, each, preprocessing=preprocessing)
    if threads and (told := told_allowed(threads)):
        session.why += f"; {told}"
    if on == "cpu" and threads is None and lanes > 1:
        most, (lanes, gain) = lanes, faster_threads(partial(trial, session, lanes), lanes)
        session.why += f"; {told_threads(lanes, gain, most)}"
    return session, lanes


def trial(session: Session, most: int, lanes: int) -> float:
    """Seconds for `most` small batches of black images, so many of them at a time."""
    side = session.preprocessing.crop
    batch = np.zeros((max(1, TRIAL_PIXELS // side**2), side, side, 3), np.uint8)
    with _pool(lanes, session.stop) as pool:
        began = time.perf_counter()
        for run in [pool.submit(session.run, batch) for _ in range(most)]:
            run.result()
        return time.perf_counter() - began


def check_store(source: Source, spec: Input) -> None:
    """Kept images were resized before: as the model wants them, or they are of no use."""
    if source.store is None:
        return
    for name in ("resize", "keep_ratio", "interpolation", "draft"):
        kept, wanted = getattr(source.spec, name), getattr(spec, name)
        if kept != wanted:
            raise DmlError(
                f"The kept images have {name} = {kept}, the model wants {wanted}.",
                "They would give embeddings that look right and are not.",
                "Decode the images anew: --cache none",
            )


def prepared(source: Source, spec: Input, row: int) -> np.ndarray:
    """(crop, crop, 3) uint8: what `for_testing` makes of an image, kept or read now."""
    if source.store is not None:
        return transforms.for_testing(source.store.image(row), spec)
    path = source.data.paths[row]
    try:
        image = source.data.image(row, spec.short_side)
        return transforms.for_testing(image, spec)
    except DmlError as error:
        named = error if path in error.what else DmlError(f"{path}: {error.what}", error.why)
        raise named from error


def run_batches(
    run: Run,
    source: Source,
    spec: Input,
    rows: dict[str, np.ndarray],
    tasks: Iterable[Task],
    workers: int,
    lanes: int,
    stop: Callable[[], None] | None = None,
) -> Iterator[Done]:
    """Batches in order; `lanes` of them are in the model at a time, two more are being decoded.

    rows: of the data set, for each split. stop: ends calls of `run` after an interrupt.
    """

    def decode(split: str, places: np.ndarray) -> tuple[np.ndarray, Bad]:
        """(n, crop, crop, 3), of bad images whatever was in memory"""
        images, bad = np.empty((len(places), spec.crop, spec.crop, 3), np.uint8), []
        for n, place in enumerate(places.tolist()):
            try:
                images[n] = prepared(source, spec, int(rows[split][place]))
            except DmlError as error:
                bad.append((place, error))
        return images, bad

    def compute(task: Task, parts: list[Future]) -> Done:
        split, places = task
        decoded = [part.result() for part in parts]
        bad = [each for _, found in decoded for each in found]
        images = np.concatenate([images for images, _ in decoded])
        if bad:
            good = ~np.isin(places, [place for place, _ in bad])
            places, images = places[good], images[good]
        return Done(split, places, run(images) if len(places) else None, bad)

    running: deque[Future[Done]] = deque()
    with _pool(lanes, stop) as models, _pool(workers) as decoders:
        for task in tasks:
            split, places = task
            chunks = (places[at : at + CHUNK] for at in range(0, len(places), CHUNK))
            parts = [decoders.submit(decode, split, chunk) for chunk in chunks]
            running.append(models.submit(compute, task, parts))
            if len(running) >= lanes + 2:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


@contextmanager
def _pool(threads: int, stop: Callable[[], None] | None = None) -> Iterator[ThreadPoolExecutor]:
    """After an error or an interrupt nothing that waits is begun."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    except BaseException:
        if stop is not None:
            stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
