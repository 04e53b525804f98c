"""Rewrite an embedding file: drop the rows of unreadable images, convert to float16.

The new file is written from `name.partial`, which is removed only when the new file has its name:
if the process is killed in between, only this step is repeated.
"""

from __future__ import annotations

import json
from dataclasses import replace

import h5py
import numpy as np

from exporter.embedding.engine import Bad, Rows
from retrieval.embeddings import Embeddings, scored_splits
from retrieval.errors import DmlError
from retrieval.files import (
    release,
    remove_scratch_folders,
    remove_unused,
    rename_durably,
    scratch_folder,
)
from retrieval.formats.arrays import file_blocks, gathered, mapped
from retrieval.formats.hdf5.layout import SAME
from retrieval.formats.hdf5.writing import Writer
from retrieval.loading.load import load
from retrieval.problem import from_embeddings
from retrieval.resources import StageProgress, stage

MOST_TEXT = 32_768  # bytes; an attribute of HDF5 holds 64 kB at most
MEMORY = 512 << 20  # bytes of a tile of distances

Vectors = dict[str, np.ndarray]
Recalls = dict[str, tuple[float, float]]  # by distance: Recall@1 before and after


def rewrite(
    out: Writer, dtype: str, bad: dict[str, Bad], progress: StageProgress | None, device: str
) -> Recalls | None:
    """Rewrite the locked file of `out`; return Recall@1 before and after a change of dtype.

    device: that counts the ranks, as in `retrieval.evaluation.Settings`.
    """
    keep = {
        split: np.delete(np.arange(count), [position for position, _ in bad[split]])
        for split, count in out.lengths.items()
    }
    columns: dict[str, tuple[np.ndarray | None, list[str]]] = {}
    for split, positions in keep.items():
        labels = out.layout.labels[split]
        paths = [out.layout.path(split, n, "surrogateescape") for n in positions.tolist()]
        columns[split] = (None if labels is None else labels[positions], paths)
    stored, recall = _mapped(out), None
    with scratch_folder(out.path.parent, _prefix(out)) as folder:
        new = folder / out.path.name
        with Writer(new, columns, out.dim, dtype, out.layout.names, _attrs(out, bad)) as writer:
            _copy(stored, keep, writer, progress)
        if np.dtype(dtype) != out.dtype:
            recall = _compare(stored, keep, load(new), device, progress)
        rename_durably(new, out.path)
    del stored  # Windows removes no file that is mapped or open
    release(out.raw)
    out.partial.unlink()
    return recall


def _prefix(out: Writer) -> str:
    """Prefix of the scratch folders in which this file is rewritten."""
    return f".{out.path.name}-"


def remove_leftovers(out: Writer) -> None:
    """Remove what a killed `rewrite` of this file left."""
    remove_scratch_folders(out.path.parent, _prefix(out))


def _mapped(out: Writer) -> Vectors:
    """The rows of the unfinished file, memory-mapped."""
    found = {}
    with h5py.File(out.partial, "r", locking=False) as file:
        for split, count in out.lengths.items():
            offset = file[split]["embeddings"].id.get_offset()
            found[split] = mapped(out.partial, out.dtype, (count, out.dim), offset)
    return found


def _attrs(out: Writer, bad: dict[str, Bad]) -> dict[str, object]:
    with h5py.File(out.partial, "r", locking=False) as file:
        attrs = out.layout.attrs | {"created": file.attrs["created"]}
    names, size, count = [], 0, 0
    for split, found in bad.items():
        for position, error in found:
            count += 1
            entry = [out.layout.path(split, position), error.why or error.what]
            size += len(json.dumps(entry)) + 2
            if size < MOST_TEXT:
                names.append(entry)
    if count:  # `listed_sha256` covers all paths, including those left out
        listed = attrs.pop("paths_sha256")
        attrs |= {"skipped": count, "skipped_paths": names, "listed_sha256": listed}
    return attrs


def _copy(stored: Vectors, keep: Rows, writer: Writer, progress: StageProgress | None) -> None:
    done, total = 0, sum(map(len, keep.values()))
    for split, positions in keep.items():
        for part in file_blocks(len(positions), stored[split].shape[1] * 4):
            writer.write(split, part.start, stored[split][positions[part]])
            done += part.stop - part.start
            if progress:
                progress("writing", done, total)


def _compare(
    stored: Vectors, keep: Rows, after: Embeddings, device: str, progress: StageProgress | None
) -> Recalls | None:
    """Exact Recall@1 by l2 and cos, of the vectors as computed and as stored.

    None if they have no labels.
    """
    from retrieval.ranking.ranks import recall_at_1  # its kernels take a second to load

    if any(part.labels is None for part in after.splits.values()):
        return None
    names = {split: split for split in after.splits}
    if not scored_splits(names):  # then the first one is scored
        names = {"test": next(iter(names))}
    after = replace(after, splits={split: after.splits[name] for split, name in names.items()})
    before = {
        split: replace(part, vectors=gathered(stored[names[split]], keep[names[split]]))
        for split, part in after.splits.items()
    }
    recalls = []
    for data, name in ((replace(after, splits=before), "float32"), (after, "float16")):
        report = stage(progress, f"Recall@1 of {name}")
        problem = from_embeddings(data)
        found = recall_at_1(problem, memory=MEMORY, device=device, progress=report)
        recalls.append(found)
    return {distance: (recalls[0][distance], recalls[1][distance]) for distance in recalls[0]}


def finished(out: Writer, dtype: str) -> tuple[dict[str, int], tuple[tuple[str, str], ...]] | None:
    """Return what the target holds if it is already the wanted file; clean up after killed runs.

    That is the number of rows of each split, and path and reason of each image left out.
    """
    try:
        found = load(out.path)
    except DmlError:  # not there, or not a file of ours
        return None
    attrs = found.attrs | {
        "paths_sha256": found.attrs.get("listed_sha256", found.attrs.get("paths_sha256"))
    }
    same = all(attrs.get(key) == out.layout.attrs.get(key) for key in SAME)
    kinds = {(part.vectors.dtype.name, part.vectors.shape[1]) for part in found.splits.values()}
    if not same or set(found.splits) != set(out.lengths) or kinds != {(dtype, out.dim)}:
        return None
    if "skipped" in attrs or dtype != out.dtype:  # `rewrite` may have been killed at its end
        remove_leftovers(out)
        remove_unused(out.partial)
    listed = json.loads(str(attrs.get("skipped_paths", "[]")))
    rows = {split: len(part.vectors) for split, part in found.splits.items()}
    return rows, tuple((str(name), str(why)) for name, why in listed)
