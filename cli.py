"""The command line: parses, calls one library function, renders. Heavy imports live in commands."""

from __future__ import annotations

from retrieval import interrupts

interrupts.watch(__name__)  # before other imports: they take the first tenth of a second

import atexit
import codecs
import gc
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NoReturn, TextIO

import click

from retrieval.errors import DmlError, install
from retrieval.formats import truncation
from retrieval.visible import visible

PYTHON = (sys.executable, "-P", "-m", "cli")  # -P: a cli.py in the present folder is not ours
EXTRAS = ("torch", "torchvision", "PIL", "matplotlib", "onnx", "onnxruntime", "onnxscript")
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


# Signs that tables and messages use, for encodings without them.
PLAIN_SIGNS = {"·": "-", "→": "->", "±": "+/-", "…": "...", "✓": "+", "✗": "x"}


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: plain signs, and escapes for the rest."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    plain = (PLAIN_SIGNS.get(c) or c.encode("ascii", "backslashreplace").decode() for c in signs)
    return "".join(plain), error.end


# What Ctrl-C leaves of commands that write as they go; the others write all at once, at their end.
KEPT = dict.fromkeys(("merge", "demo"), "the same command goes on")
NOTHING = "nothing was written"


class Cli(click.Group):
    """Renders every failure: message on stderr, exit code 1; a traceback only with --debug."""

    def main(self, *args, **kwargs) -> object:
        """Output that the encoding of a stream cannot show must not end in a crash."""
        codecs.register_error("dmltool", _replace_unencodable)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="dmltool")
        return super().main(*args, **kwargs)

    def make_context(self, *args, **extra) -> click.Context:
        if os.environ.get("NO_COLOR"):  # rich looks for it, click does not
            extra.setdefault("color", False)
        return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> object:
        try:
            with interrupts.raised():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            _interrupted(KEPT.get(ctx.invoked_subcommand, NOTHING))
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            if interrupts.happened():  # in an import, for example, that made another error of it
                _interrupted(KEPT.get(ctx.invoked_subcommand, NOTHING))
            _fail(error)
            ctx.exit(1)


def _interrupted(told: str) -> NoReturn:
    """Says that Ctrl-C was pressed and what is left behind; exit code 130."""
    click.echo(f"\nInterrupted: {told}.", err=True)
    raise click.exceptions.Exit(interrupts.INTERRUPTED)


def _fail(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno is not None:
        place = error.filename or "standard output"
        error = DmlError(
            f"{place} cannot be used: {error.strerror}.",
            "",
            "Make room there, or choose another place.",
        )
    if isinstance(error, MemoryError):
        error = DmlError("Out of memory.", str(error), "Try a smaller --memory, or --queries 5000.")
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        error = DmlError(
            f"This command needs {error.name}.",
            "It is not installed.",
            install("cpu"),
        )
    if not isinstance(error, DmlError):
        error = DmlError(
            f"Unexpected {type(error).__name__}: {error}",
            "This is a bug in dmltool, not in your data.",
            "Run `dmltool --debug ...` and report the traceback.",
        )
    error = DmlError(visible(error.what), visible(error.why), visible(error.fix))
    click.secho("Error: ", fg="red", bold=True, nl=False, err=True)
    click.secho(_folded(error.what, 7).replace("\n", "\n  "), bold=True, err=True)
    if error.why:
        click.echo("  " + _folded(error.why, 2).replace("\n", "\n  "), err=True)
    if error.fix:  # not folded: a command that spans lines cannot be copied
        click.echo(f"  Fix: {error.fix}", err=True)


def warn(line: str) -> None:
    """A line on stderr about something that the user should know."""
    click.secho("! ", fg="yellow", nl=False, err=True)
    click.echo(_folded(visible(line), 2).replace("\n", "\n  "), err=True)


def _folded(text: str, used: int, stream: TextIO | None = None) -> str:
    """The text broken between words to fit a terminal whose first `used` columns are taken."""
    if not (stream or sys.stderr).isatty():
        return text
    width = max(20, shutil.get_terminal_size().columns - used)
    lines = [textwrap.wrap(line, width, break_long_words=False) for line in text.splitlines()]
    return "\n".join(chain.from_iterable(lines))


@click.group(cls=Cli, context_settings=CONTEXT)
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
    truncation.enable()


class Numbers(click.ParamType):
    """1,2,4,8"""

    name = "K,K,..."

    def convert(self, value, param, ctx) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(int(part) for part in value.split(",")))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,2,4,8", param, ctx)
        if min(numbers) < 1:
            self.fail(f"{value!r}: K starts at 1", param, ctx)
        return numbers


class Size(click.ParamType):
    """2GB, 512MB"""

    name = "SIZE"
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}  # noqa: RUF012

    def convert(self, value, param, ctx) -> int:
        if isinstance(value, int):
            return value
        text = value.strip().upper().removesuffix("B").removesuffix("I")
        unit = text[-1:] if text[-1:] in self.units else ""
        try:
            size = float(text.removesuffix(unit)) * self.units[unit]
        except ValueError:
            self.fail(f"{value!r} is not a size such as 2GB or 512MB", param, ctx)
        if not 64 << 20 <= size < 1 << 50:
            self.fail(f"{value!r}: between 64MB and 1000TB, please", param, ctx)
        return int(size)


def options(*decorators: Callable) -> Callable:
    """Several click options as one decorator."""

    def apply(command: Callable) -> Callable:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


