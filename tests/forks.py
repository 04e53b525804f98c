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
from multiprocessing import forkserver
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "cli",
        "torch._dynamo",  # the first optimizer of a process imports it
        "sklearn.metrics",
        "trainer.commands",
        "trainer.run.train",
        "exporter.commands",
        "exporter.tool_commands",
        "exporter.exporting",
        "exporter.onnx.session",
        "tests.warm",
    ]
)
ADDRESS = "DMLTOOL_TEST_FORKS"  # the variable that says where the process that forks listens


def serve() -> None:
    """Start the process that forks for all processes of pytest -n: its start takes ten seconds."""
    forkserver.ensure_running()
    os.environ[ADDRESS] = forkserver._forkserver._forkserver_address


if ADDRESS in os.environ:
    forkserver._forkserver._forkserver_address = os.environ[ADDRESS]
    forkserver._forkserver._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    forkserver._forkserver.ensure_running = lambda: None


class Forked:
    """A process of `python` with these arguments: -c CODE, -m MODULE or a file, and more."""

    def __init__(
        self,
        *arguments,
        env: dict[str, str] | None = None,
        cwd: Path = ROOT,
        lines: bool = False,
    ) -> None:
        """Start it in `cwd`, with `env` added to the environment; `lines`: `line` is called."""
        self.folder = Path(mkdtemp())
        self.stdout = None
        if lines:
            os.mkfifo(self.folder / "stdout")
        else:
            (self.folder / "stdout").touch()
        (self.folder / "stderr").touch()
        words = [str(argument) for argument in arguments]
        given = os.environ | (env or {})
        self.process = FORKS.Process(target=_run, args=(words, self.folder, given, cwd))
        self.process.start()
        if lines:
            self.stdout = (self.folder / "stdout").open()

    def running(self) -> bool:
        return self.process.exitcode is None

    def line(self) -> str:
        """Wait for the next line that it prints."""
        return self.stdout.readline()

    def send(self, number: int) -> None:
        """Send a signal to it and to the processes that it has started."""
        for send in (os.killpg, os.kill):
            with suppress(ProcessLookupError):  # it has no group yet, or has ended
                return send(self.process.pid, number)

    def kill(self) -> None:
        """End it and the processes that it has started, at once."""
        if self.folder.exists():
            self.send(signal.SIGKILL)
            self.end()

    def end(self, timeout: float = 600) -> tuple[int, str, str]:
        """Wait for its end: (exit code, stdout, stderr)."""
        out = self.stdout.read() if self.stdout else None
        self.process.join(timeout)
        if self.stdout:
            self.stdout.close()
        else:
            out = (self.folder / "stdout").read_text()
        texts = (out, (self.folder / "stderr").read_text())
        shutil.rmtree(self.folder)
        if self.running():
            self.send(signal.SIGKILL)
            raise AssertionError("it does not end", *texts)
        return self.process.exitcode, *texts


def _run(words: list[str], folder: Path, env: dict[str, str], cwd: Path) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, name in enumerate(("stdout", "stderr"), 1):
        file = os.open(folder / name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
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
