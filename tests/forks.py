"""Processes that start at once: forked from one that has imported torch and the commands.

A new Python process spends seconds on these imports. Tests of kills, of ranks and of limits need a
process, not its start.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[1]
PRINTED = ("stdout", "stderr")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "cli",
        "torch._dynamo",  # the first optimizer of a process imports it
        "matplotlib.backends.backend_agg",
        "sklearn.metrics",
        "trainer.commands",
        "trainer.run.train",
        "exporter.commands",
        "exporter.exporting",
        "exporter.onnx.session",
    ]
)


class Forked:
    """A process of `python` with these arguments: -c CODE, -m MODULE or a file, and more."""

    def __init__(self, *arguments, env: dict[str, str] | None = None) -> None:
        """Start it in the folder of the project, with `env` added to the environment."""
        self.folder = Path(mkdtemp())
        words = [str(argument) for argument in arguments]
        given = os.environ | (env or {})
        self.process = FORKS.Process(target=_run, args=(words, self.folder, given))
        self.process.start()

    def running(self) -> bool:
        return self.process.exitcode is None

    def kill(self) -> None:
        """End it and the processes that it has started, at once."""
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def end(self, timeout: float = 600) -> tuple[int, str, str]:
        """Wait for its end: (exit code, stdout, stderr)."""
        self.process.join(timeout)
        texts = [(self.folder / name).read_text() for name in PRINTED]
        shutil.rmtree(self.folder)
        assert self.process.exitcode is not None, ("it does not end", *texts)
        return self.process.exitcode, *texts


def _run(words: list[str], folder: Path, env: dict[str, str]) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    for number, name in enumerate(PRINTED, 1):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    try:
        _run_as_main(words)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def _run_as_main(words: list[str]) -> None:
    kind, *rest = words
    sys.argv = rest if kind in ("-c", "-m") else words
    if kind == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(kind, run_name="__main__")