labels_option = click.option(
    "--labels",
    metavar="FILE",
    help="Labels, one per row, from a file of their own (.npy, .txt, .csv, FILE::key, ...).",
)
scoring_options = options(
    click.option(
        "--distance",
        type=click.Choice(["l2", "cos", "both"]),
        default="both",
        show_default=True,
        help="l2: Euclidean distance of the vectors as they are; cos: cosine similarity.",
    ),
    click.option(
        "--recall-at",
        type=Numbers(),
        default="1,2,4,8",
        show_default=True,
        help="The K of Recall@K.",
    ),
    click.option(
        "--map/--no-map",
        "map_at_r",
        default=True,
        show_default=True,
        help="MAP@R and R-precision.",
    ),
    click.option(
        "--seeds",
        type=click.IntRange(1),
        default=3,
        show_default=True,
        metavar="N",
        help="Runs of k-means; NMI is their mean and standard deviation.",
    ),
    click.option(
        "--queries",
        type=click.IntRange(1),
        metavar="N",
        help="Ask only N queries, drawn at random; the interval shows what that costs.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Of the drawn queries and the bootstrap.",
    ),
    click.option(
        "--engine",
        type=click.Choice(["count", "faiss"]),
        default="count",
        show_default=True,
        help="count: exact ranks; faiss: from neighbour lists of length max K.",
    ),
    click.option(
        "--memory",
        type=Size(),
        default="2GB",
        show_default=True,
        help="Working memory beyond the embeddings.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(1),
        metavar="N",
        help="At most, and by default, one for each processor.",
    ),
)
output_options = options(
    click.option("--json", "as_json", is_flag=True, help="Print the whole result as JSON."),
    click.option("--out", metavar="FILE", help="Write the JSON to FILE as well."),
    click.option("--force", is_flag=True, help="Overwrite existing output files."),
)


def _settings(distance: str, **given):
    from retrieval.evaluation import DISTANCES, Settings

    return Settings(distances=DISTANCES if distance == "both" else (distance,), **given)


def to_json(result: dict, encoding: str = "utf-8") -> str:
    """As readable as the encoding allows."""
    import json

    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:  # also for stray bytes of file names, which UTF-8 lacks
        text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    return text


def print_json(result: dict) -> None:
    click.echo(to_json(result, getattr(sys.stdout, "encoding", None) or "utf-8"), nl=False)


def stdout_console():
    """For rich tables; not cut to 80 columns where stdout is a file or a pipe."""
    console = safe_console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    return console


def next_step(*args: object) -> None:
    """Says on stderr which command usually follows; the demo runs it by itself."""
    from shlex import join

    say_next(f"dmltool {join(map(str, args))}")


def say_next(text: str) -> None:
    if click.get_current_context().find_root().obj != "demo":
        click.echo(f"Next: {text}", err=True)


def given_options(**given: str | None) -> list[str]:
    """The options that were given, as words of a command line."""
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in given.items() if value)
    return [word for pair in pairs for word in pair]


@contextmanager
def resumable(*files, resume: bool) -> Iterator[None]:
    """On Ctrl-C names --resume, if one of the files was written and is there to go on from."""

    def look() -> list[tuple[int, int] | None]:
        seen = (path.stat() if path.exists() else None for path in files)
        return [found and (found.st_ino, found.st_mtime_ns) for found in seen]

    before = [None] * len(files) if resume else look()
    try:
        yield
    except KeyboardInterrupt:
        written = any(now and now != was for now, was in zip(look(), before, strict=True))
        _interrupted("add --resume to go on" if written else NOTHING)


