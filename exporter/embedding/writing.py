"""Embed the images of a data set into one HDF5 file, in memory independent of their number.

Rows are written to `name.partial` as they are computed (see `retrieval.formats.hdf5.writing`). A
run that was killed is resumed by computing the missing batches. A batch always holds the same
images, so that the rows equal those of an uninterrupted run even if a model's rounding depends on
the rest of the batch. The finished file differs only in `created`.

Of several processes, each computes its share of the batches. Rank 0 writes to the file, the others
to part files (`parts`), which rank 0 copies into it at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np

from exporter.embedding import finishing, parts
from exporter.embedding.engine import Bad, Done, Engine, Rows, Task, chosen_workers, run_batches
from exporter.onnx import PROVIDERS
from exporter.results import EmbeddingsResult
from retrieval.distributed.processes import from_first, gather
from retrieval.distributed.world import ALONE, World
from retrieval.errors import DmlError
from retrieval.files import check_target, relative
from retrieval.formats.hdf5.layout import encode, hash_paths
from retrieval.formats.hdf5.writing import KIND, Writer
from retrieval.formats.shard_sets import Shard
from retrieval.ranking.backends.choice import DEVICES, PATTERN
from retrieval.resources import StageProgress
from retrieval.settings import Checked, accepting, one_of, within
from trainer.data.datasets import DataSet, recall_at_of

Write = Callable[[str, np.ndarray, np.ndarray], None]  # split, positions (b,), vectors (b, D)
GO_ON = (
    "The rows computed so far are kept. Replace the image and add --resume, or continue without "
    "it: --resume --skip-bad"
)


@dataclass(frozen=True)
class EmbedSettings(Checked):
    """How to embed images into a file."""

    splits: tuple[str, ...] = ()
    """Splits of the data set; empty: test, or query and gallery."""
    provider: str = one_of(*PROVIDERS, default=PROVIDERS[0])
    device: str = accepting(PATTERN.fullmatch, DEVICES, default="auto")
    """What counts ranks and searches neighbours; auto: with the provider cpu, the CPU."""
    threads: int | None = within(1, default=None)
    """Threads on a CPU; None: a short trial chooses."""
    batch_size: int = within(1, default=32)
    shard: tuple[int, int] = within(1, default=(1, 1))
    """(k, n): embed the k-th of n parts of each split; a batch is never divided."""
    half: bool = False
    """Store float16 instead of float32, and report what that does to Recall@1."""
    skip_bad: bool = False
    """Leave out images that cannot be read, instead of raising an error."""
    resume: bool = False
    """Compute only the rows that an interrupted run has not written."""
    force: bool = False
    """Overwrite existing files."""

    def __post_init__(self) -> None:
        self.require_valid()

    @property
    def ranking_device(self) -> str:
        """The device that counts ranks: the CPU if only that runs the model, unless given."""
        on_cpu = self.provider == "cpu" and self.device == "auto"
        return "cpu" if on_cpu else self.device


@dataclass(frozen=True)
class Embedded:
    """What a call of `embed` has done."""

    path: Path
    splits: dict[str, int]
    """Rows of each split in the file."""
    dim: int
    dtype: str
    computed: int
    """Rows that this call computed; the others were there from an earlier one."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Path and reason of each image that is left out."""
    recall: finishing.Recalls | None = None
    """With half: Recall@1 of the float32 and of the float16 vectors, by l2 and by cos."""
    seconds: float = 0.0
    """Time for decoding, computing and writing rows."""
    writing: float = 0.0
    """Time for writing, which is part of `seconds`."""


def told(done: Embedded, run_by: str) -> EmbeddingsResult:
    """What a call has done, in the types of JSON; run_by: what computed the embeddings."""
    found = cast(EmbeddingsResult, asdict(done) | {"path": str(done.path)})
    found["run_by"] = run_by
    return found


@dataclass
class Work:
    """What a process has done so far; `computed` and `writing` as in `Embedded`."""

    bad: dict[str, Bad]
    """Images of each split that cannot be read."""
    computed: int = 0
    writing: float = 0.0

    def add(self, batch: Done, write: Write, dim: int) -> None:
        """Write the rows of a batch, which are embeddings of `dim` numbers."""
        self.bad[batch.split] += batch.bad
        if batch.vectors is not None:
            if batch.vectors.shape[1] != dim:
                raise DmlError(
                    f"The model gave embeddings of {batch.vectors.shape[1]} numbers, not {dim}.",
                    "All embeddings of a file have the same length.",
                    "Export it with a dynamic batch and a fixed embedding length.",
                )
            start = time.perf_counter()
            write(batch.split, batch.positions, batch.vectors)
            self.writing += time.perf_counter() - start
            self.computed += len(batch.positions)


