"""`python -m tests.fuzz --files 1000`: damaged files of every format, each opened in a child.

None of them may crash, hang, take memory out of proportion, end in an error that is not told as
one, or be scored differently when evaluated again. Files come from the seed and their number.
pytest does not collect this folder: no module in it is called test_*.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from time import monotonic

from tests.fuzz import targets
from tests.fuzz.child import (
    FINDINGS,
    KINDS,
    MEMORY,
    OK,
    REFUSED,
    UNSTABLE,
    Limits,
    Outcome,
    attempt,
    attempts,
)
from tests.fuzz.targets import Target

FILLS = (0xA5, 0x3C)
"""What fresh memory holds in the first and the second evaluation of a file."""
BATCH = 16  # files that share a child
PER_BYTE, BEYOND = 10, 200 << 20  # memory for a file


@dataclass(frozen=True)
class Case:
    """A file in its place, and what is done with it."""

    target: Target
    path: Path
    way: str
    limits: Limits

    def open(self) -> str:
        return self.target.open(self.path, random.Random(self.way))


@dataclass
class Campaign:
    seed: int
    keep: Path
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    findings: list[dict[str, str]] = field(default_factory=list)
    began: float = field(default_factory=monotonic)

    def add(self, target: str, name: str, data: bytes, way: str, found: Outcome) -> None:
        self.counts[target, found.kind] += 1
        self.slowest[target] = max(self.slowest.get(target, 0.0), found.seconds)
        self.largest[target] = max(self.largest.get(target, 0), found.memory)
        if found.kind not in FINDINGS:
            return
        self.keep.mkdir(parents=True, exist_ok=True)
        path = self.keep / f"{way}-{name}"
        path.write_bytes(data)
        line = f"python -m tests.fuzz --file {path} --as '{target}'"
        self.findings.append({"kind": found.kind, "detail": found.detail, "again": line})
        print(f"{found.kind}: {found.detail}\n  {line}", file=sys.stderr, flush=True)

    def done(self) -> int:
        return sum(self.counts.values())

    def summary(self) -> dict:
        names = list(dict.fromkeys(name for name, _ in self.counts))
        table = {name: {kind: self.counts[name, kind] for kind in KINDS} for name in names}
        return {
            "seed": self.seed,
            "files": self.done(),
            "seconds": round(monotonic() - self.began),
            "outcomes": table,
            "slowest_seconds": {name: round(s, 2) for name, s in self.slowest.items()},
            "largest_mb": {name: n >> 20 for name, n in self.largest.items()},
            "findings": self.findings,
        }


def markdown(summary: dict) -> str:
    head = ["file", "files", *KINDS, "slowest", "memory"]
    lines = [head, ["---"] * len(head)]
    for name, row in summary["outcomes"].items():
        slowest, memory = summary["slowest_seconds"][name], summary["largest_mb"][name]
        numbers = [f"{row[kind]:,}" for kind in KINDS]
        lines.append([name, f"{sum(row.values()):,}", *numbers, f"{slowest:.1f} s", f"{memory} MB"])
    totals = [sum(row[kind] for row in summary["outcomes"].values()) for kind in KINDS]
    lines.append(["all", f"{sum(totals):,}", *(f"{n:,}" for n in totals), "", ""])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def limits_of(data: bytes) -> Limits:
    return Limits(memory=PER_BYTE * len(data) + BEYOND)


def run_files(cases: Sequence[Case]) -> list[Outcome]:
    """Files are opened one after another in a child, and those that gave a result once more, in
    memory that is filled with something else. What ends badly or gives another result is opened
    again in a child of its own.
    """
    first = _in_a_row(cases, FILLS[0])
    fine = [number for number, outcome in enumerate(first) if outcome.kind == OK]
    second = dict(zip(fine, _in_a_row([cases[n] for n in fine], FILLS[1]), strict=True))
    return [
        outcome if n in second and _equal(outcome, second[n]) else _again(case, outcome)
        for n, (case, outcome) in enumerate(zip(cases, first, strict=True))
    ]


def _in_a_row(cases: Sequence[Case], fill: int) -> list[Outcome]:
    found: list[Outcome] = []
    while len(found) < len(cases):
        rest = cases[len(found) :]
        found += attempts([case.open for case in rest], [case.limits for case in rest], fill)
    return found


def _equal(first: Outcome, second: Outcome) -> bool:
    return (first.kind, first.value) == (second.kind, second.value)


def _again(case: Case, first: Outcome) -> Outcome:
    if first.kind == REFUSED:
        return first
    second = attempt(case.open, case.limits, FILLS[1])
    if first.kind == OK:
        if second.kind != OK:
            return replace(second, detail=f"{second.detail} (not the first time)")
        if second.value != first.value:
            return Outcome(UNSTABLE, f"{first.value[:150]} then {second.value[:150]}")
        return first
    if second.kind in (OK, REFUSED) and first.kind != MEMORY:  # memory of earlier files counts too
        return replace(first, detail=f"{first.detail} (only after other files)")
    return second


def plan(files: int, seed: int, chosen: list[Target]) -> Iterator[tuple[int, Target]]:
    """Which number is a file of which kind: shares by weight, spread evenly."""
    wheel = [target for target in chosen for _ in range(target.weight)]
    random.Random(f"{seed} order").shuffle(wheel)
    for number in range(files):
        yield number, wheel[number % len(wheel)]


def attack(campaign: Campaign, chosen: list[Target], files: int, offset: int, place: Place) -> None:
    told, planned = monotonic(), plan(files, campaign.seed, chosen)
    while some := list(islice(planned, BATCH)):
        made = []
        for number, target in some:
            way = f"{campaign.seed}-{number + offset}"
            made.append((target, *target.damaged(random.Random(way), place.base), way))
        for (target, name, data, way), found in zip(made, place.run(made), strict=True):
            campaign.add(target.name, name, data, way, found)
        if monotonic() - told > 10:
            told = monotonic()
            rate = campaign.done() / (told - campaign.began)
            text = f"{campaign.done():,} files, {rate:.0f} a second"
            print(f"{text}, {len(campaign.findings)} findings", file=sys.stderr, flush=True)


def open_seeds(campaign: Campaign, chosen: list[Target], place: Place) -> None:
    sound = ((t, name, data, "sound-0") for t in chosen for name, data in t.seeds.items())
    while some := list(islice(sound, BATCH)):
        for (target, name, data, way), found in zip(some, place.run(some), strict=True):
            campaign.add(target.name, name, data, way, found)


class Place:
    """Folders that files are put into, one for each of a batch, with what they need beside them."""

    def __init__(self, base: Path, made: Path | None) -> None:
        self.base = base
        self.slots = [base / str(n) for n in range(BATCH)]
        for slot in self.slots:
            targets.lay_out(slot, made)

    def run(self, files: Sequence[tuple[Target, str, bytes, str]]) -> list[Outcome]:
        cases, before = [], []
        for slot, (target, name, data, way) in zip(self.slots, files, strict=False):
            path = slot / name
            before.append(path.read_bytes() if path.exists() else None)
            path.write_bytes(data)
            cases.append(Case(target, path, way, limits_of(data)))
        try:
            return run_files(cases)
        finally:
            for case, old in zip(cases, before, strict=True):
                case.path.unlink() if old is None else case.path.write_bytes(old)


def again(path: Path, kind: str, folder: Path) -> Outcome:
    """A file that an earlier campaign kept, opened as it was then."""
    seed, number, name = path.name.split("-", 2)
    heavy = kind in targets.HEAVY
    found = {target.name: target for target in PARTS[heavy](folder / "seeds")}
    place = Place(folder / "work", folder / "seeds" if heavy else None)
    return place.run([(found[kind], name, path.read_bytes(), f"{seed}-{number}")])[0]


PARTS = (targets.light, targets.heavy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sound", action="store_true", help="first every seed, undamaged")
    parser.add_argument("--only", help="names of targets, with commas between them")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="for findings")
    parser.add_argument("--file", type=Path, help="one kept file again")
    parser.add_argument("--as", dest="kind", help="the target of --file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.file:
            print(again(given.file, given.kind, folder))
            return 0
        campaign, sound = (Campaign(given.seed, given.keep) for _ in range(2))
        try:
            only = given.only.split(",") if given.only else None
            run(campaign, sound if given.sound else None, given.files, only, folder)
        except KeyboardInterrupt:
            print("Interrupted: this is what there was so far.", file=sys.stderr)
    summary = campaign.summary() | {"sound": sound.summary()["outcomes"]}
    summary["findings"] += sound.findings
    print(markdown(summary), json.dumps(summary), sep="\n\n")
    return 1 if summary["findings"] else 0


def run(
    campaign: Campaign, sound: Campaign | None, files: int, only: list[str] | None, folder: Path
) -> None:
    """First what needs no torch: a smaller parent forks faster. sound: of files as they are."""
    offset, left = 0, files
    for part, share in zip(PARTS, (2 / 3, 1.0), strict=True):
        heavy = part is targets.heavy
        if only and not any((name in targets.HEAVY) == heavy for name in only):
            continue
        chosen = [t for t in part(folder / "seeds") if only is None or t.name in only]
        place = Place(folder / "work", folder / "seeds" if heavy else None)
        gc.collect()
        gc.freeze()  # pages that the collector does not touch stay shared with the children
        if sound:
            open_seeds(sound, chosen, place)
        count = round(left * share)
        attack(campaign, chosen, count, offset, place)
        offset, left = offset + count, left - count


if __name__ == "__main__":
    sys.exit(main())
