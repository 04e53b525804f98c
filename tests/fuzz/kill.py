"""`python -m tests.fuzz.kill --kills 100`: writers killed at random moments, then run again.

In the end everything must be as if nothing had happened: the same files with the same content and
no others. A kill comes after a random time, or before a random one of the file operations that an
undisturbed run makes; it is SIGKILL mostly, else SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from tests.fuzz import victims
from tests.fuzz.child import OK, Limits, Outcome, attempt
from tests.fuzz.victims import VICTIMS, Command, Victim

SAME, LOST, BLOCKED, LITTER, TORN, HANG = "same", "lost", "blocked", "litter", "torn", "hang"
KINDS = (SAME, LOST, BLOCKED, LITTER, TORN, HANG)
SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM, signal.SIGINT)
AUDITED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.chmod")
LONG = Limits(120.0, 8 << 30)
GRACE = 30.0  # seconds that SIGTERM and SIGINT may take


@dataclass(frozen=True)
class Reference:
    """An undisturbed run."""

    contents: dict[str, str]
    seconds: float
    operations: int


@dataclass
class Campaign:
    seed: int
    before: dict[str, str]  # what is in the folder before any command
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, str]] = field(default_factory=list)
    began: float = field(default_factory=monotonic)

    def summary(self) -> dict:
        names = [v.name for v in VICTIMS if any(v.name == name for name, _ in self.counts)]
        return {
            "seed": self.seed,
            "kills": sum(self.kills.values()),
            "seconds": round(monotonic() - self.began),
            "signals": dict(self.signals),
            "outcomes": {
                name: {"kills": self.kills[name]}
                | {kind: self.counts[name, kind] for kind in KINDS}
                for name in names
            },
            "findings": self.findings,
        }


def markdown(summary: dict) -> str:
    head = ["command", "kills", "runs", *KINDS]
    lines = [head, ["---"] * len(head)]
    rows = summary["outcomes"]
    total = {key: sum(row[key] for row in rows.values()) for key in ("kills", *KINDS)}
    for name, row in (rows | {"all": total}).items():
        runs = sum(row[kind] for kind in KINDS)
        lines.append([name, *(f"{n:,}" for n in (row["kills"], runs, *(row[k] for k in KINDS)))])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# One command in a child


def started(
    command: Command, folder: Path, at: int | None = None, signum: int = signal.SIGKILL
) -> int:
    """The process that runs it, in a group of its own. at: it ends itself before that operation."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _silence()
        os.chdir(folder)
        if at is not None:
            watch_operations(folder, at, signum)
        code = int(victims.run_command(command))
    except KeyboardInterrupt:
        code = 130
    finally:
        os._exit(code)


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))


def watch_operations(folder: Path, at: int, signum: int) -> list[int]:
    """Counts what is done to files of the folder; before number `at` the signal comes."""
    seen, inside = [0], (str(folder), str(folder.resolve()))

    def count() -> None:
        if seen[0] == at:
            os.kill(os.getpid(), signum)
        seen[0] += 1

    def hook(event: str, args: tuple) -> None:
        if event in AUDITED and args and isinstance(args[0], str | os.PathLike | int):
            name = args[0] if isinstance(args[0], int) else os.fspath(args[0])
            if isinstance(name, str) and (not os.path.isabs(name) or name.startswith(inside)):
                count()

    sys.addaudithook(hook)
    for name in ("fsync", "posix_fallocate"):
        original = getattr(os, name)

        def counted(*args, original=original):
            count()
            return original(*args)

        setattr(os, name, counted)
    return seen


def waited(pid: int, seconds: float) -> bool:
    """Whether it ended by then; it is not reaped."""
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(1000 * seconds))
    finally:
        os.close(descriptor)


def killed(pid: int, signum: int, delay: float, grace: float) -> tuple[bool, bool]:
    """Whether a signal ended it, and whether it obeyed in time."""
    early = waited(pid, delay)
    if not early:
        with suppress(ProcessLookupError):
            os.killpg(pid, signum) if signum != signal.SIGINT else os.kill(pid, signum)
    obeyed = waited(pid, grace)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    by_signal = os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 130
    return by_signal, obeyed


# A trial: some kills, then a run to the end


class Ground:
    """The folder that every command runs in; always the same path, which caches go by."""

    def __init__(self, base: Path) -> None:
        self.template, self.work = base / "template", base / "work"
        os.environ["XDG_CACHE_HOME"] = str(self.work / "cache")

    def fresh(self) -> Path:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.template, self.work)  # with dates
        return self.work

    def contents(self) -> dict[str, str]:
        """In a child: HDF5 keeps files open that it fails on."""
        found = attempt(lambda: json.dumps(victims.contents(self.work)), LONG)
        return json.loads(found.value) if found.kind == OK else {"": found.detail}

    def run(self, command: Command) -> tuple[Outcome, int]:
        def work() -> str:
            os.chdir(self.work)
            seen = watch_operations(self.work, -1, 0)
            code = victims.run_command(command)
            return f"{code} {seen[0]}"

        found = attempt(work, LONG)
        code, _, operations = found.value.partition(" ")
        if found.kind == OK and code != "0":
            found = Outcome("exit", f"exit code {code}")
        return found, int(operations or 0)