class _Rewritten(Exception):
    """Leaves the Writer without finishing its file, because that has been rewritten."""


def embed(
    engine: Engine,
    data: DataSet,
    splits: Rows,
    target: str | Path,
    settings: EmbedSettings | None = None,
    *,
    workers: int | None = None,
    progress: StageProgress | None = None,
    world: World = ALONE,
    patience: float = parts.NEW,
) -> Embedded:
    """Embed rows of a data set and write them to `target`.

    splits: rows of the data set by the name of the split in the file.
    workers: threads that decode images; None: chosen by the number of processors.
    world: the processes that share the images; all of them call this.
    patience: seconds until a network file system shows a new file of another machine.

    Images are read here for the first time. One that cannot be read is an error; with `skip_bad`
    the file is written without it and names it in its attributes. With `half` the rows become
    float16 at the end: until then the file holds float32, to compare the two.
    """
    settings = settings or EmbedSettings()
    target = check_target(target, KIND, settings.force or settings.resume or world.rank > 0)
    if settings.shard != (1, 1):
        whole, splits = splits, _shard(splits, settings)
        part = _part_of(data, whole, settings).attribute()
        engine = replace(engine, attrs=engine.attrs | part)
    out = _writer(engine, data, splits, target, settings)
    parts.require_same(out, world)
    threads = workers or chosen_workers(data, world.processors)
    work = Work({split: [] for split in splits})
    job = Job(engine, data, splits, settings, out, work, threads, progress, world)
    if world.rank:
        _assist(job, patience)
        return Embedded(target, {}, engine.dim, job.dtype, work.computed)
    if settings.resume and not settings.force and (there := finishing.finished(out, job.dtype)):
        from_first(lambda: None, world)
        rows, left_out = there
        return Embedded(target, rows, engine.dim, job.dtype, 0, left_out)
    return _lead(job)


@dataclass(frozen=True)
class Job:
    """What a process of an embedding works with, and what it has done so far."""

    engine: Engine
    data: DataSet
    splits: Rows
    settings: EmbedSettings
    out: Writer
    work: Work
    threads: int
    """Threads that decode images."""
    progress: StageProgress | None
    world: World

    @property
    def dtype(self) -> str:
        return "float16" if self.settings.half else "float32"

    def compute(self, write: Write) -> None:
        """Compute this process's share of the batches that are missing."""
        out, world = self.out, self.world
        tasks = islice(_missing(out, self.settings.batch_size), world.rank, None, world.size)
        total = sum(out.lengths.values())
        done = sum(int(marks.sum()) for marks in out.marks.values())
        for batch in run_batches(self.engine, self.data, self.splits, tasks, self.threads):
            if batch.bad and not self.settings.skip_bad:
                raise DmlError(batch.bad[0][1].what, batch.bad[0][1].why, GO_ON)
            self.work.add(batch, write, out.dim)
            done += world.size * (len(batch.positions) + len(batch.bad))  # others are about as far
            if self.progress:
                self.progress("embedding", min(done, total), total)

    def result(self, recall: finishing.Recalls | None, seconds: float) -> Embedded:
        """What all processes together have done."""
        work, splits = self.work, self.splits
        left_out = tuple(
            (self.data.paths[splits[split][position]], error.why or error.what)
            for split, found in work.bad.items()
            for position, error in found
        )
        rows = {split: len(found) - len(work.bad[split]) for split, found in splits.items()}
        return Embedded(
            self.out.path,
            rows,
            self.engine.dim,
            self.dtype,
            work.computed,
            left_out,
            recall,
            seconds,
            work.writing,
        )


def _lead(job: Job) -> Embedded:
    """Compute the share of the first rank, join the rows of all, and finish the file."""
    out, work, settings, world = job.out, job.work, job.settings, job.world
    start, recall = time.perf_counter(), None
    with suppress(_Rewritten), out:
        finishing.remove_leftovers(out)
        (parts.collect if settings.resume else parts.remove)(out)
        if world.size > 1:
            from_first(lambda: (out.marks, parts.show_folder(out)), world)
        job.compute(out.write)
        _join(out, work, world)
        _check_some_readable(work, out)
        seconds = time.perf_counter() - start
        if settings.half or any(work.bad.values()):
            recall = finishing.rewrite(
                out, job.dtype, work.bad, job.progress, settings.ranking_device
            )
            raise _Rewritten
    return job.result(recall, seconds)


