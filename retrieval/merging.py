"""Merge several embedding files of the same items: rows l2-normalised, then joined.

Cosines of the result are the means of the cosines of its parts. Rows are in the order of the first
file; those of the others are found by path, or by position where a file has no paths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrieval.distances import unit_rows
from retrieval.embeddings import Embeddings
from retrieval.errors import DmlError
from retrieval.files import check_target, relative, sha256
from retrieval.formats.arrays import file_blocks, files_in
from retrieval.formats.hdf5.writing import KIND, Writer, common_dim
from retrieval.loading.inputs import Inputs
from retrieval.loading.sources import Place
from retrieval.matching import match_rows
from retrieval.resources import StageProgress

ORIGIN = ("model", "model_sha256", "dataset")
BYTES = 8  # of a number while rows are normalised

Order = dict[str, np.ndarray | None]  # for each split: rows (N,) in the order of the first file


@dataclass(frozen=True)
class Merged:
    path: Path
    splits: dict[str, int]
    """Rows of each split."""
    dims: tuple[int, ...]
    """Of each source; their sum is that of the file."""
    matched: dict[str, str]
    """For each split: by paths, or by position."""


def merge(
    paths: Sequence[str | Path],
    target: str | Path,
    force: bool = False,
    progress: StageProgress | None = None,
) -> Merged:
    """Merge files of the same items and labels; a killed merge continues when it is repeated."""
    if len(paths) < 2:
        raise DmlError(
            f"{len(paths)} file cannot be merged.",
            "At least two are needed.",
            "Give two or more: dmltool merge A.h5 B.h5 --out C.h5",
        )
    inputs = Inputs(*map(str, paths), progress=progress, whole=True)
    target = check_target(target, KIND, force, inputs.files)
    hashes = [_hash(inputs.places[str(path)], progress) for path in paths]
    data = [inputs.load(str(path)) for path in paths]
    found = [match_rows(data[0], other) for other in data[1:]]
    dims = tuple(common_dim(each.source, each.splits) for each in data)
    first = data[0].splits
    lengths = {split: len(part.vectors) for split, part in first.items()}
    orders: list[Order] = [dict.fromkeys(first), *found]
    out = Writer(
        target,
        {split: (part.labels, part.paths) for split, part in first.items()},
        sum(dims),
        "float32",
        data[0].label_names,
        _attrs(data, dims, hashes) | _images(data, target.parent),
        force=force,
        resume=not force,
        lengths=lengths,
    )
    with out:
        _write(out, data, orders, progress)
        inputs.check_unchanged()
    matched = {
        split: "position" if any(order[split] is None for order in found) else "paths"
        for split in lengths
    }
    return Merged(target, lengths, dims, matched)


def _hash(place: Place, progress: StageProgress | None) -> str:
    """The hash of all files of a set or store; empty if one is missing."""
    found = [file for path in place.files for file in sorted(files_in(path))]
    if not all(path.is_file() for path in found):
        return ""  # reading it will tell what is wrong
    return sha256(*found, progress=progress)


def _attrs(data: list[Embeddings], dims: tuple[int, ...], hashes: list[str]) -> dict[str, object]:
    """The metadata of the merged file.

    `normalized` is False: a row of k unit vectors has the length sqrt(k).
    """
    said = [  # a text, unless the file is from somewhere else
        {k: v for k in ORIGIN if isinstance(v := each.attrs.get(k), str)} for each in data
    ]
    sources = [
        {"file": Path(each.source).name, "sha256": sha256, "dim": dim} | own
        for each, dim, sha256, own in zip(data, dims, hashes, said, strict=True)
    ]
    attrs: dict[str, object] = {
        "model": " + ".join(str(own.get("model", own["file"])) for own in sources),
        # Stands for all of them, so that a merge of other files does not continue this one.
        "model_sha256": hashlib.sha256(" ".join(hashes).encode()).hexdigest(),
        "merged": sources,
        "normalized": False,
    }
    named = {own["dataset"] for own in said if "dataset" in own}
    if len(named) == 1:
        attrs["dataset"] = named.pop()
        attrs |= _recall_at(data)
    return attrs


def _recall_at(data: list[Embeddings]) -> dict[str, object]:
    """The usual values of K of a data set, if files record them."""
    said = [value for each in data if isinstance(value := each.attrs.get("recall_at"), str)]
    return {"recall_at": said[0]} if said else {}


def _images(data: list[Embeddings], folder: Path) -> dict[str, object]:
    """Where the images are (docs/files.md), if the files agree; `relative` is from this folder."""
    found = []
    for each in data:
        with suppress(ValueError, AttributeError, RecursionError):  # the file may be anyone's
            images = json.loads(str(each.attrs.get("images", "")))
            # As seen from the old file, and from the folder that it was made in.
            found.append({k: v for k, v in images.items() if k not in ("relative", "root")})
    if not found or any(images != found[0] for images in found):
        return {}
    absolute = found[0].get("absolute")
    if absolute and (seen := relative(Path(str(absolute)), folder)):
        found[0]["relative"] = seen
    return {"images": found[0]}


def _write(
    out: Writer, data: list[Embeddings], orders: list[Order], progress: StageProgress | None
) -> None:
    done, total = 0, sum(out.lengths.values())
    for split, count in out.lengths.items():
        there = out.done(split)
        for part in file_blocks(count, out.dim * BYTES):
            if not there[part].all():
                rows = [
                    _units(each, split, part, order[split])
                    for each, order in zip(data, orders, strict=True)
                ]
                out.write(split, part.start, np.concatenate(rows, axis=1))
            done += part.stop - part.start
            if progress:
                progress("merging", done, total)


def _units(data: Embeddings, split: str, part: slice, order: np.ndarray | None) -> np.ndarray:
    """(n, D) float32 rows of length 1; a row of zeros has no direction and stays."""
    vectors = data.splits[split].vectors
    rows = np.asarray(vectors[part if order is None else order[part]], np.float64)
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        row = part.start + int(np.argmin(finite))
        raise DmlError(
            f"{data.source}: row {row if order is None else order[row]} of {split} holds NaN or "
            "Inf.",
            "It has no direction.",
            "Embed this item again.",
        )
    largest = np.abs(rows).max(axis=1, keepdims=True)
    # Else the squares of huge numbers overflow.
    return unit_rows(rows / np.where(largest > 0, largest, 1)).astype(np.float32)
