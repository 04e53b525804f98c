"""Join the files of one set: their rows follow each other as if they were in one file.

Ranking wants each set of vectors as one array. Those of shards are therefore copied, one shard
after the other, to a temporary file without a name, which is then mapped into memory: one shard at
a time is held, and the pages of the file give way when memory is wanted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from retrieval.embeddings import SPELLINGS, Embeddings, Split, collected, note, plain, to_read
from retrieval.errors import DmlError, pattern
from retrieval.formats import FORMATS
from retrieval.formats import labels as label_arrays
from retrieval.formats.arrays import Growing
from retrieval.formats.named_arrays import parts
from retrieval.formats.shard_sets import Member, require_complete, require_one_whole, shard_of

T = TypeVar("T")


@dataclass
class _Split:
    """What has been read of one split."""

    vectors: Growing
    first: Member
    rows: list[tuple[Path, int]] = field(default_factory=list)
    shards: list[tuple[Path, Split, np.ndarray | None]] = field(default_factory=list)
    """Without their vectors, and the names of their labels."""
    real: dict[str, Path] = field(default_factory=dict)
    """The files by the places that links lead to."""


def join(name: Path | str, files: Sequence[Path], read: Callable[[Path], Embeddings]) -> Embeddings:
    """Read shards in the order given; `read` reads one of them."""
    _refuse_twins(files)
    if len(files) == 1:
        only = _read(name, files[0], read)
        require_complete(name, [(files[0], shard_of(only.attrs))])
        return replace(only, source=name)
    named = _named_splits(name, files)
    if named:
        wanted = to_read(named)
        files = [file for file, split in zip(files, named, strict=True) if split in wanted]
        named = wanted
    found: dict[str, _Split] = {}
    attrs: dict[str, object] = {}
    first: dict[str, object] = {}
    members: list[Member] = []
    with ExitStack() as opened:
        for n, file in enumerate(files):
            shard = _read(name, file, read)
            if named and list(shard.splits) == ["test"]:
                shard = replace(shard, splits={named[n]: shard.splits["test"]})
            if n == 0:
                first = attrs = shard.attrs
            _require_one_model(files[0], first, file, shard.attrs)
            attrs = _shared(attrs, shard.attrs)
            members.append((file, whole := shard_of(shard.attrs)))
            enough = not whole or whole.of <= len(files)  # else copy nothing
            _add(found, opened, members[n], shard, enough)
            shard = replace(shard, splits={})  # not held while the next one is read
        require_complete(name, members)
        names = _common_names(found)
        splits = {split: _result(part, names is None) for split, part in found.items()}
    given = any(part.paths is not None for s in found.values() for _, part, _ in s.shards)
    if given and any(split.paths is None for split in splits.values()):
        note(f"{name}: paths are not used, because some of its files have none")
    rows = {split: part.rows for split, part in found.items()}
    return Embeddings(name, shard.format, splits, names, attrs, shards=rows)


def _require_one_model(
    a: Path, attrs: Mapping[str, object], b: Path, others: Mapping[str, object]
) -> None:
    """Raise for two shards that were embedded by different models or from other pixels."""
    for key, what in (("model_sha256", "by the same model"), ("preprocessing", "in the same way")):
        known = attrs.get(key), others.get(key)
        if None not in known and plain(known[0]) != plain(known[1]):
            raise DmlError(
                f"{a} and {b} do not belong to one set.",
                f"They were not embedded {what}, so distances between their rows say nothing.",
                "Embed the images of one of them again, or choose files by a pattern.",
            )


def _shared(attrs: dict[str, object], others: dict[str, object]) -> dict[str, object]:
    """The metadata that are the same in both."""
    return {k: v for k, v in attrs.items() if k in others and plain(v) == plain(others[k])}


def join_labels(
    name: Path | str,
    files: Sequence[Path],
    read: Callable[[Path], np.ndarray],
    rows: Sequence[tuple[Path, int]] = (),
) -> np.ndarray:
    """The labels of several files, one after the other.

    rows: the files of the vectors, with their numbers of rows.
    """
    _refuse_twins(files)
    found = [(file, _read(name, file, read)) for file in files]
    pairs = zip(found, rows, strict=True) if len(found) == len(rows) else ()
    for (file, labels), (vectors, count) in pairs:
        if len(labels) != count:
            raise DmlError(
                f"{file} has {len(labels):,} labels for the {count:,} vectors of {vectors}.",
                "Files of labels and of vectors are paired in natural order of their names.",
                "Write a label for each vector of the file, or one file of labels for the set.",
            )
    return _joined_labels(found)


def _refuse_twins(files: Sequence[Path]) -> None:
    """Raise for two files that differ only in their suffixes, as part-0.npy and part-0.npy.gz."""
    suffixes = {suffix for format in FORMATS for suffix in format.suffixes}
    seen: dict[Path, Path] = {}
    for file in files:
        bare = file
        while bare.suffix.lower() in suffixes:
            bare = bare.with_suffix("")
        if (other := seen.setdefault(bare, file)) != file:
            raise DmlError(
                f"{other} and {file} seem to be the same file in two formats.",
                "A set with both would have its rows twice.",
                f"Remove one of them, or choose files: {pattern(file.parent, file.suffix)}",
            )


def of_split(files: Sequence[Path], key: str | None) -> Sequence[Path]:
    """The files whose names tell the split `key`, which may be all files of a set; else none."""
    told, wanted = _told_splits(files), SPELLINGS.get(key or "")
    if wanted is None:
        return []
    return [file for file, split in zip(files, told, strict=True) if split == wanted]


def _read(name: Path | str, file: Path, read: Callable[[Path], T]) -> T:
    """Read a shard; a note that every shard would repeat is made once, about the set."""
    with collected() as notes:
        shard = read(file)
    for text in notes:
        note(text.replace(str(file), str(name)))
    return shard


def without_train(files: Sequence[Path]) -> Sequence[Path]:
    """The files that `join` will read, chosen by name; they need not exist yet."""
    told = _told_splits(files)
    wanted = to_read([split for split in told if split])
    kept = {file: split for file, split in zip(files, told, strict=True) if split in wanted}
    if None in told or len(kept) == len(files):
        return files
    alone = _told_splits(list(kept))  # test/query-0 beside train/0 is of `test`, alone of `query`
    return list(kept) if len(set(alone)) == 1 or alone == list(kept.values()) else files


def _told_splits(files: Sequence[Path]) -> list[str | None]:
    """The split that the name of each file tells, below the folder that holds all of them."""
    folder = os.path.commonpath([file.parent for file in files])
    return [parts(str(file.relative_to(folder).with_suffix("")))[0] for file in files]


def _named_splits(name: Path | str, files: Sequence[Path]) -> list[str]:
    """The split that the name of each file tells, such as test-0.npy, if they tell several."""
    told = _told_splits(files)
    if len(set(told)) == 1:
        return []
    if None in told:
        with_split = next(n for n, split in enumerate(told) if split)
        raise DmlError(
            f"{name} has files of one split and files of none.",
            f"{files[with_split]} is of {told[with_split]}, {files[told.index(None)]} tells no "
            "split.",
            "Choose the files of one set by a pattern, or name all by their split.",
        )
    return [split for split in told if split]


def _add(
    found: dict[str, _Split], opened: ExitStack, member: Member, shard: Embeddings, copied: bool
) -> None:
    """Add the splits of a shard to what has been found."""
    for split, part in shard.splits.items():
        if split not in found:
            growing = opened.enter_context(closing(Growing(part.vectors)))
            found[split] = _Split(growing, member)
        require_one_whole(found[split].first, member)
        if copied:
            _add_split(found[split], member[0], part, shard.label_names)


def _add_split(found: _Split, file: Path, part: Split, names: np.ndarray | None) -> None:
    if (other := found.real.setdefault(os.path.realpath(file), file)) != file:
        raise DmlError(
            f"{other} and {file} are the same file: one is a link, or is in a linked folder.",
            "A set with both would have its rows twice.",
            f"Remove the link, or choose files: {pattern(other.parent, other.suffix)}",
        )
    have, given = found.vectors, part.vectors
    if (have.dim, have.dtype) != (given.shape[1], given.dtype):
        raise DmlError(
            f"{found.shards[0][0]} and {file} do not belong to one set.",
            f"The first has vectors of {have.dim} dimensions and the dtype {have.dtype}, "
            f"the second of {given.shape[1]} and {given.dtype}.",
            "Choose the files of one set by a pattern, or write them alike.",
        )
    have.append(given)
    found.rows.append((file, len(given)))
    found.shards.append((file, replace(part, vectors=np.empty(0)), names))


def _common_names(found: dict[str, _Split]) -> np.ndarray | None:
    """The names of labels if all shards have the same; their numbers then mean the same."""
    every = [names for split in found.values() for _, _, names in split.shards]
    first = every[0]
    same = first is not None and all(
        names is not None and np.array_equal(first, names) for names in every
    )
    return first if same else None


def _result(found: _Split, by_name: bool) -> Split:
    have = [file for file, part, _ in found.shards if part.labels is not None]
    shards = []
    for file, part, names in found.shards if have else ():
        labels = part.labels
        if labels is None:
            raise DmlError(
                f"{have[0]} has labels and {file} has none.",
                "The files of a set have all of them labels, or none of them.",
                "Give the labels in files of their own: --labels 'labels/*.npy'",
            )
        if by_name and names is not None and not label_arrays.is_text(labels):
            labels = label_arrays.named(labels, names, str(file))
        shards.append((file, labels))
    paths = [part.paths for _, part, _ in found.shards if part.paths is not None]
    whole = len(paths) == len(found.shards)
    return Split(
        found.vectors.array(),
        _joined_labels(shards) if have else None,
        _joined(paths) if whole else None,
        taken=found.shards[0][1].taken,
    )


def _joined_labels(shards: Sequence[tuple[Path, np.ndarray]]) -> np.ndarray:
    texts = {label_arrays.is_text(labels): file for file, labels in shards}
    if len(texts) == 2:
        raise DmlError(
            f"The labels of {texts[True]} are text, those of {texts[False]} are numbers.",
            "Nothing tells which name belongs to which number.",
            "Write all of them as text, or all as numbers.",
        )
    return _joined([labels for _, labels in shards])


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    if {array.dtype.kind for array in arrays} <= {"i"}:
        return np.concatenate(arrays)
    # NumPy would join int64 and uint64 as floats, and give every text the room of the longest.
    values = [value for array in arrays for value in array.tolist()]
    return label_arrays.from_values(values, "The set")
