"""Faults planted on purpose, one of each kind; prints as JSON what the two harnesses make of them.

A program of its own, because a process that forks should have no threads, and pytest's has some.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from retrieval.errors import DmlError
from retrieval.files import write_text
from tests.fuzz import __main__ as fuzz
from tests.fuzz import kill
from tests.fuzz.child import Limits
from tests.fuzz.targets import Target
from tests.fuzz.victims import Victim

SMALL = Limits(seconds=8.0, memory=100 << 20)
SHORT = Limits(seconds=1.0, memory=100 << 20)
"""For what hangs: four times it takes so long."""


def refuse() -> str:
    raise DmlError("No.", "It is damaged.")


def wrong_exception() -> str:
    raise IndexError("list index out of range")


def crash() -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


def hang() -> str:
    time.sleep(60)
    return ""


def hang_in_a_grandchild() -> str:
    if not os.fork():
        time.sleep(60)
    os.wait()
    return ""


def blow_up() -> str:
    return str(np.ones(300 << 20, np.uint8)[-1])


def ask_for_too_much() -> str:
    return str(len(np.empty(1 << 50, np.uint8)))


def heap_garbage() -> str:
    return str(np.empty(100_000, np.uint8)[::1000].tolist())


def end_itself() -> str:
    os._exit(3)


FILES = {
    **{"fine": lambda: "1.0", "refuse": refuse, "wrong_exception": wrong_exception},
    **{"crash": crash, "hang": hang, "hang_in_a_grandchild": hang_in_a_grandchild},
    **{"blow_up": blow_up, "ask_for_too_much": ask_for_too_much},
    **{"heap_garbage": heap_garbage, "end_itself": end_itself},
}


# Writers


def write_whole() -> None:
    time.sleep(0.05)
    for old in Path.cwd().glob(".out.json.*"):
        old.unlink()
    write_text(Path("out.json"), "x" * 1000, force=True)


def write_in_place() -> None:
    Path("out.json").unlink(missing_ok=True)
    for _ in range(10):
        with Path("out.json").open("a") as file:
            file.write("x" * 100)
        time.sleep(0.01)


def write_beside() -> None:
    Path(f"left.{os.getpid()}").touch()
    time.sleep(0.1)
    Path(f"left.{os.getpid()}").unlink()


def lock_out() -> None:
    if Path("lock").exists():
        raise DmlError("Locked.")
    Path("lock").touch()
    time.sleep(0.1)
    Path("lock").unlink()


def forget() -> None:
    """Believes what an earlier run began to be finished."""
    if not Path("begun").exists():
        Path("begun").touch()
        time.sleep(0.1)
        Path("out.txt").write_text("done")


def ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(10)


WRITERS = (write_whole, write_in_place, write_beside, lock_out, forget)


def file_outcomes(folder: Path) -> dict[str, str]:
    path = folder / "file"
    path.write_bytes(b"content")
    cases = [
        fuzz.Case(
            Target(name, {}, lambda path, rng, work=work: work()),
            path,
            "0",
            SHORT if "hang" in name else SMALL,
        )
        for name, work in FILES.items()
    ]
    found = fuzz.run_files(cases)  # all in a row: one that ends its process costs others nothing
    return {name: outcome.kind for name, outcome in zip(FILES, found, strict=True)}


def kill_outcomes(base: Path) -> dict[str, list[str]]:
    ground = kill.Ground(base)
    ground.template.mkdir()
    campaign = kill.Campaign(0, {})
    found = {}
    for writer in WRITERS:
        victim = Victim(writer.__name__, writer, lambda _, again=writer: again)
        whole = kill.reference(victim, ground)
        kinds = {
            kill.trial(victim, ground, whole, random.Random(seed), campaign)[0] for seed in range(6)
        }
        found[writer.__name__] = sorted(kinds)
    deaf = Victim("ignore_signals", ignore_signals, lambda _: ignore_signals)
    ground.fresh()
    pid = kill.started(ignore_signals, ground.work)
    obeyed = kill.killed(pid, signal.SIGINT, 0.5, 0.5)[1]
    found[deaf.name] = [kill.SAME if obeyed else kill.HANG]
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        found = {"files": file_outcomes(Path(name)), "kills": kill_outcomes(Path(name))}
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
