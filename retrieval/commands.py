"""The commands eval, compare and merge. What they call is imported when they run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from retrieval import signals
from retrieval.console import (
    RUN_AGAIN,
    ProgressBar,
    given_options,
    next_step,
    on_interrupt,
    several_processes,
    short_path,
    stdout_console,
    tell,
    warn,
)
from retrieval.formats import main_suffixes
from retrieval.kmeans import ITERATIONS
from retrieval.options import (
    PATH,
    Output,
    force_option,
    gallery_options,
    help_with,
    labels_option,
    nonfinite_option,
    output_options,
    scoring_options,
    scoring_settings,
    whole_option,
)

if TYPE_CHECKING:
    from retrieval.distributed.world import World
    from retrieval.embeddings import Embeddings
    from retrieval.evaluation import Evaluation, Settings
    from retrieval.loading.inputs import Inputs
    from retrieval.problem import Problem


@click.command("eval")
@click.argument("file", type=PATH, metavar="FILE")
@gallery_options
@scoring_options
@click.option(
    "--nmi/--no-nmi",
    default=None,
    help="Compute NMI and AMI with k-means.  [default: if it takes less than 2 min]",
)
@whole_option(
    "--kmeans-iterations",
    "Maximum number of k-means iterations; k-means stops when nothing changes.",
    default=ITERATIONS,
)
@whole_option(
    "--kmeans-restarts",
    "Number of starts of k-means for each seed; the best is kept.  [default: 10 up to 1,000 "
    "clusters, else 1]",
)
@nonfinite_option
@click.option(
    "--per-class", type=PATH, metavar="FILE", help="Write Recall@1 of each class to FILE as CSV."
)
@output_options
@several_processes
@help_with(SUFFIXES=main_suffixes())
def eval_command(
    file: str,
    gallery: str | None,
    labels: str | None,
    gallery_labels: str | None,
    drop_nonfinite: bool,
    per_class: str | None,
    as_json: bool,
    out: str | None,
    force: bool,
    world: World,
    **scoring: Any,
) -> None:
    """Evaluate an embedding file: Recall@K, MRR, MAP@R and NMI.

    Scores are computed for Euclidean distance (l2) and cosine similarity (cos). FILE is SUFFIXES;
    `dmltool list formats` shows more. FILE::key selects an array in it. FILE may also be a pattern,
    a folder of shards, or an address: s3://, gs://, hf:// or https://. By default each item is a
    query, and all other items are its gallery. If FILE has the splits query and gallery, or if
    --gallery is given, each query is ranked against the gallery instead.

    \b
    Examples:
      dmltool eval embeddings.h5
      dmltool eval features.npy --labels labels.txt --recall-at 1,10,100
      dmltool eval query.npz --gallery gallery.npz --json > result.json
      dmltool eval 's3://bucket/shards/*.npy' --labels s3://bucket/labels.npy
      torchrun --nproc-per-node=8 -m cli eval large.h5 --no-nmi
    """
    from retrieval.loading.inputs import Inputs
    from retrieval.problem import from_embeddings

    settings = scoring_settings(**scoring)
    with ProgressBar() as report:
        of_labels = (labels, gallery_labels)
        inputs = Inputs(file, gallery, labels=of_labels, train=False, progress=report, world=world)
        output = Output.checked(as_json, out, force, inputs.files, per_class)
        beside = {"gallery": gallery, "labels": labels, "gallery_labels": gallery_labels}
        with inputs.being_read():
            data = inputs.load(file, **beside)
            lists = data.has_only_neighbours
            problem = None if lists else from_embeddings(data, drop_nonfinite=drop_nonfinite)
    if problem is None:
        _compare_lists(data, settings, drop_nonfinite, inputs, output, world)
    elif _evaluate(problem, data, settings.of(data), inputs, output, world) and not as_json:
        given = given_options(**beside, drop_nonfinite=drop_nonfinite)
        next_step("report", file, *given)


def _evaluate(
    problem: Problem,
    data: Embeddings,
    settings: Settings,
    inputs: Inputs,
    output: Output,
    world: World,
) -> bool:
    """Evaluate a problem, show and write its result; return whether this process did so."""
    from retrieval.checks import warnings
    from retrieval.embeddings import provenance
    from retrieval.evaluation import score
    from retrieval.files import write_text
    from retrieval.tables import per_class_csv

    if world.rank:  # helps to count; the first process does everything else
        score(problem, settings, world=world)
        return False
    evaluation, interrupted = _score(problem, settings, inputs, not output.as_json, world)
    result = evaluation.result | {"source": provenance(data)}
    if output.per_class:
        write_text(output.per_class, per_class_csv(evaluation, data.label_names), output.force)
    output.write(result)
    if not output.as_json:
        _tell_source(data)
    for line in result["notes"] if output.as_json else warnings(result):
        warn(line)
    if interrupted:
        raise click.exceptions.Exit(signals.INTERRUPTED)
    return True


def _score(
    problem: Problem, settings: Settings, inputs: Inputs, show: bool, world: World
) -> tuple[Evaluation, bool]:
    """Evaluate a problem and show its scores, those of k-means last because it may take long.

    Also returns whether Ctrl-C has cut k-means short: the other scores are kept.
    """
    from retrieval.evaluation import score
    from retrieval.tables import evaluation_table, nmi_table

    with ProgressBar() as report:
        evaluation = score(problem, settings, report, world)
    inputs.check_unchanged()
    console = stdout_console()
    if show:
        console.print(evaluation_table(evaluation.result, console.width))
        sys.stdout.flush()
    evaluation, interrupted = _with_nmi(evaluation, problem, settings)
    inputs.check_unchanged()
    if show and evaluation.result["settings"]["nmi"]:
        console.print(nmi_table(evaluation.result, console.width))
    if show:
        console.print()
    return evaluation, interrupted


def _with_nmi(
    evaluation: Evaluation, problem: Problem, settings: Settings
) -> tuple[Evaluation, bool]:
    """Add NMI where that is wanted; also return whether Ctrl-C has cut it short."""
    if settings.nmi is False:
        return evaluation, False
    from retrieval.clustering import LONG, add_nmi, seconds_of
    from retrieval.number_format import duration

    if settings.nmi and (seconds := seconds_of(problem, settings)) > LONG:
        tell(
            f"k-means for NMI takes about {duration(seconds)} on two cores; "
            "Ctrl-C leaves it out and keeps the rest."
        )
    try:
        with signals.patient(), ProgressBar() as report:
            return add_nmi(evaluation, problem, settings, report), False
    except KeyboardInterrupt:
        return evaluation.noted("NMI was left out: k-means was interrupted"), True


def _compare_lists(
    data: Embeddings,
    settings: Settings,
    drop_nonfinite: bool,
    inputs: Inputs,
    output: Output,
    world: World,
) -> None:
    """Evaluate a file that lists neighbours and has no labels."""
    from retrieval.embeddings import provenance
    from retrieval.ground_truth import agreement, warnings
    from retrieval.tables import neighbours_table

    if output.per_class:
        raise click.UsageError("--per-class needs labels, and the file has none.")
    if world.rank:  # the first process does everything
        return
    with ProgressBar() as report:
        result = agreement(data, settings, report, drop_nonfinite=drop_nonfinite)
    inputs.check_unchanged()
    output.write(result | {"source": provenance(data)})
    if output.as_json:
        return
    stdout_console().print(neighbours_table(result))
    _tell_source(data)
    for line in warnings(result):
        warn(line)


def _tell_source(data: Embeddings) -> None:
    """Say which arrays or columns of a file were taken, and what came up with it."""
    from retrieval.tables import taken

    if line := taken(data):
        tell(line)
    for line in data.notes:
        warn(line)


@click.command()
@click.argument("a", type=PATH, metavar="A")
@click.argument("b", type=PATH, metavar="B")
@labels_option
@scoring_options
@nonfinite_option
@click.option("--nmi/--no-nmi", default=False, help="Also compute NMI and AMI.  [default: no-nmi]")
@output_options
@several_processes
def compare(
    a: str,
    b: str,
    labels: str | None,
    drop_nonfinite: bool,
    as_json: bool,
    out: str | None,
    force: bool,
    world: World,
    **scoring: Any,
) -> None:
    """Compare two embedding files of the same items: is B better?

    The table shows the difference B - A of each score with a 95% interval (paired bootstrap over
    classes) and a p value. For Recall@1 it also shows how many queries only A or only B answers
    correctly. Rows are matched by path if both files have paths, else by position.

    \b
    Example:
      dmltool compare old.h5 new.h5 --distance cos
    """
    from retrieval.comparison import compare as paired
    from retrieval.loading.inputs import Inputs
    from retrieval.tables import comparison_table

    settings = scoring_settings(**scoring)
    with ProgressBar() as report:
        inputs = Inputs(a, b, labels=[labels], train=False, progress=report, world=world)
        output = Output.checked(as_json, out, force, inputs.files)
        with inputs.being_read():
            first, second = (inputs.load(name, labels=labels) for name in (a, b))
            result = paired(first, second, settings, report, world, drop_nonfinite=drop_nonfinite)
    if world.rank:  # has helped to count; the first process does everything else
        return
    inputs.check_unchanged()
    output.write(result)
    if as_json:
        return
    console = stdout_console()
    console.print(comparison_table(result, console.width))
    for line in dict.fromkeys((*first.notes, *second.notes, *result["notes"])):
        warn(line)
    given = given_options(labels=labels, drop_nonfinite=drop_nonfinite)
    next_step("report", b, "--compare", a, *given)


@click.command()
@click.argument("files", type=PATH, metavar="FILE FILE...", nargs=-1, required=True)
@click.option(
    "--out", type=PATH, metavar="FILE", required=True, help="Embedding file to write (.h5)."
)
@force_option
def merge(files: tuple[str, ...], out: str, force: bool) -> None:
    """Join embedding files of the same items into an ensemble.

    The files must hold the same items with the same labels. Rows are scaled to length 1 and
    concatenated.

    \b
    Example:
      dmltool merge a.h5 b.h5 --out both.h5
    """
    from retrieval.merging import merge as join

    with on_interrupt(lambda: RUN_AGAIN), ProgressBar() as report:
        found = join(files, out, force, report)
    rows = ", ".join(f"{n:,} {split}" for split, n in found.splits.items())
    click.echo(
        f"{short_path(found.path)}: {rows} rows of {' + '.join(map(str, found.dims))} dimensions"
    )
    next_step("eval", out)