def safe_console(**options):
    """A rich console that shows control characters in names instead of sending them."""
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(self, renderable, options=None):
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(visible(segment.text), segment.style)

    return SafeConsole(**options)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A callback (stage, done, total) that shows what takes longer than a second, on stderr.

    A bar with the time left on a terminal, else a plain line every ten seconds.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = safe_console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(), TextColumn("left"), console=console, transient=True,
    )  # fmt: skip
    stage, task = "reading", bar.add_task("reading", total=None)
    began = said = time.monotonic()

    def report(name: str, done: int, total: int) -> None:
        nonlocal stage, task, began, said
        now = time.monotonic()
        if name != stage:
            bar.remove_task(task)
            stage, task, began = name, bar.add_task(name, total=total), now
        bar.update(task, completed=done, total=total)
        if not console.is_terminal and now - said > 10 and done:
            left = (now - began) * (total - done) / done
            click.echo(f"{stage}: {100 * done // total}%, about {left:.0f} s left", err=True)
            said = now

    # By a timer, so that work that reports nothing yet is seen as well.
    timer = threading.Timer(1.0, bar.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield report
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        if bar.live.is_started:
            bar.stop()


def provenance(data) -> dict:
    """Where the embeddings came from: the file, what was taken of it, what it says of itself."""
    from retrieval.inspection import plain

    return {
        "file": str(data.source),
        "format": data.format,
        "attrs": {name: plain(value) for name, value in data.attrs.items()},
        "taken": {name: split.taken for name, split in data.splits.items()},
        "notes": list(data.notes),
    }


def tell_source(data) -> None:
    """On stderr: which arrays or columns of a file were taken, and what came up with it."""
    from retrieval.tables import taken

    if line := taken(data):
        click.echo(_folded(visible(line), 0), err=True)
    for line in data.notes:
        warn(line)


@main.command("eval")
@click.argument("file", metavar="FILE")
@click.option("--gallery", metavar="FILE", help="Gallery embeddings; FILE holds the queries then.")
@labels_option
@click.option("--gallery-labels", metavar="FILE", help="Labels of the gallery, if not in its file.")
@scoring_options
@click.option(
    "--nmi/--no-nmi",
    default=None,
    help="k-means NMI and AMI. [default: if that takes less than 30 s]",
)
@click.option("--kmeans-iterations", type=click.IntRange(1), default=20, show_default=True)
@click.option("--kmeans-restarts", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--drop-nonfinite", is_flag=True, help="Leave out rows with NaN or Inf (else an error)."
)
@click.option("--per-class", metavar="FILE", help="Write Recall@1 of every class as CSV.")
@output_options
def eval_command(
    file, gallery, labels, gallery_labels, distance, per_class, as_json, out, force,
    drop_nonfinite, **scoring,
) -> None:  # fmt: skip
    """Evaluate an embedding file: Recall@K, MRR, MAP@R and NMI.

    Scores are given by l2 and by cosine. FILE is .h5, .npy, .npz, .csv, .parquet, .jsonl, .pt,
    .safetensors, .fvecs or another format of the README's table; FILE::key picks an array inside.
    Every item is a query against all others; a file with query and gallery splits, or --gallery,
    is scored query -> gallery.

    \b
    Examples:
      dmltool eval embeddings.h5
      dmltool eval features.npy --labels labels.txt --distance cos --recall-at 1,10,100
      dmltool eval query.npz --gallery gallery.npz --json > result.json
    """
    from retrieval import ground_truth
    from retrieval.embeddings import load
    from retrieval.evaluation import score
    from retrieval.files import check_target, write_text
    from retrieval.formats.opening import Sources
    from retrieval.problem import from_embeddings
    from retrieval.tables import evaluation_table, evaluation_warnings, nmi_table, per_class_csv

    settings = _settings(distance, **scoring)
    sources = Sources(file, gallery, labels, gallery_labels)
    targets = {name: check_target(path, force, sources.files) for name, path in
               (("out", out), ("per_class", per_class)) if path}  # fmt: skip
    if len(set(targets.values())) < len(targets):
        raise click.UsageError("--out and --per-class name the same file.")
    with progress_bar() as report:
        data = load(file, labels=labels, gallery=gallery, gallery_labels=gallery_labels)
        listed = ground_truth.has_lists(data)
        if listed and per_class:
            raise click.UsageError("--per-class needs labels, and the file has none.")
        if listed:
            result = ground_truth.agreement(data, settings, report)
        else:
            problem = from_embeddings(data, drop_nonfinite=drop_nonfinite)
            evaluation = score(problem, settings, report)
    sources.check_unchanged()
    if listed:
        result |= {"source": provenance(data)}
        return _tell_agreement(result, data, targets.get("out"), as_json, force)
    console = stdout_console()
    if not as_json:
        console.print(evaluation_table(evaluation.result, console.width))
        sys.stdout.flush()  # k-means may take long: the scores are seen, and stay, before it
    evaluation, interrupted = _with_nmi(evaluation, problem, settings)
    sources.check_unchanged()
    result = evaluation.result | {"source": provenance(data)}
    if "out" in targets:
        write_text(targets["out"], to_json(result), force)
    if "per_class" in targets:
        write_text(targets["per_class"], per_class_csv(evaluation, data.label_names), force)
    if as_json:
        print_json(result)
    else:
        if result["settings"]["nmi"]:
            console.print(nmi_table(result, console.width))
        console.print()
        tell_source(data)
    for line in evaluation_warnings(result) if not as_json else result["notes"]:
        warn(line)
    if interrupted:
        raise click.exceptions.Exit(interrupts.INTERRUPTED)
    if not as_json:
        given = given_options(gallery=gallery, labels=labels, gallery_labels=gallery_labels)
        next_step("report", file, *given)


def _with_nmi(evaluation, problem, settings):
    """The evaluation with NMI where that is wanted, and whether Ctrl-C has cut it short."""
    from retrieval.clustering import LONG
    from retrieval.evaluation import add_nmi, duration, nmi_left_out, nmi_seconds, noted

    why = nmi_left_out(problem, settings)
    if why is not None:
        return noted(evaluation, why) if why else evaluation, False
    seconds = nmi_seconds(problem, settings)
    if seconds > LONG:
        click.echo(
            f"k-means for NMI takes about {duration(seconds)} on two cores; "
            "Ctrl-C leaves it out and keeps the rest.",
            err=True,
        )
    try:
        with interrupts.patient(), progress_bar() as report:
            return add_nmi(evaluation, problem, settings, report), False
    except KeyboardInterrupt:
        return noted(evaluation, "NMI was left out: k-means was interrupted"), True


def _tell_agreement(result: dict, data, target, as_json: bool, force: bool) -> None:
    """The result for a file that lists neighbours and has no labels."""
    from retrieval.files import write_text
    from retrieval.ground_truth import warnings
    from retrieval.tables import neighbours_table

    if target:
        write_text(target, to_json(result), force)
    if as_json:
        print_json(result)
        return
    stdout_console().print(neighbours_table(result))
    tell_source(data)
    for line in warnings(result):
        warn(line)


@main.command()
@click.argument("file", metavar="FILE")
@labels_option
@click.option("--check", is_flag=True, help="Run a model on random images.")
@click.option(
    "--run", "runs", multiple=True, metavar="RUN",
    help="Compare a model with the training it came from; of an ensemble, repeat it.",
)  # fmt: skip
@click.option("--data", metavar="PATH", help="With --run: where the data set is now.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_context
def inspect(ctx, file, labels, check, runs, data, as_json) -> None:
    """Show what is in an embedding file or a model.

    Of an embedding file: splits, labels, norms, metadata, checks. Of MODEL.onnx: input, output,
    preprocessing, precision, where it came from and how it compared with its network. --check
    runs the model on random images; --run repeats the comparison with the network.

    \b
    Examples:
      dmltool inspect embeddings.h5
      dmltool inspect runs/mine/model.onnx --run runs/mine
    """
    if file.lower().endswith(".onnx"):
        _inspect_model(ctx, file, check or runs, runs, data, as_json)
        return
    if check or runs or data:
        raise click.UsageError("--check, --run and --data are for models (.onnx).")
    from retrieval.embeddings import load
    from retrieval.inspection import inspect as look

    with progress_bar() as report:
        data = load(file, labels=labels)
        result = look(data, report)
    if as_json:
        print_json(result)
        return
    from retrieval.tables import inspection_table

    stdout_console().print(inspection_table(result))
    for line in data.notes:
        warn(line)
    if all(split["labels"] for split in result["splits"].values()):
        next_step("eval", file, *given_options(labels=labels))
    else:
        next_step("eval", file, "--labels", "labels.txt")


def _inspect_model(ctx, file, check, runs, data, as_json) -> None:
    """The model's part of `inspect`; exit code 1 if a check fails."""
    from exporter.inspection import check_model, inspect_model
    from exporter.tables import model_table

    found = inspect_model(Path(file))
    if check:
        with progress_bar() as report:
            found["check"] = check_model(Path(file), [Path(run) for run in runs], data, report)
    if as_json:
        print_json(found)
    else:
        stdout_console().print(model_table(found))
        if check and "problem" not in found:
            # A model of another program does not say how its images are prepared.
            said = "preprocessing" in found or found["input"]["dtype"] == "uint8"
            given = () if said else ("--mean", "R,G,B", "--std", "R,G,B")
            next_step("embed", file, "photos", "--out", "photos.h5", *given)
        elif "problem" not in found:
            next_step("inspect", file, "--check")
    if check and not all(found["check"]["passed"].values()):
        ctx.exit(1)


@main.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@labels_option
@scoring_options
@click.option("--nmi/--no-nmi", default=False, help="k-means NMI and AMI as well.")
@output_options
def compare(a, b, labels, distance, as_json, out, force, **scoring) -> None:
    """Compare two embedding files of the same items: is B better?

    Each difference comes with a paired interval that resamples classes and a p value, and with
    the queries that flipped. Rows are matched by path where both files have paths.

    \b
    Example:
      dmltool compare old.h5 new.h5 --distance cos
    """
    from retrieval.comparison import compare as paired
    from retrieval.embeddings import load
    from retrieval.files import check_target, write_text
    from retrieval.formats.opening import Sources

    settings = _settings(distance, **scoring)
    sources = Sources(a, b, labels)
    target = check_target(out, force, sources.files) if out else None
    with progress_bar() as report:
        first, second = load(a, labels=labels), load(b, labels=labels)
        result = paired(first, second, settings, report)
    sources.check_unchanged()
    if target:
        write_text(target, to_json(result), force)
    if as_json:
        print_json(result)
        return
    from retrieval.tables import comparison_table

    console = stdout_console()
    console.print(comparison_table(result, console.width))
    for line in dict.fromkeys((*first.notes, *second.notes)):
        warn(line)
    next_step("report", b, "--compare", a, *given_options(labels=labels))


@main.command()
@click.argument("file", metavar="FILE")
@click.option(
    "--compare", "others", multiple=True, metavar="FILE",
    help="Another file of the same items, to compare with; may be repeated.",
)  # fmt: skip
@click.option("--run", metavar="RUN", help="Folder of the training: its curves and its images.")
@click.option("--images", metavar="ROOT", help="Folder that the paths in FILE begin at.")
@click.option("--out", metavar="FILE", default="report.html", show_default=True)
@click.option(
    "--distance", type=click.Choice(["l2", "cos"]), default="cos", show_default=True,
    help="Of the rows, the confusions and the map; the scores are by both.",
)  # fmt: skip
@click.option("--gallery", metavar="FILE", help="Gallery embeddings; FILE holds the queries then.")
@labels_option
@click.option("--gallery-labels", metavar="FILE", help="Labels of the gallery, if not in its file.")
@click.option(
    "--nmi/--no-nmi", default=None, help="k-means NMI and AMI.  [default: if that is quick]"
)
@click.option(
    "--map", type=click.Choice(["tsne", "pca", "none"]), default="tsne", show_default=True,
    help="How 2,000 of the queries are laid out in the plane.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
              help="Of what is drawn at random, and of the map.")  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def report(file, others, run, images, out, gallery, labels, gallery_labels, force, **given) -> None:
    """Show an embedding file as one HTML page.

    It shows what is found and what is not: scores, retrieved rows with images, confused classes,
    near-duplicates, distances and a map. The page is one file that needs no network. FILE says
    where its images are; --images does where they have moved or FILE is of another program.

    \b
    Examples:
      dmltool report embeddings.h5
      dmltool report features.npz --images photos
      dmltool report runs/b/embeddings.h5 --compare runs/a/embeddings.h5 --run runs/b
    """
    from retrieval.embeddings import load
    from retrieval.files import check_target, write_text
    from retrieval.formats.opening import Sources
    from retrieval.report.gather import Options, gather
    from retrieval.report.page import render
    from trainer.reporting import pictures_of, run_view

    sources = Sources(file, gallery, labels, gallery_labels, *others)
    run, images = (None if path is None else Path(path) for path in (run, images))
    kept = [] if run is None else [run / "config.toml", run / "metrics.jsonl"]
    target = check_target(out, force, [*sources.files, *kept])
    with progress_bar() as tell:
        data = load(file, labels=labels, gallery=gallery, gallery_labels=gallery_labels)
        compared = [load(name, labels=labels, gallery_labels=gallery_labels) for name in others]
        pictures, note = pictures_of(data, images, run)
        if images is None and hasattr(pictures, "root"):
            click.echo(f"Images from {pictures.root}", err=True)
        view = gather(
            data, provenance(data), compared, Options(**given), pictures=pictures,
            run_view=run and run_view(run), notes=[note] if note else [], progress=tell,
        )  # fmt: skip
        tell("page", 0, 1)
        page = render(view)
    sources.check_unchanged()
    write_text(target, page, force)
    for line in (*data.notes, *view["warnings"]):
        warn(line)
    click.echo(str(target))
    say_next(f"open {target} in a browser")


FLAGS = {  # options of `dmltool train` that are keys of the configuration
    "dataset": "data.dataset",
    "data": "data.root",
    "loss": "loss.name",
    "backbone": "network.backbone",
    "weights": "network.weights",
    "dim": "network.dim",
    "epochs": "schedule.epochs",
    "lr": "optimizer.lr",
    "seed": "run.seed",
    "select": "run.select",
    "monitor": "loss.monitor",
    "min_images": "data.min_images",
    "skip_bad": "data.skip_bad",
    "cache": "data.cache",
    "workers": "data.workers",
    "device": "run.device",
    "threads": "run.threads",
    "precision": "run.precision",
    "deterministic": "run.deterministic",
    "compile": "run.compile",
    "tensorboard": "run.tensorboard",
}


SPOKEN = {key: f"--{name.replace('_', '-')}" for name, key in FLAGS.items()} | dict.fromkeys(
    ("batches.size", "batches.classes", "batches.images"), "--batch"
)


class Batch(click.ParamType):
    """128 images at random, or 6x9: classes x images of each."""

    name = "N|CxM"

    def convert(self, value, param, ctx) -> dict[str, int]:
        try:
            numbers = [int(part) for part in value.lower().split("x")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or min(numbers) < 1:
            self.fail(f"{value!r} is neither a number of images nor CxM such as 6x9", param, ctx)
        if len(numbers) == 1:
            return {"batches.size": numbers[0], "batches.classes": 0, "batches.images": 0}
        return {"batches.classes": numbers[0], "batches.images": numbers[1]}


def _train_flags(given: dict) -> dict:
    """Dotted keys of the configuration from the options that were given."""
    flags = {
        FLAGS[name]: value
        for name, value in given.items()
        if name in FLAGS and value is not None and value is not False  # 0 is a value
    }
    if given["monitor"]:
        flags["loss.monitor"] = [part.strip() for part in given["monitor"].split(",")]
    return flags | (given["batch"] or {})


@main.command()
@click.option("--preset", metavar="NAME", help="Settings of a paper: dmltool list presets.")
@click.option("--config", "file", metavar="FILE", help="Settings from a TOML file.")
@click.option("--dataset", metavar="NAME", help="dmltool list datasets. [default: glyphs]")
@click.option("--data", metavar="PATH", help="Folder (alone: one for each class) or table.")
@click.option("--loss", metavar="NAME", help="dmltool list losses, or pml:NAME.")
@click.option("--backbone", metavar="NAME", help="dmltool list backbones, or timm:NAME.")
@click.option("--weights", metavar="NAME|FILE", help="imagenet, none, or a file.")
@click.option("--dim", type=click.IntRange(0), help="Length of the embedding; 0: the backbone's.")
@click.option("--epochs", type=click.IntRange(1))
@click.option("--batch", type=Batch(), help="128 images at random, or 6x9: classes x images.")
@click.option("--lr", type=float, help="Learning rate.")
@click.option("--seed", type=click.IntRange(0))
@click.option(
    "--select",
    type=click.Choice(["val", "test", "last"]),
    help="What picks the best epoch: held-out training classes; the test set, as the papers do; "
    "nothing, the last is kept.  [default: val]",
)
@click.option("--monitor", metavar="NAME,...", help="Watch these beside the loss: spce, pce.")
@click.option("--min-images", type=click.IntRange(1), help="Leave out classes with fewer.")
@click.option("--skip-bad", is_flag=True, help="Leave out images that cannot be read.")
@click.option("--allow-incomplete", is_flag=True, help="Accept a data set with missing images.")
@click.option(
    "--cache", type=click.Choice(["none", "ram", "disk"]), help="Where resized images are kept."
)
@click.option("--workers", type=click.IntRange(0), help="Processes that read images.")
@click.option("--device", help="cpu, cuda, cuda:1, ...  [default: the best there is]")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="On a CPU. [default: a trial]")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Of the network.")
@click.option("--deterministic", is_flag=True, help="Only operations that repeat exactly.")
@click.option("--compile", is_flag=True, help="torch.compile the network.")
@click.option("--tensorboard", is_flag=True, help="Log for TensorBoard as well.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any other setting.")
@click.option("--out", metavar="RUN", help="Folder of the run. [default: runs/NAME]")
@click.option("--resume", metavar="RUN", help="Go on with a run; --epochs N: up to N in all.")
@click.option("--dry-run", is_flag=True, help="Print the settings as TOML and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def train(preset, file, settings, out, resume, dry_run, as_json, allow_incomplete, **given) -> None:
    """Train an embedding network: CE, SPCE, Group Loss and others.

    Without options it learns letters drawn from fonts: no download, two minutes. The run folder
    holds checkpoints (best.pt, last.pt), config.toml, metrics.jsonl, curves.png and result.json.

    \b
    Examples:
      dmltool train
      dmltool train --preset cub-ce --data CUB_200_2011
      dmltool train --data photos --loss group --batch 6x4
      dmltool train --resume runs/cub-ce
      torchrun --nproc-per-node=4 -m cli train --preset sop-ce --data Stanford_Online_Products
    """
    from trainer.resolve import needs_weights, preset_path, resolve, resumed, starting_preset

    flags = _train_flags(given)
    if allow_incomplete:
        settings = (*settings, "data.options.allow_incomplete=true")
    if resume:
        if preset or file or out:
            raise click.UsageError(
                "--resume goes on with a run as it was: no --preset, --config, --out."
            )
        from trainer.run.checkpoint import load_config

        folder = Path(resume)
        folder = folder.parent if folder.is_file() else folder
        config = resumed(load_config(folder), flags, settings, SPOKEN)
    else:
        config, name = resolve(preset, file and Path(file), flags, settings, SPOKEN)
        folder = Path(out) if out else new_folder(Path("runs"), name)
        start = file or preset or starting_preset(flags, settings)
        if not preset and not file:
            click.echo(f"Settings of the preset {start}; --dry-run shows them", err=True)
        source = Path(file) if file else preset_path(start)
        if config.network.weights == "none" and needs_weights(source):
            warn(
                f"The settings of {start} are for pretrained weights. Own images without any "
                "learn with --preset photos-scratch-ce"
            )
    if dry_run:
        from trainer.listing import check_names

        check_names(config)
        click.echo(config.to_toml(), nl=False)
        return
    with training_display() as watch:
        from trainer.run.folder import FolderTaken
        from trainer.run.train import run

        try:
            result = run(config, folder, watch, resume=bool(resume))
        except FolderTaken:
            if out or resume:
                raise
            # Started at the same moment, another run has taken the name.
            folder = new_folder(Path("runs"), name)
            result = run(config, folder, watch)
        except KeyboardInterrupt:
            watch.interrupted(folder)
            raise click.exceptions.Exit(interrupts.INTERRUPTED) from None
    if result is None:  # another process of the same run tells it
        return
    if as_json:
        print_json(result)
        return
    from trainer.tables import result_table

    stdout_console().print(result_table(result))
    next_step("export", folder)


def new_folder(parent, name: str):
    """runs/NAME, or runs/NAME-2 and so on where that is taken."""
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


@contextmanager
def training_display() -> Iterator:
    """Shows a run on stderr: a bar on a terminal, and a line for every epoch."""
    from trainer.tables import Display

    with Display(safe_console(stderr=True)) as display:
        yield display


class Triple(click.ParamType):
    """0.485,0.456,0.406"""

    name = "R,G,B"

    def convert(self, value, param, ctx) -> tuple[float, ...]:
        try:
            numbers = tuple(float(part) for part in value.split(","))
        except ValueError:
            numbers = ()
        if len(numbers) != 3:
            self.fail(f"{value!r} is not three numbers such as 0.485,0.456,0.406", param, ctx)
        return numbers


class Colour(click.ParamType):
    """255,255,255"""

    name = "R,G,B"

    def convert(self, value, param, ctx) -> tuple[int, ...]:
        parts = value.split(",")
        if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
            self.fail(f"{value!r} is not three whole numbers such as 255,255,255", param, ctx)
        numbers = tuple(map(int, parts))
        if max(numbers) > 255:
            self.fail(f"{value!r}: colours go from 0 to 255", param, ctx)
        return numbers


embedding_options = options(
    click.option(
        "--split", "splits", multiple=True,
        type=click.Choice(["train", "val", "test", "query", "gallery"]),
        help="A part of a divided data set; may be repeated.  [default: test, or query and "
        "gallery; all images where nothing is divided]",
    ),
    click.option(
        "--provider", type=click.Choice(["auto", "cpu", "cuda", "tensorrt"]), default="auto",
        show_default=True, help="auto: a GPU if one works.",
    ),
    click.option(
        "--threads", type=click.IntRange(1), metavar="N", help="On a CPU.  [default: a trial]"
    ),
    click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True),
    click.option("--half", is_flag=True, help="Store float16; says what that does to Recall@1."),
    click.option("--skip-bad", is_flag=True, help="Leave out images that cannot be read."),
    click.option("--resume", is_flag=True, help="Compute only what an interrupted run left out."),
    click.option("--force", is_flag=True, help="Overwrite existing files."),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
)  # fmt: skip


@main.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("--onnx/--no-onnx", default=True, help="Write model.onnx, the default.")
@click.option(
    "--embeddings/--no-embeddings", default=True, help="Write embeddings.h5.  [default: yes]"
)
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "int8"]), default="fp32", show_default=True,
    help="Of the model. int8 is calibrated on training images.",
)  # fmt: skip
@click.option("--normalize", is_flag=True, help="Embeddings of length 1, inside the graph.")
@click.option(
    "--input", type=click.Choice(["uint8-nhwc", "float-nchw"]), default="uint8-nhwc",
    show_default=True, help="What the model takes; scaling and mean are inside either way.",
)  # fmt: skip
@click.option(
    "--max-recall-drop", type=float, metavar="POINTS",
    help="How much worse the model may retrieve.  [default: 0.1, fp16 0.5, int8 1.0]",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(["onnx", "torch"]), default="onnx", show_default=True,
    help="What computes the embeddings.",
)  # fmt: skip
@click.option("--data", metavar="PATH", help="Where the data set is now, if it has moved.")
@click.option("--out", metavar="FOLDER", help="[default: the folder of the run]")
@embedding_options
def export(runs, out, as_json, **given) -> None:
    """Export a trained run: a checked model.onnx and embeddings.h5.

    The model is compared with the network on real and random images, down to Recall@1 and the
    nearest neighbours; where it falls short, no model is left behind. Several runs become one
    model whose embeddings are theirs side by side.

    \b
    Examples:
      dmltool export runs/glyphs-ce
      dmltool export runs/glyphs-ce --precision int8 --no-embeddings --force
      dmltool export runs/a runs/b runs/c --out ensemble
    """
    from exporter.export import EMBEDDINGS, MODEL, Settings, output_folder
    from exporter.export import export as run_export
    from exporter.tables import export_tables

    runs, out = [Path(run) for run in runs], out and Path(out)
    folder = output_folder(runs, out)
    kept = (folder / MODEL, folder / f"{EMBEDDINGS}.partial")
    with resumable(*kept, resume=given["resume"]), progress_bar() as report:
        result = run_export(runs, out, Settings(**given), report)
    _tell_export(result, as_json, export_tables)
    if not as_json and given["embeddings"]:
        next_step("eval", folder / EMBEDDINGS)
    elif not as_json:
        next_step("embed", folder / MODEL, "photos", "--out", "photos.h5")


