"""The commands inspect, doctor and demo; `inspect` shows models and embeddings.

What they call is imported when they run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from retrieval import signals
from retrieval.console import (
    RUN_AGAIN,
    ProgressBar,
    given_options,
    next_step,
    on_interrupt,
    print_json,
    stdout_console,
    warn,
)
from retrieval.options import PATH, device_option, json_option, labels_option, whole_option

DMLTOOL = (sys.executable, "-P", "-m", "cli")  # -P: no module of the current folder is imported
TO_GO_ON = "To continue, run the demo again: finished steps are kept."


@click.command()
@click.argument("file", type=PATH, metavar="FILE")
@labels_option
@click.option(
    "--entropy", is_flag=True, help="Estimate the entropies of the embeddings and the labels."
)
@click.option("--check", is_flag=True, help="Test a model on random images.")
@click.option(
    "--run",
    "runs",
    multiple=True,
    type=PATH,
    metavar="RUN",
    help="Compare a model with its training run; repeat the option for each run of an ensemble. "
    "With --entropy: the run whose head gives H(Y) - CE.",
)
@click.option(
    "--data", type=PATH, metavar="PATH", help="With --run: folder of the data set, if it has moved."
)
@device_option("With --run: device that finds neighbours")
@json_option
@click.pass_context
def inspect(
    ctx: click.Context,
    file: str,
    labels: str | None,
    entropy: bool,
    check: bool,
    runs: tuple[str, ...],
    data: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Show what is in an embedding file or a model.

    For an embedding file, it shows splits, labels, norms, metadata and checks; --entropy estimates
    how much the embeddings tell about the labels. For a model, it shows input, output,
    preprocessing, precision, origin and the comparison with the trained network at export; --check
    tests the model on random images, and --run repeats the comparison with the network.

    \b
    Examples:
      dmltool inspect embeddings.h5
      dmltool inspect embeddings.h5 --entropy --run runs/mine
      dmltool inspect runs/mine/model.onnx --run runs/mine
    """
    if (data or device != "auto") and not runs:
        raise click.UsageError("--data and --device are for comparing a model with its --run.")
    if file.lower().endswith(".onnx"):
        if entropy or labels:
            raise click.UsageError("--entropy and --labels are for embedding files.")
        if not _inspect_model(file, bool(check or runs), runs, data, device, as_json):
            ctx.exit(1)
        return
    if check or data or device != "auto":
        raise click.UsageError("--check, --data and --device are for models (.onnx).")
    if runs and not entropy:
        raise click.UsageError("For an embedding file, --run needs --entropy: add --entropy.")
    if len(runs) > 1:
        raise click.UsageError("--entropy takes one --run: one head.")
    _inspect_embeddings(file, labels, entropy, Path(runs[0]) if runs else None, as_json)


def _inspect_embeddings(
    file: str, labels: str | None, entropy: bool, run: Path | None, as_json: bool
) -> None:
    from retrieval.inspection import inspect, with_entropy
    from retrieval.loading.load import load
    from retrieval.tables import inspection_table

    with ProgressBar() as report:
        data = load(file, labels=labels, progress=report)
        result = inspect(data, report)
        if entropy:
            result = with_entropy(result, data, report)
        if run:
            from trainer.run.head import with_head

            result = with_head(result, data, run)
    if as_json:
        print_json(result)
        return
    stdout_console().print(inspection_table(result))
    for line in result["notes"]:
        warn(line)
    labelled = all(split["labels"] for split in result["splits"].values())
    next_step("eval", file, *given_options(labels=labels if labelled else "labels.txt"))


def _inspect_model(
    file: str, check: bool, runs: tuple[str, ...], data: str | None, device: str, as_json: bool
) -> bool:
    """Show a model; return whether all checks hold."""
    from exporter.inspection import check_model, inspect_model
    from exporter.onnx.model import describe
    from exporter.tables import model_table

    found, model = inspect_model(Path(file))
    if check:
        with ProgressBar() as report:
            model = model or describe(file)  # which raises its problem
            found["check"] = check_model(model, [Path(run) for run in runs], data, report, device)
    if as_json:
        print_json(found)
    else:
        stdout_console().print(model_table(found))
    if not as_json and "problem" not in found:
        # A model of another program does not say how its images are prepared.
        said = "preprocessing" in found or found["input"]["dtype"] == "uint8"
        given = () if said else ("--mean", "R,G,B", "--std", "R,G,B")
        embed_step = ("embed", file, "photos", "--out", "photos.h5", *given)
        next_step(*(embed_step if check else ("inspect", file, "--check")))
    return not check or all(found["check"]["passed"].values())


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Show what is installed, what works here and what is missing.

    Each package is tested by using it. The exit code is 0 if `dmltool demo` can run.

    \b
    Example:
      dmltool doctor
    """
    from dataclasses import asdict

    from exporter.doctor import examine, ready, table

    checks = examine()
    good = ready(checks)
    if as_json:
        print_json({"ready": good, "checks": [asdict(check) for check in checks]})
    else:
        stdout_console().print(table(checks))
        verdict = "Ready: dmltool demo" if good else "Not ready: the lines with ✗ say what to do."
        click.secho(f"\n{verdict}", bold=True)
    ctx.exit(0 if good else 1)


@click.command()
@click.option("--quick", is_flag=True, help="Train one loss instead of three, in about 90 s.")
@whole_option("--epochs", "Epochs of each training run.  [default: those of the preset]")
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    default="demo",
    show_default=True,
    help="Folder of the demo.",
)
@click.pass_context
def demo(ctx: click.Context, quick: bool, epochs: int | None, out: str) -> None:
    """Train, export, evaluate and compare small networks; write a report.

    The images are letters drawn from fonts, so nothing is downloaded. Each command is printed
    before it runs. After an interruption, run the demo again: finished steps are kept.

    \b
    Examples:
      dmltool demo
      dmltool demo --quick --out try
    """
    from shlex import join

    from exporter.demo import LOSSES, open_folder, steps, summary

    folder, losses = Path(out), LOSSES[: 1 if quick else None]
    open_folder(folder, epochs)
    with on_interrupt(lambda: RUN_AGAIN):
        for step in steps(folder, losses, epochs):
            if step.finished():
                click.secho(f"kept: {step.made}", dim=True, err=True)
                continue
            step.clear()
            args = step.command()
            if step.shown:
                click.secho(f"\n$ dmltool {join(args)}", bold=True)
            sys.stdout.flush()
            if code := signals.run_child([*DMLTOOL, *args]):
                click.echo(TO_GO_ON, err=True)
                ctx.exit(code)
    click.echo()
    stdout_console().print(summary(folder, losses))
    click.echo(f"{(folder / 'report.html').resolve()}")
    click.echo("Open it in a browser. Next, your own images: dmltool train --help", err=True)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def baselines(folder: Path) -> None:
    """Write the embeddings of the demo's baselines."""
    from exporter.demo import write_baselines

    write_baselines(folder)
