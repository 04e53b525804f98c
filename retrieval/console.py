"""Terminal output of commands: safe text, warnings, JSON, rich consoles, the progress bar.

Functions import what `dmltool --help` does without, such as rich.
"""

from __future__ import annotations

import codecs
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from retrieval import signals
from retrieval.distributed.world import ALONE, from_environment
from retrieval.number_format import duration

if TYPE_CHECKING:
    from rich.console import Console

RUN_AGAIN = "run the same command again to continue"
OWN_OPTIONS = ("threads", "device", "provider")  # of which each process has its own

# Control characters except tab and newline, marks that reverse the direction of text, and
# surrogates.
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# Replacements of signs that tables and messages use, for encodings without them.
PLAIN_SIGNS = {"·": "-", "→": "->", "±": "+/-", "…": "...", "✓": "+", "✗": "x"}


def visible(text: str) -> str:
    r"""Replace each control character by an escape such as \x1b."""
    return HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def use_safe_encodings() -> None:
    """Write characters that the encoding of stdout or stderr lacks as plain signs or escapes.

    What is written to a closed stdout or stderr is lost.
    """
    codecs.register_error("dmltool", _replace_unencodable)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: dmltool ... >&-
            stream = Path(os.devnull).open("w")  # noqa: SIM115
            setattr(sys, name, stream)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="dmltool")


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Handle an encoding error as `codecs.register_error` wants it."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    plain = (PLAIN_SIGNS.get(c) or c.encode("ascii", "backslashreplace").decode() for c in signs)
    return "".join(plain), error.end


def short_path(path: str | Path) -> str:
    """The path as seen from the current folder if it lies in it, else as it is."""
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def folded(text: str, used: int = 0, stream: TextIO | None = None) -> str:
    """Break text between words to fit a terminal whose first `used` columns are taken.

    Text for a file or a pipe is not broken. The stream is stderr by default.
    """
    if not (stream or sys.stderr).isatty():
        return text
    width = max(20, shutil.get_terminal_size().columns - used)
    lines = [textwrap.wrap(line, width, break_long_words=False) for line in text.splitlines()]
    return "\n".join(chain.from_iterable(lines))


def indented(text: str, columns: int, stream: TextIO | None = None) -> str:
    """Fold text that begins at a column, its further lines below its first."""
    return folded(text, columns, stream).replace("\n", "\n" + " " * columns)


# Messages on stderr


def tell(line: str) -> None:
    """Print a line about the work on stderr."""
    click.echo(folded(visible(line)), err=True)


@contextmanager
def device_told() -> Iterator[None]:
    """Show each note on the device that counts ranks once, in the first process of a job."""
    import logging

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if from_environment().rank == 0 and record.getMessage() not in told:
                told.add(record.getMessage())
                tell(record.getMessage())

    told: set[str] = set()
    logger, handler = logging.getLogger("retrieval.device"), Notes()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def warn(line: str) -> None:
    """Print a warning on stderr."""
    click.secho("! ", fg="yellow", nl=False, err=True)
    click.echo(indented(visible(line), 2), err=True)


def next_step(*args: object) -> None:
    """Name the command that usually follows; secrets of addresses are left for the user to add."""
    say_next(_command(map(str, args)))


def _command(words: Iterable[str]) -> str:
    """A command for the shell."""
    from shlex import join

    words = list(words)
    if any("://" in word for word in words):
        from retrieval.remote.address import without_secrets

        words = [without_secrets(word) for word in words]
    return f"dmltool {join(words)}"


def typed_with(option: str, command: str, typed: Sequence[str]) -> str:
    """The command line that was typed, with one more option after the name of the command."""
    at = typed.index(command) + 1  # at the end it may stand after --, where it names a file
    return _command([*typed[:at], option, *typed[at:]])


def say_next(text: str) -> None:
    """Name the next step on stderr, unless another command runs this one."""
    if signals.STEP not in os.environ:
        click.echo(f"Next: {text}", err=True)


def given_options(**given: str | bool | None) -> list[str]:
    """Return the options that were given, as words of a command line; True: without a value."""
    words = ((f"--{name.replace('_', '-')}", value) for name, value in given.items() if value)
    return [str(word) for pair in words for word in pair if word is not True]


# Several processes


@contextmanager
def silence() -> Iterator[None]:
    """Suppress stdout and stderr inside the block."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def several_processes(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command join the other processes that torchrun or srun has started.

    The command gets the argument `world`. Only rank 0 prints; errors are told by one rank.
    """

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:
        if from_environment().size == 1:
            return command(*args, world=ALONE, **given)
        from retrieval.distributed import processes

        with processes.joined() as world:
            compared, own = _options()
            processes.require_same_options(compared, world, ", ".join(own))
            with silence() if world.rank else nullcontext():
                return command(*args, world=world, **given)

    return run