@main.command()
@click.argument("model", metavar="MODEL.onnx")
@click.argument("data", metavar="DATA")
@click.option("--out", metavar="FILE", required=True, help="The embedding file (.h5).")
@click.option("--size", type=click.IntRange(1), help="Side of the input in pixels.")
@click.option("--resize", type=click.IntRange(1), help="Short side before cropping.")
@click.option("--squash", is_flag=True, help="Resize both sides alike instead of cropping.")
@click.option(
    "--interpolation", type=click.Choice(["bilinear", "bicubic", "lanczos", "box", "nearest"]),
    help="Of the resizing.  [default: bilinear]",
)  # fmt: skip
@click.option("--mean", type=Triple(), help="Subtracted from colours in 0 to 1.")
@click.option("--std", type=Triple(), help="Divided by after that.")
@click.option(
    "--scale", type=click.Choice(["1", "255"]), callback=lambda _c, _p, v: v and int(v),
    help="255: --mean and --std are of colours in 0 to 255.",
)  # fmt: skip
@click.option("--bgr", is_flag=True, help="Blue comes first; --mean, --std stay R,G,B.")
@click.option("--background", type=Colour(), help="Behind transparency.  [default: white]")
@click.option("--no-draft", is_flag=True, help="Decode large JPEGs at full size.")
@click.option("--layout", type=click.Choice(["nchw", "nhwc"]), help="Order of the input's axes.")
@click.option("--output-name", metavar="NAME", help="Which output holds the embeddings.")
@embedding_options
def embed(model, data, out, as_json, **given) -> None:
    """Embed images with any ONNX model, also of other programs.

    DATA is a folder with a folder for each class, a table (.csv with path and label), `glyphs`, or
    NAME:FOLDER of a data set (cub:CUB_200_2011). `photos` embeds all its images; `folder:photos`
    is divided as for training, and --split picks the part. Images without labels, a flat folder or
    a table of paths, can be embedded too. A model of dmltool says itself how images are prepared;
    for others --size, --mean and --std say it.

    \b
    Examples:
      dmltool embed runs/glyphs-ce/model.onnx photos --out photos.h5
      dmltool embed runs/mine/model.onnx folder:photos --split train --out train.h5
      dmltool embed net.onnx photos --out p.h5 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225
    """
    from exporter.embed import embed_with
    from exporter.tables import embeddings_table

    kept = Path(out).with_name(f"{Path(out).name}.partial")
    with resumable(kept, resume=given["resume"]), progress_bar() as report:
        result = embed_with(Path(model), data, Path(out), progress=report, **given)
    _tell_export(
        {"embeddings": result}, as_json, lambda found: embeddings_table(found["embeddings"])
    )
    if not as_json:
        next_step("eval", out, *([] if result["labelled"] else ["--labels", "labels.txt"]))