def _assist(job: Job, patience: float) -> None:
    """Compute the share of a rank that is not the first, and leave its rows in a part file."""
    out, world = job.out, job.world
    started = from_first(lambda: None, world)
    if started is None:  # the file is finished
        return
    out.marks, seen = started
    parts.require_folder(out, seen, world, patience)
    missing = sum(int((~marks).sum()) for marks in out.marks.values())
    part = parts.PartFile(out, world.rank, -(-missing // world.size))
    job.compute(part.write)
    part.close()
    gather(job.work, world)


def _join(out: Writer, work: Work, world: World) -> None:
    """Wait for the other ranks; copy their rows, and note the images that they could not read."""
    if world.size == 1:
        return
    for theirs in gather(work, world)[1:]:
        work.computed += theirs.computed
        for split, found in theirs.bad.items():
            work.bad[split] += found
    for found in work.bad.values():
        found.sort(key=lambda each: each[0])
    parts.wait_for(out, world.size)
    parts.collect(out)


def _writer(
    engine: Engine, data: DataSet, splits: Rows, target: Path, settings: EmbedSettings
) -> Writer:
    attrs = {
        "dataset": data.name,
        "preprocessing": engine.preprocessing.to_dict(),
        "images": where_images_are(data, target),
        **({"recall_at": list(usual)} if (usual := recall_at_of(data.name)) else {}),
        **engine.attrs,
    }
    columns = {
        s: (data.labels[rows] if data.labelled else None, [data.paths[n] for n in rows.tolist()])
        for s, rows in splits.items()
    }
    names = np.array(data.label_names, np.str_) if data.labelled else None
    return Writer(
        target, columns, engine.dim, "float32", names, attrs, settings.force, settings.resume
    )


def where_images_are(data: DataSet, target: Path) -> dict[str, object]:
    """How a report finds the images, even if their folder and the file were moved together."""
    files = data.folder()
    found: dict[str, object] = {"files": files is not None, "options": dict(data.options)}
    root = data.root if files is None else files
    if root is not None:
        absolute = Path(root).resolve()
        found |= {"root": str(root), "absolute": str(absolute)}
        if seen := relative(absolute, target.parent):
            found["relative"] = seen
    return found


def _part_of(data: DataSet, splits: Rows, settings: EmbedSettings) -> Shard:
    """The shard of the settings, which knows the others by the list of all images."""
    digest = sha256()
    for split, rows in splits.items():
        digest.update(hash_paths({split: encode([data.paths[n] for n in rows.tolist()])}).encode())
        if data.labelled:
            digest.update(data.labels[rows].astype("<i8").tobytes())
    for name in data.label_names if data.labelled else ():
        digest.update(encode([name])[0] + b"\0")
    total = sum(len(rows) for rows in splits.values())
    return Shard(*settings.shard, total, settings.batch_size, digest.hexdigest())


def _shard(splits: Rows, settings: EmbedSettings) -> Rows:
    """The rows of the shard of the settings: whole batches, one after another."""
    (k, n), size = settings.shard, settings.batch_size
    if not 1 <= k <= n:
        raise DmlError(
            f"There is no shard {k}/{n}.",
            f"The shards of {n} parts are 1/{n} to {n}/{n}.",
            f"Choose one of them: --shard 1/{n}",
        )
    batches = {split: -(-len(rows) // size) for split, rows in splits.items()}
    if (most := max(batches.values())) < n:
        raise DmlError(
            f"{n} shards cannot be made: there are {most} batches.",
            f"A batch of {size} images is never divided, so some shards would be empty.",
            f"Choose at most {most} shards, or a smaller --batch-size.",
        )
    return {
        split: rows[start * size : end * size]
        for split, rows in splits.items()
        if (start := batches[split] * (k - 1) // n) < (end := batches[split] * k // n)
    }


def _missing(out: Writer, batch_size: int) -> Iterator[Task]:
    """The missing rows in batches that begin at multiples of the batch size."""
    for split, count in out.lengths.items():
        missing = ~out.done(split)
        for at in range(0, count, batch_size):
            positions = at + np.flatnonzero(missing[at : at + batch_size])
            if len(positions):
                yield split, positions


def _check_some_readable(work: Work, out: Writer) -> None:
    for split, found in work.bad.items():
        if len(found) == out.lengths[split]:
            raise DmlError(
                f"No image of {split} can be read.",
                found[0][1].what,
                "Check that the folder of the images is still there.",
            )
