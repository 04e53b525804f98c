"""Timing, memory and the machine, for every benchmark."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from retrieval.resources import processors

RESULTS = Path(__file__).parent / "RESULTS.md"


def clustered(N: int, D: int, C: int, noise: float, seed: int = 0):
    """N float32 vectors around C centres, labels shuffled: (N, D), (N,)."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(N) % C)
    centres = rng.standard_normal((C, D), dtype=np.float32)
    X = noise * rng.standard_normal((N, D), dtype=np.float32)
    for part in np.array_split(np.arange(N), max(1, N // 100_000)):
        X[part] += centres[labels[part]]
    return X, labels


def alternate(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict]:
    """Runs each contender in turn, `repeats` times over: median seconds, peak memory, result."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    out: dict[str, dict] = {name: {"memory": 0} for name in contenders}
    for round_ in range(repeats):
        for name, run in contenders.items():
            time.sleep(1)  # threads of the last one may still spin
            with Memory() as memory:
                start = time.perf_counter()
                out[name]["result"] = run()
                seconds[name].append(time.perf_counter() - start)
            out[name]["memory"] = max(out[name]["memory"], memory.peak)
            print(f"  {name}, run {round_ + 1}: {seconds[name][-1]:.2f} s", flush=True)
    for name in contenders:
        out[name]["seconds"] = statistics.median(seconds[name])
    return out


class Memory:
    """Peak of this process's resident memory above what it was at the start.

    Linux keeps the peak; a thread that looks every few milliseconds would slow down what is timed.
    """

    def __enter__(self) -> Memory:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self.start, self.peak = resident(), 0
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = max(0, resident(field="VmHWM") - self.start)


def resident(pid: int | str = "self", field: str = "VmRSS") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def processor() -> str:
    """The model of the processor with its family and its vector extensions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    flags = facts.get("flags", "").split()
    extensions = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_tile": "AMX"}
    shown = ", ".join(name for flag, name in extensions.items() if flag in flags)
    family = f"family {facts.get('cpu family')}, model {facts.get('model')}"
    return f"{facts.get('model name', 'unknown')} ({family}; {shown or 'no AVX2'})"


def machine(*packages: str) -> str:
    found = []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} absent")
    found += [
        f"{name}={value}" for name, value in os.environ.items() if name.startswith("OPENBLAS_")
    ]
    return (
        f"{processors()} cores of {processor()}, Python {platform.python_version()}, "
        + ", ".join(found)
    )


def table(header: list[str], rows: list[list[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def record(section: str, text: str) -> None:
    """Replaces one `## section` of RESULTS.md, or adds it. What follows a `### ` in it stays."""
    old = RESULTS.read_text() if RESULTS.exists() else "# Measurements\n\n"
    parts = old.split("\n## ")
    body = f"{section}\n\n{text.strip()}\n"
    for n, part in enumerate(parts):
        if part.split("\n", 1)[0].strip() == section:
            notes = "".join(part.partition("\n### ")[1:])
            parts[n] = body + notes
            break
    else:
        parts.append(body)
    RESULTS.write_text("\n## ".join(part.rstrip("\n") + "\n" for part in parts))
