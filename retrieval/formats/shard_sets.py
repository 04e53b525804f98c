"""What a shard says of the set that it belongs to, and whether all shards of a set are there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from retrieval.embeddings import Embeddings, note
from retrieval.errors import DmlError, listed, pattern
from retrieval.formats import FORMATS

ATTRIBUTE = "shard"
PART = re.compile(r"(.+)-(\d+)-of-(\d+)(\.[^.]+)")
"""A name of `part_name`."""
SHOWN = 5


@dataclass(frozen=True)
class Shard:
    """Shard `number` of a set; all other values are those of the set."""

    number: int
    of: int
    rows: int
    """Of all shards together, with those of unreadable images."""
    batch_size: int
    """Shards are divided between batches."""
    list_sha256: str
    """Of all paths and labels."""

    def attribute(self) -> dict[str, object]:
        return {ATTRIBUTE: asdict(self)}

    @property
    def whole(self) -> Shard:
        """The same for all shards of a set."""
        return replace(self, number=0)


Member = tuple[Path, Shard | None]
"""A file of a set, and what it says of itself."""


def part_name(name: str, number: int, of: int) -> str:
    """`embeddings-2-of-8.h5`, so that the shards of a file can be collected in one folder."""
    path = Path(name)
    return name if of == 1 else f"{path.stem}-{number}-of-{of}{path.suffix}"


def shard_of(attrs: Mapping[str, object]) -> Shard | None:
    """What a file says of itself; None for one that is no shard, or of an older dmltool."""
    try:
        found = Shard(**json.loads(str(attrs.get(ATTRIBUTE))))
    except (ValueError, TypeError, RecursionError):  # the file may be anyone's
        return None
    numbers = found.number, found.of, found.rows, found.batch_size
    if any(type(number) is not int for number in numbers) or type(found.list_sha256) is not str:
        return None
    return found if 1 <= found.number <= found.of else None


def note_part(data: Embeddings) -> None:
    """Say of a file that is read alone that it is one shard of a set."""
    if shard := shard_of(data.attrs):
        rows = sum(len(split.vectors) for split in data.splits.values())
        note(
            f"{data.source} is shard {shard.number} of {shard.of}: "
            f"{rows:,} rows of a set of {shard.rows:,}"
        )


def require_no_part(folder: Path, data: Embeddings) -> None:
    """Raise if the file that stands for a folder by its name is one shard of a set."""
    if (shard := shard_of(data.attrs)) and shard.of > 1:
        raise DmlError(
            f"{folder} is not read as a whole set.",
            f"By its name, {data.source} stands for the folder, and it is shard {shard.number} of "
            f"{shard.of} only.",
            f"Name all shards: {pattern(folder, Path(data.source).suffix)}",
        )


def require_one_whole(one: Member, other: Member) -> None:
    """Raise for two files with rows of one split that are not shards of the same set."""
    (a, first), (b, second) = one, other
    if first is None or second is None:
        if first == second:
            return
        shard, file = (second, b) if first is None else (first, a)
        assert shard is not None, "they differ"
        why = f"Only {file} is a shard: {shard.number} of {shard.of}."
    elif first.whole == second.whole:
        return
    elif first.list_sha256 != second.list_sha256:
        why = (
            f"Their lists of images differ, of {first.rows:,} and of {second.rows:,} images, "
            "or the labels."
        )
    else:
        why = (
            f"The first is one of {first.of} shards with batches of {first.batch_size} images, "
            f"the second one of {second.of} with batches of {second.batch_size}."
        )
    raise DmlError(
        f"{a} and {b} do not belong to one set.",
        why,
        "Choose files by a pattern, or embed all shards with the same images and options.",
    )


def require_complete(name: Path | str, members: Iterable[Member]) -> None:
    """Raise unless of each set every shard is there once."""
    wholes: dict[Shard, dict[int, list[Path]]] = {}
    for file, shard in members:
        if shard:
            wholes.setdefault(shard.whole, {}).setdefault(shard.number, []).append(file)
    for whole, found in wholes.items():
        why, fix = [], []
        if missing := whole.of - len(found):
            gaps = [*islice((n for n in range(1, whole.of + 1) if n not in found), SHOWN)]
            why.append(f"Missing: shard {listed(gaps, SHOWN, count=missing)} of {whole.of}.")
            options = listed([f"--shard {n}/{whole.of}" for n in gaps], SHOWN, count=missing)
            fix.append(f"Run the command of the other shards with {options}.")
            folders = {file.parent for files in found.values() for file in files}
            for partial, shard in _half_written(folders):
                if shard.whole == whole and shard.number not in found:
                    why.append(f"{partial} is half-written.")
                    fix.append(f"Add --resume to continue shard {shard.number}.")
        for number, files in sorted(found.items()):
            if len(files) > 1:
                times = f"Shard {number} of {whole.of} is there {len(files)} times"
                why.append(f"{times}: {listed(files, SHOWN)}.")
                fix.append(f"Keep one file of shard {number}.")
        if why:
            raise DmlError(f"{name} is not a whole set.", " ".join(why), " ".join(fix))


def _half_written(folders: Iterable[Path]) -> Iterator[tuple[Path, Shard]]:
    """The half-written shards in folders."""
    from retrieval.formats.hdf5.reading import attributes  # it imports this module

    for folder in sorted(folders):
        for suffix in FORMATS.find("hdf5").suffixes:
            for path in sorted(folder.glob(f"*{suffix}.partial")):
                if shard := shard_of(attributes(path)):
                    yield path, shard
