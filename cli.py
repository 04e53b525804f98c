"""The command group: finds the commands of the packages and renders errors and exit codes."""

from __future__ import annotations

from retrieval import signals

signals.end_on_interrupt(__name__)  # before other imports: they take the first tenth of a second

import atexit
import errno
import gc
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import click

from retrieval import console
from retrieval.distributed.world import refuse_several
from retrieval.errors import FULL, DmlError, install, remedy
from retrieval.registry import ARGUMENTS, own_code_of

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
EXTRAS = ("torch", "torchvision", "PIL", "matplotlib", "onnx", "onnxruntime", "onnxscript")

COMMANDS = {  # heading of the help -> name -> where the command is
    "Train": {
        "train": "trainer.commands:train",
        "sweep": "trainer.sweep.commands:sweep",
        "list": "trainer.commands:list_command",
    },
    "Export": {
        "export": "exporter.commands:export",
        "embed": "exporter.commands:embed",
    },
    "Evaluate": {
        "eval": "retrieval.commands:eval_command",
        "compare": "retrieval.commands:compare",
        "report": "trainer.commands:report",
        "inspect": "exporter.tool_commands:inspect",
        "merge": "retrieval.commands:merge",
    },
    "Tools": {
        "doctor": "exporter.tool_commands:doctor",
        "demo": "exporter.tool_commands:demo",
    },
}
SMALLER = {  # option -> how to take less memory with it
    "--memory": "a smaller --memory",
    "--queries": "--queries 5000",
    "--batch": "a smaller --batch",
    "--batch-size": "a smaller --batch-size",
}
OF_OUTPUT = (*FULL, errno.EIO)  # what writing to stdout meets
SEVERAL = ("train", "export", "embed", "eval", "compare")  # several processes may share the work
HIDDEN = {"baselines": "exporter.tool_commands:baselines"}  # a step of the demo


class LazyCommands(Mapping[str, click.Command]):
    """The commands by name; each is imported when it is first used."""

    def __init__(self) -> None:
        self.paths = {name: path for group in COMMANDS.values() for name, path in group.items()}

    def __getitem__(self, name: str) -> click.Command:
        return resolve_name((self.paths | HIDDEN)[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


class Cli(click.Group):
    """Renders every failure: message on stderr, exit code 1; a traceback only with --debug."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        console.use_safe_encodings()
        return super().main(*args, **kwargs)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        if os.environ.get("NO_COLOR"):  # rich looks for it, click does not
            extra.setdefault("color", False)
        typed = list(args[1])
        try:
            context = super().make_context(*args, **extra)
        except BrokenPipeError:
            raise
        except OSError as error:  # --help and --version are printed here
            show_error(explained(error))
            raise click.exceptions.Exit(1) from None
        context.meta[ARGUMENTS] = typed
        return context

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name and name not in SEVERAL:
            refuse_several(name)
        for option in command.params if command else ():
            if set(option.opts) & set(rest) and (no := set(option.secondary_opts) & set(rest)):
                raise click.UsageError(f"{option.opts[0]} and {no.pop()} exclude each other.")
        return name, command, rest

    def invoke(self, ctx: click.Context) -> object:
        try:
            with signals.raised(), console.on_interrupt(signals.left), console.device_told():
                return super().invoke(ctx)
        except click.ClickException as error:
            from retrieval.distributed.processes import reports_fully

            if not reports_fully():
                ctx.exit(error.exit_code)
            raise
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            name = ctx.invoked_subcommand or ""
            running = self.commands.get(name)
            options = {name for each in running.params for name in each.opts} if running else ()
            told = explained(error, options)
            told.fix = as_command(told.fix, options, name, ctx.meta.get(ARGUMENTS, ()))
            show_error(told)
            ctx.exit(1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, names in COMMANDS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(80)) for name in names]
                )


def explained(error: Exception, options: Collection[str] = ()) -> DmlError:
    """Return the error as one with a reason and a fix; options: those of the running command."""
    if isinstance(error, DmlError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        unnamed = "Standard output" if error.errno in OF_OUTPUT else "A file or a connection"
        what = f"{error.filename or unnamed} cannot be used."
        return DmlError(what, f"The system says: {error.strerror}.", remedy(error))
    if isinstance(error, MemoryError):
        fixes = [text for name, text in SMALLER.items() if name in options]
        other = "Close other programs, or run it on a machine with more memory."
        fix = f"Try {' or '.join(fixes)}." if fixes else other
        return DmlError("There is not enough memory.", str(error), fix)
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return DmlError(f"This command needs {error.name}.", "It is not installed.", install("cpu"))
    what = f"Unexpected {type(error).__name__}: {str(error).rstrip('.')}."
    if module := own_code_of(error):
        why = f"The module {module} raised it, which is not a part of dmltool."
        return DmlError(what, why, "Correct the module; `dmltool --debug ...` shows the traceback.")
    return DmlError(
        what,
        "This is a bug in dmltool, not in your data.",
        "Run `dmltool --debug ...` and report the traceback.",
    )


def as_command(fix: str, options: Collection[str], name: str, typed: Sequence[str]) -> str:
    """Replace an argument for Python at the end of a fix by the typed command with that option."""
    found = re.search(r"(?<=: )(\w+)=True$", fix)
    option = f"--{found[1].replace('_', '-')}" if found else ""
    if found is None or option not in options:
        return fix
    return fix[: found.start()] + console.typed_with(option, name, typed)


def show_error(error: DmlError) -> None:
    """Print what happened, why and how to fix it on stderr."""
    from retrieval.distributed.processes import reports_fully

    what, why, fix = (console.visible(text) for text in (error.what, error.why, error.fix))
    click.secho("Error: ", fg="red", bold=True, nl=False, err=True)
    click.secho(console.folded(what, 7).replace("\n", "\n  "), bold=True, err=True)
    if not reports_fully():
        return
    if why:
        click.echo(f"  {console.indented(why, 2)}", err=True)
    if fix:  # not folded: a command that spans lines cannot be copied
        click.echo("  Fix: " + fix.replace("\n", "\n  "), err=True)


@click.group(cls=Cli, commands=LazyCommands(), context_settings=CONTEXT)
@click.version_option(package_name="dmltool", prog_name="dmltool")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Train embedding networks and evaluate embedding files exactly.

    \b
    Examples:
      dmltool train --preset cub-ce --data CUB_200_2011
      dmltool eval embeddings.h5 --distance cos
    """
    # Importing torch makes objects by the hundred thousand, none of them garbage; looking for some
    # among them takes seconds, at the end as well.
    gc.set_threshold(100_000, 20, 100)
    atexit.register(gc.freeze)
    signals.tell_cut_files()
    if not os.environ.get("NUMBA_NUM_THREADS", "1").strip(" 0").isdecimal():
        del os.environ["NUMBA_NUM_THREADS"]  # numba would not load; its threads are not used here
    if "WORLD_SIZE" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # we say who is missing, and why


if __name__ == "__main__":
    sys.exit(main(prog_name="dmltool"))