def _options() -> tuple[dict[str, object], list[str]]:
    """The values that all processes of a command share, and the options that may differ.

    Names of files are in neither: files may be elsewhere on each machine.
    """
    context = click.get_current_context()
    compared: dict[str, object] = {"the command": context.command.name}
    own = []
    for option in context.command.params:
        if option.name in OWN_OPTIONS:
            own.append(option.opts[0])
        elif not isinstance(option.type, click.Path):
            compared[option.opts[0]] = context.params.get(str(option.name))
    return compared, own


# Ctrl-C


@contextmanager
def on_interrupt(left: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C, print what `left()` returns, such as how to continue, and exit with code 130."""
    before, signals.left = signals.left, left  # said there if an import does not let Ctrl-C through
    try:
        yield
    except click.exceptions.Exit:
        raise
    except (KeyboardInterrupt, Exception) as error:
        if not isinstance(error, KeyboardInterrupt) and not signals.happened():
            raise  # else a library has made another error of Ctrl-C
        signals.answered()
        if from_environment().rank == 0:
            click.echo(f"\nInterrupted: {left()}.", err=True)
        raise click.exceptions.Exit(signals.INTERRUPTED) from None
    finally:
        signals.left = before


def resumable(*files: Path, resume: bool) -> Callable[[], str]:
    """Return what to say on Ctrl-C: --resume, if one of the files has been written by then."""

    def state() -> list[tuple[int, int] | None]:
        found = (path.stat() if path.exists() else None for path in files)
        return [stat and (stat.st_ino, stat.st_mtime_ns) for stat in found]

    before = [None] * len(files) if resume else state()

    def left() -> str:
        written = any(now and now != was for now, was in zip(state(), before, strict=True))
        return "add --resume to continue" if written else signals.NOTHING

    return left


# Results on stdout


def to_json(result: Mapping[str, Any], encoding: str = "utf-8") -> str:
    """Return JSON that is as readable as the encoding allows."""
    import json

    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:  # also for stray bytes of file names, which UTF-8 lacks
        text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    return text


def print_json(result: Mapping[str, Any]) -> None:
    click.echo(to_json(result, getattr(sys.stdout, "encoding", None) or "utf-8"), nl=False)


def stdout_console() -> Console:
    """Return a console for tables; where stdout is no terminal, it is 200 columns wide."""
    console = safe_console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    return console


def safe_console(**options: Any) -> Console:
    """Return a console that shows control characters in names instead of sending them.

    Where it is no terminal, lines do not end in spaces.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        def print(self, *objects: Any, **how: Any) -> None:
            if self.is_terminal:
                super().print(*objects, **how)
                return
            with self.capture() as printed:
                super().print(*objects, **how)
            self.file.write(re.sub(" +$", "", printed.get(), flags=re.MULTILINE))

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(visible(segment.text), segment.style)

    return SafeConsole(**options)


class ProgressBar:
    """Shows long work on stderr: a bar with the time left on a terminal, else plain lines.

    An object is called with (stage, done, total). It shows nothing for work that ends within
    `delay` seconds, and a plain line every `quiet` seconds.
    """

    def __init__(
        self, console: Console | None = None, delay: float = 1.0, quiet: float = 10.0
    ) -> None:
        from rich.progress import BarColumn, Progress

        self.console = console or safe_console(stderr=True)
        self.bar = Progress(
            "{task.description}",
            BarColumn(bar_width=10),
            "{task.percentage:>3.0f}%",
            "{task.fields[left]}",
            "{task.fields[text]}",
            console=self.console,
            transient=True,
        )
        self.task = self.bar.add_task("reading", total=None, left="", text="")
        self.stage = ""
        self.since = (time.monotonic(), 0)  # when the stage began, and how much was done then
        self.quiet, self.told = quiet, time.monotonic()
        # By a timer, so that work that reports nothing yet is seen as well.
        self.timer = threading.Timer(delay, self.bar.start)
        self.timer.daemon = True

    def __enter__(self) -> ProgressBar:
        if self.console.is_terminal:
            self.timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar from the terminal."""
        self.timer.cancel()
        if self.timer.ident is not None:
            self.timer.join()
        if self.bar.live.is_started:
            self.bar.stop()

    def __call__(
        self,
        stage: str,
        done: int,
        total: int,
        text: str = "",
        since: tuple[float, int] | None = None,
    ) -> None:
        """Show how much of a stage is done, and a text beside it.

        since: a time and how much was done then, for the time left. Default: the first call of
        the stage.
        """
        now = time.monotonic()
        if stage != self.stage:
            self.bar.reset(self.task)
            self.stage, self.since = stage, (now, done)
        began, before = since or self.since
        left = ""
        if done > before:
            left = f"{duration((now - began) * (total - done) / (done - before))} left"
        self.bar.update(
            self.task, completed=done, total=total, description=stage, left=left, text=text
        )
        if not self.console.is_terminal and now - self.told > self.quiet:
            self.told = now
            parts = [f"{100 * done // max(total, 1)}%", left and f"about {left}", text]
            line = f"{stage}: {', '.join(filter(None, parts))}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
