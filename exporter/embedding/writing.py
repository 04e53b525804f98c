"""Embeds the images of a data set into one HDF5 file: any number of them in the same memory.

Rows go to `name.partial` as they come (see `retrieval.formats.hdf5.file`). A killed run is
resumed by computing the batches that are missing; batches have fixed places, so that the rows are
those of an uninterrupted run also where a model's rounding depends on the rest of the batch. The
file then equals that of an uninterrupted run in everything but `created`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from exporter.embedding import finishing
from exporter.embedding.decoding import (
    Bad,
    Done,
    Run,
    Task,
    check_store,
    chosen_workers,
    run_batches,
)
from exporter.onnx.metadata import Preprocessing
from retrieval.errors import DmlError
from retrieval.files import check_target
from retrieval.formats.hdf5.file import Writer
from retrieval.resources import StageProgress

if TYPE_CHECKING:  # it imports torch, which embedding needs not
    from trainer.data.datasets import DataSet
    from trainer.data.source import Source


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
    recall: dict[str, tuple[float, float]] | None = None
    """With half: Recall@1 of the float32 and of the float16 vectors, by l2 and by cos."""
    seconds: float = 0.0
    """Of decoding, computing and writing rows."""
    writing: float = 0.0
    """Seconds of these spent in writing."""


class _Rewritten(Exception):
    """Leaves the writer without its finishing touch: the file has been written anew."""


def embed(
    run: Run,
    dim: int,
    source: Source,
    preprocessing: Preprocessing,
    splits: dict[str, np.ndarray],
    target: str | Path,
    *,
    attrs: dict[str, object],
    half: bool = False,
    batch_size: int = 32,
    resume: bool = False,
    force: bool = False,
    skip_bad: bool = False,
    workers: int | None = None,
    lanes: int = 1,
    stop: Callable[[], None] | None = None,
    progress: StageProgress | None = None,
) -> Embedded:
    """run: uint8 (B, crop, crop, 3) -> (B, dim), called by `lanes` threads at a time; `stop` ends
    its calls after an interrupt.

    splits: rows of the data set under the name that they get in the file; attrs: model,
    model_sha256, normalized and what else is to be recorded. workers: threads that decode.

    Images are read here for the first time. One that cannot be is an error; with skip_bad the file
    is written without it, and names it in its attributes. With half the rows become float16 at the
    end: until then the file holds float32, to compare the two.
    """
    target = check_target(target, force or resume)
    spec, data = preprocessing.spec(), source.data
    check_store(source, spec)
    _check_splits(splits, data.name)
    attrs = {"dataset": data.name, "preprocessing": preprocessing.to_dict()} | attrs
    attrs["images"] = where_images_are(data, target)
    columns = {
        s: (data.labels[r] if data.labelled else None, [data.paths[n] for n in r.tolist()])
        for s, r in splits.items()
    }
    names = np.array(data.label_names, np.str_) if data.labelled else None
    out = Writer(target, columns, dim, "float32", names, attrs, force, resume)
    dtype = "float16" if half else "float32"
    if resume and not force and finishing.is_finished(out, dtype):
        rows, left_out = finishing.content(target)
        return Embedded(target, rows, dim, dtype, 0, left_out)
    start, timing = time.perf_counter(), {"writing": 0.0, "computed": 0}
    bad: dict[str, Bad] = {split: [] for split in splits}
    recall = None
    try:
        with out:
            finishing.remove_leftovers(out)
            tasks = _missing(out, batch_size)
            threads = workers or chosen_workers(source)
            batches = run_batches(run, source, spec, splits, tasks, threads, lanes, stop)
            _write_rows(out, batches, bad, skip_bad, timing, progress)
            timing["seconds"] = time.perf_counter() - start
            if half or any(bad.values()):
                recall = finishing.rewrite(out, dtype, bad, progress)
                raise _Rewritten
    except _Rewritten:
        pass
    left_out = tuple(
        (columns[split][1][place], error.why or error.what)
        for split, found in bad.items()
        for place, error in found
    )
    counts = {split: len(rows) - len(bad[split]) for split, rows in splits.items()}
    return Embedded(target, counts, dim, dtype, skipped=left_out, recall=recall, **timing)


def where_images_are(data: DataSet, target: Path) -> dict[str, object]:
    """How a report finds the images again, also where their folder and the file moved together."""
    files = data.folder()
    found: dict[str, object] = {"files": files is not None, "options": dict(data.options)}
    root = data.root if files is None else files
    if root is not None:
        absolute = Path(root).resolve()
        found |= {"root": str(root), "absolute": str(absolute)}
        with suppress(ValueError):  # on Windows, another drive
            found["relative"] = os.path.relpath(absolute, target.parent)
    return found


def _check_splits(splits: dict[str, np.ndarray], name: str) -> None:
    empty = [split for split, rows in splits.items() if not len(rows)]
    if empty or not splits:
        raise DmlError(
            f"{name} has no images of {', '.join(empty) or 'any split'}.",
            "There is nothing to embed.",
            "Choose other splits: --split NAME",
        )


def _missing(out: Writer, batch_size: int) -> Iterator[Task]:
    """The missing rows in batches that begin at multiples of the batch size."""
    for split, count in out.lengths.items():
        missing = ~out.done(split)
        for at in range(0, count, batch_size):
            places = at + np.flatnonzero(missing[at : at + batch_size])
            if len(places):
                yield split, places


def _write_rows(
    out: Writer,
    batches: Iterator[Done],
    bad: dict[str, Bad],
    skip_bad: bool,
    timing: dict[str, float],
    progress: StageProgress | None,
) -> None:
    total = sum(out.lengths.values())
    done = sum(int(out.done(split).sum()) for split in out.lengths)
    for batch in batches:
        if batch.bad and not skip_bad:
            raise _unreadable(batch.bad)
        bad[batch.split] += batch.bad
        if batch.vectors is not None:
            _check_vectors(batch, out)
            start = time.perf_counter()
            out.write(batch.split, batch.places, batch.vectors)
            timing["writing"] += time.perf_counter() - start
            timing["computed"] += len(batch.places)
        done += len(batch.places) + len(batch.bad)
        if progress:
            progress("embedding", done, total)
    for split, found in bad.items():
        if len(found) == out.lengths[split]:
            raise DmlError(
                f"No image of {split} can be read.",
                found[0][1].what,
                "Look whether the folder of the images is still there.",
            )


def _unreadable(bad: Bad) -> DmlError:
    error = bad[0][1]
    return DmlError(
        error.what,
        error.why,
        "What has been computed is kept. Replace the image and add --resume, or go on without it: "
        "--resume --skip-bad",
    )


def _check_vectors(batch: Done, out: Writer) -> None:
    wanted = (len(batch.places), out.dim)
    if batch.vectors.shape != wanted:
        raise DmlError(
            f"The model gave embeddings of shape {batch.vectors.shape}, not {wanted}.",
            f"It was asked for {len(batch.places)} images.",
        )
    finite = np.isfinite(batch.vectors).all(axis=1)
    if not finite.all():
        path = out.layout.paths[batch.split][batch.places[np.argmin(finite)]]
        raise DmlError(
            f"The embedding of {path.decode('utf-8', 'replace')} has NaN or infinity in it.",
            "It has no distance to anything.",
            "Float16 overflows where float32 does not; try: --precision fp32",
        )
