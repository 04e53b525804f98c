"""What a shard says of the set that it belongs to, and whether all shards of a set are there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from retrieval.embeddings import Embeddings, note
from retrieval.errors import DmlError

ATTRIBUTE = "shard"
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


def shard_of(attrs: Mapping[str, object]) -> Shard | None:
    """What a file says of itself; None for one that is no shard, or of an older dmltool."""
    try:
        found = Shard(**json.loads(str(attrs.get(ATTRIBUTE))))
    except (ValueError, TypeError, RecursionError):  # the file may be anyone's
        return None
    numbers = found.number, found.of, found.rows, found.batch_size
    if any(type(number) is not int for number in numbers) or not 1 <= found.number <= found.of:
        return None
    return found


def note_part(data: Embeddings) -> None:
    """Say of a file that is read alone that it is one shard of a set."""
    if shard := shard_of(data.attrs):
        rows = sum(len(split.vectors) for split in data.splits.values())
        note(
            f"{data.source} is shard {shard.number} of {shard.of}: "
            f"{rows:,} rows of a set of {shard.rows:,}"
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
            why.append(f"Missing: shard {_listed(gaps, missing)} of {whole.of}.")
            options = _listed([f"--shard {n}/{whole.of}" for n in gaps], missing)
            fix.append(f"Run the command of the other shards with {options}.")
            folders = {file.parent for files in found.values() for file in files}
            for partial in sorted(path for each in folders for path in each.glob("*.h5.partial")):
                why.append(f"{partial} is half-written.")
                fix.append("Add --resume to continue it.")
        for number, files in sorted(found.items()):
            if len(files) > 1:
                times = f"Shard {number} of {whole.of} is there {len(files)} times"
                why.append(f"{times}: {_listed(files, len(files))}.")
                fix.append(f"Keep one file of shard {number}.")
        if why:
            raise DmlError(f"{name} is not a whole set.", " ".join(why), " ".join(fix))


def _listed(some: Sequence[object], count: int) -> str:
    """The first of `count` things."""
    texts = [str(each) for each in some[:SHOWN]]
    if count > len(texts):
        texts.append(f"{count - len(texts):,} more")
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