def reference(victim: Victim, ground: Ground) -> Reference:
    ground.fresh()
    found, operations = ground.run(victim.begin)
    assert found.kind == OK, (victim.name, found)
    return Reference(ground.contents(), found.seconds, operations)


def trial(
    victim: Victim,
    ground: Ground,
    whole: Reference,
    rng: random.Random,
    campaign: Campaign,
    grace: float = GRACE,
) -> tuple[str, str]:
    folder, story = ground.fresh(), []
    command: Command | None = victim.begin
    for _ in range(rng.choice((1, 1, 2, 3))):
        signum = rng.choice(SIGNALS)
        if rng.random() < 0.5:
            at, delay = rng.randrange(max(1, whole.operations)), LONG.seconds
        else:
            at, delay = None, rng.uniform(0, 1.05 * whole.seconds)
        moment = f"{delay:.3f} s" if at is None else f"operation {at}"
        story.append(f"{victims.shown(command)} [{signal.Signals(signum).name} at {moment}]")
        pid = started(command, folder, at, signum)
        by_signal, obeyed = killed(pid, signum, delay, grace)
        if not obeyed:
            return HANG, " ; ".join(story)
        if by_signal:
            campaign.kills[victim.name] += 1
            campaign.signals[signal.Signals(signum).name] += 1
        torn = torn_files(ground.contents(), whole, campaign.before)
        if torn:
            return TORN, f"{torn} after {' ; '.join(story)}"
        command = victim.again(folder)
        if command is None:
            break
    if command is not None:
        story.append(victims.shown(command))
        found, _ = ground.run(command)
        if found.kind != OK:
            return BLOCKED, f"{found.detail[:300]} after {' ; '.join(story)}"
    return compared(ground.contents(), whole.contents, " ; ".join(story))


def torn_files(there: dict[str, str], whole: Reference, before: dict[str, str]) -> list[str]:
    """What bears the name of a result must be whole, and what was read must be as it was."""
    results = (".h5", ".onnx", ".html", ".json", ".csv", ".images")
    changed = [name for name, digest in before.items() if there.get(name) != digest]
    half = [
        name
        for name, digest in there.items()
        if name.endswith(results)
        and name not in before
        and whole.contents.get(name, digest) != digest
    ]
    return changed + half


def compared(there: dict[str, str], wanted: dict[str, str], story: str) -> tuple[str, str]:
    lost = [name for name, digest in wanted.items() if there.get(name) != digest]
    extra = [name for name in there if name not in wanted]
    if lost:
        return LOST, f"{lost} after {story}"
    if extra:
        return LITTER, f"{extra} after {story}"
    return SAME, ""


def run(campaign: Campaign, kills: int, chosen: list[Victim], ground: Ground) -> None:
    wheel = [victim for victim in chosen for _ in range(victim.weight)]
    random.Random(f"{campaign.seed} order").shuffle(wheel)
    whole = {victim.name: reference(victim, ground) for victim in chosen}
    number, told = 0, monotonic()
    while sum(campaign.kills.values()) < kills:
        victim = wheel[number % len(wheel)]
        rng = random.Random(f"{campaign.seed}-{number}")
        kind, detail = trial(victim, ground, whole[victim.name], rng, campaign)
        campaign.counts[victim.name, kind] += 1
        if kind != SAME:
            finding = {"kind": kind, "trial": str(number), "command": victim.name, "detail": detail}
            campaign.findings.append(finding)
            print(f"{kind}: trial {number}, {victim.name}: {detail}", file=sys.stderr, flush=True)
        number += 1
        if monotonic() - told > 10:
            told = monotonic()
            text = f"{sum(campaign.kills.values()):,} kills in {told - campaign.began:.0f} s"
            print(f"{text}, {len(campaign.findings)} findings", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="names of commands, with commas between them")
    given = parser.parse_args()
    only = given.only.split(",") if given.only else [victim.name for victim in VICTIMS]
    victims.load_modules()
    with tempfile.TemporaryDirectory() as name:
        campaign = campaign_in(Path(name), given.seed)
        try:
            run(campaign, given.kills, [v for v in VICTIMS if v.name in only], Ground(Path(name)))
        except KeyboardInterrupt:
            print("Interrupted: this is what there was so far.", file=sys.stderr)
    summary = campaign.summary()
    print(markdown(summary), json.dumps(summary), sep="\n\n")
    return 1 if campaign.findings else 0


def campaign_in(base: Path, seed: int) -> Campaign:
    ground = Ground(base)
    made = attempt(lambda: victims.prepare(ground.template), LONG)
    assert made.kind == OK, made
    gc.collect()
    gc.freeze()
    ground.fresh()
    return Campaign(seed, ground.contents())


if __name__ == "__main__":
    sys.exit(main())