def _tell_export(result: dict, as_json: bool, tables: Callable) -> None:
    """The result on stdout; who computed it and what was left out on stderr."""
    found = result.get("embeddings") or result["model"]
    if by := found.get("run_by") or found.get("provider_why"):
        click.echo(_folded(f"Runs on {by}", 0), err=True)
    if result.get("threads"):
        click.echo(_folded(f"With {result['threads']}", 0), err=True)
    for path, reason in found.get("skipped", ()):
        warn(f"left out: {path}: {reason}")
    if as_json:
        print_json(result)
        return
    stdout_console().print(tables(result))


@main.command()
@click.argument("files", metavar="FILE FILE...", nargs=-1, required=True)
@click.option("--out", metavar="FILE", required=True, help="The new embedding file (.h5).")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def merge(files, out, force) -> None:
    """Join embedding files of the same items: an ensemble.

    Rows are l2-normalised and put side by side, after items and labels have been found to agree.

    \b
    Example:
      dmltool merge a.h5 b.h5 --out both.h5
    """
    from retrieval.merging import merge as join

    with progress_bar() as report:
        found = join(files, out, force, report)
    rows = ", ".join(f"{n:,} {split}" for split, n in found.splits.items())
    click.echo(f"{found.path}: {rows} rows of {' + '.join(map(str, found.dims))} dimensions")
    next_step("eval", out)


@main.command("list")
@click.argument("kind", type=click.Choice(["presets", "losses", "datasets", "backbones"]))
@click.option("--json", "as_json", is_flag=True, help="Print names and summaries as JSON.")
def list_command(kind: str, as_json: bool) -> None:
    """List what `dmltool train` can use, with a line about each.

    \b
    Example:
      dmltool list losses
    """
    from trainer.listing import listing

    found = listing(kind)
    if as_json:
        print_json(found)
        return
    indent = max(map(len, found)) + 2
    for name, summary in found.items():
        text = _folded(summary, indent, sys.stdout).replace("\n", "\n" + " " * indent)
        click.echo(click.style(name.ljust(indent), bold=True) + text)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show what is installed, what works here and what is missing.

    Everything is tried, not listed. Exit code 0: `dmltool demo` can run.

    \b
    Example:
      dmltool doctor
    """
    from dataclasses import asdict

    from exporter.doctor import examine, ready, table

    checks = examine()
    good = ready(checks)
    if as_json:
        found = {"ready": good, "checks": [asdict(check) for check in checks]}
        print_json(found)
    else:
        stdout_console().print(table(checks))
        verdict = "Ready: dmltool demo" if good else "Not ready: the lines with ✗ say what to do."
        click.secho(f"\n{verdict}", bold=True)
    ctx.exit(0 if good else 1)


@main.command()
@click.option("--quick", is_flag=True, help="One loss instead of three: a minute or so.")
@click.option("--epochs", type=click.IntRange(1), help="Of each training.  [default: the preset's]")
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    default="demo",
    show_default=True,
    help="Folder of the demo.",
)
@click.option("--as-child", is_flag=True, hidden=True)
@click.option("--goes-on", is_flag=True, hidden=True)
@click.pass_context
def demo(
    ctx: click.Context, quick: bool, epochs: int | None, out: str, as_child: bool, goes_on: bool
) -> None:
    """From images to a report: train, export, evaluate, compare.

    The images are letters drawn from fonts: nothing is downloaded. Each command is shown, then
    run. Interrupted, it goes on where it was: what is finished is kept.

    \b
    Examples:
      dmltool demo
      dmltool demo --quick --out try
    """
    args = ["demo", "--out", out, *["--quick"] * quick]
    args += ["--epochs", str(epochs)] if epochs else []
    if not as_child and not interrupts.deaf():
        # Ctrl-C reaches this process at once, whatever the other is busy with.
        code = interrupts.run_child([*PYTHON, *args, "--as-child"])
        if code == interrupts.INTERRUPTED:
            click.echo("To go on, run the demo again: what is finished is kept.", err=True)
        ctx.exit(code)
    with interrupts.raised(always=as_child):
        _demo(ctx, out, quick, epochs, goes_on, [*args, *["--as-child"] * as_child])


def _demo(
    ctx: click.Context, out: str, quick: bool, epochs: int | None, goes_on: bool, again: list[str]
) -> None:
    """Runs the steps that are not finished; `again` are the arguments to go on with."""
    from shlex import join

    from exporter.demo import LOSSES, open_folder, steps, summary, write_baselines

    folder, losses = Path(out), LOSSES[: 1 if quick else None]
    open_folder(folder, epochs)
    with progress_bar() as report:
        fresh = not write_baselines(folder, report)
    for step in steps(folder, losses, epochs):
        if step.finished():
            if fresh and not goes_on:
                click.secho(f"kept: {step.made}", dim=True, err=True)
            continue
        if step.heavy and not fresh:
            _begin_anew([*again, "--goes-on"])
        fresh = False
        step.clear()
        args = step.command()
        click.secho(f"\n$ dmltool {join(args)}", bold=True)
        if code := main.main(list(args), "dmltool", standalone_mode=False, obj="demo"):
            if code != interrupts.INTERRUPTED:
                click.echo("To go on, run the demo again: what is finished is kept.", err=True)
            ctx.exit(code)
    click.echo()
    stdout_console().print(summary(folder, losses))
    click.echo(f"{(folder / 'report.html').resolve()}")
    click.echo("Open it in a browser. Next, your own images: dmltool train --help", err=True)


def _begin_anew(args: list[str]) -> None:
    """Goes on in the memory of a new program: all that the commands so far have loaded is gone."""
    import signal

    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the new program can say what it means
    os.execv(PYTHON[0], [*PYTHON, *args])


if __name__ == "__main__":
    sys.exit(main(prog_name="dmltool"))
