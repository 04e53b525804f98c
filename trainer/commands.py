"""The commands train, list and report; `report` also shows a run and reads images.

What they call is imported when they run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval import signals
from retrieval.console import (
    RUN_AGAIN,
    ProgressBar,
    indented,
    next_step,
    on_interrupt,
    print_json,
    safe_console,
    say_next,
    stdout_console,
    tell,
    warn,
)
from retrieval.options import (
    PATH,
    choice_option,
    device_option,
    force_option,
    gallery_options,
    help_with,
    json_option,
    nonfinite_option,
    whole_option,
)
from retrieval.reporting import MAPS
from retrieval.settings import either
from trainer.options import OPTION_OF, Start, resolved, settings_options, start_of

if TYPE_CHECKING:
    from retrieval.embeddings import Embeddings
    from trainer.config import Config
    from trainer.results import RunResult


@click.command()
@settings_options
@whole_option("--workers", "Number of processes that load images.", 0)
@whole_option("--seeds", "Train N runs, with the seeds --seed, --seed + 1, ...")
@click.option("--out", type=PATH, metavar="RUN", help="Folder of the run.  [default: runs/PRESET]")
@click.option(
    "--resume",
    type=PATH,
    metavar="RUN",
    help="Continue a run; with --epochs N, up to N epochs in total.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the settings as TOML, with --json as JSON, and stop."
)
@json_option
def train(
    seeds: int | None,
    out: str | None,
    resume: str | None,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Train an embedding network: CE, SPCE, Group Loss and others.

    Without options, the command trains on letters drawn from fonts, without a download, in about
    two minutes. It writes checkpoints (best.pt, last.pt), config.toml, metrics.jsonl, curves.png
    and result.json to the run folder.

    \b
    Examples:
      dmltool train
      dmltool train --preset cub-ce --data CUB_200_2011
      dmltool train --data photos --loss group --batch 6x4
      dmltool train --resume runs/cub-ce
      dmltool train --preset glyphs-ce --seeds 5
      torchrun --nproc-per-node=4 -m cli train --preset sop-ce --data SOP
    """
    start, folder = start_of(**given), Path(out) if out else None
    config, folder, name = _settings(start, folder, resume, seeds)
    if dry_run:
        from trainer.validate import check_names

        check_names(config)
        if as_json:
            print_json(config.to_dict())
        else:
            click.echo(config.to_toml(), nl=False)
        return
    if seeds:
        _run_seeds(start, seeds, folder or Path("runs") / f"{name}-seeds", as_json)
        return
    result = _run(config, folder, name, bool(resume))
    if result is None:  # another process of the same run shows it
        return
    if as_json:
        print_json(result)
        return
    from retrieval.run_files import EMBEDDINGS, MODEL
    from trainer.tables import result_table

    stdout_console().print(result_table(result))
    made = any((Path(result["run"]) / name).exists() for name in (MODEL, EMBEDDINGS))
    next_step("export", result["run"], *(["--force"] if made else []))


def _settings(
    start: Start, folder: Path | None, resume: str | None, seeds: int | None
) -> tuple[Config, Path | None, str]:
    """Return the settings, the folder and the name of a new run or of one that is resumed."""
    if not resume:
        config, name = resolved(start)
        return config, folder, name
    if start.preset or start.file or folder:
        raise click.UsageError(
            "--resume continues a run as it was: no --preset, --config or --out."
        )
    if seeds:
        raise click.UsageError("--seeds needs no --resume: repeat the command, and it continues.")
    from trainer.resolve import resumed
    from trainer.run.checkpoint import load_config

    run = Path(resume)
    folder = run.parent if run.is_file() else run
    config = resumed(load_config(folder), start.flags, start.settings, OPTION_OF)
    return config, folder, folder.name


def _run(config: Config, folder: Path | None, name: str, resume: bool) -> RunResult | None:
    """Train and show it on stderr. Without a folder, the run gets a new one called `name`."""
    from retrieval.run_files import LAST
    from trainer.tables import Display, how_to_continue

    target = folder or new_folder(Path("runs"), name)
    of_another = not resume and (target / LAST).exists()  # which train refuses to overwrite

    def left() -> str:
        return signals.NOTHING if of_another else how_to_continue(target)

    with on_interrupt(left), Display(safe_console(stderr=True)) as watch:
        from trainer.run.folder import FolderTaken
        from trainer.run.train import train

        while True:
            try:
                return train(config, target, watch, resume=resume)
            except FolderTaken:
                if folder:
                    raise
                # Another run, started at the same moment, has taken the name.
                target = new_folder(Path("runs"), name)


def _run_seeds(start: Start, seeds: int, folder: Path, as_json: bool) -> None:
    """Train several seeds, and show their mean and spread."""
    from trainer.tables import Display

    with on_interrupt(lambda: RUN_AGAIN), Display(safe_console(stderr=True)) as watch:
        from retrieval.loading.folders import best_run
        from trainer.sweep.plan import Plan
        from trainer.sweep.runs import train_all_seeds
        from trainer.sweep.tables import seeds_table

        found = train_all_seeds(Plan(**vars(start), seeds=seeds), folder, watch)
    if as_json:
        print_json(found)
    else:
        stdout_console().print(seeds_table(found))
        if run := best_run(folder):  # else the file that names it is not there any more
            next_step("export", run)


def new_folder(parent: Path, name: str) -> Path:
    """Return PARENT/NAME, or PARENT/NAME-2 and so on where that is taken."""
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


TABLES = {
    "losses": "trainer.losses:LOSSES",
    "miners": "trainer.losses.miners:MINERS",
    "datasets": "trainer.data.datasets:DATASETS",
    "backbones": "trainer.networks.backbones:BACKBONES",
    "trackers": "trainer.trackers:TRACKERS",
}
KINDS = ("presets", *TABLES, "formats")


def listing(kind: str) -> dict[str, str]:
    """The summary of each entry of a table by its name. Nothing heavy is imported."""
    from retrieval.formats import FORMATS
    from retrieval.registry import Entry
    from trainer.resolve import preset_names, preset_summary

    if kind == "formats":
        return {form.name: f"{' '.join(form.suffixes)}: {form.summary}" for form in FORMATS}
    if kind == "presets":
        return {name: preset_summary(name) for name in preset_names()}
    return Entry(kind, TABLES[kind], "").load().summaries()


@click.command("list")
@click.argument("kind", type=click.Choice(KINDS), metavar="KIND")
@json_option
@help_with(KINDS=either(KINDS))
def list_command(kind: str, as_json: bool) -> None:
    """List presets, losses, miners, data sets, backbones and others.

    KIND is KINDS (of files).

    \b
    Example:
      dmltool list losses
    """
    found = listing(kind)
    if as_json:
        print_json(found)
        return
    indent = max(map(len, found)) + 2
    for name, summary in found.items():
        title = click.style(name.ljust(indent), bold=True)
        click.echo(title + indented(summary, indent, sys.stdout))


@click.command()
@click.argument("file", type=PATH, metavar="FILE")
@click.option(
    "--compare",
    "others",
    multiple=True,
    type=PATH,
    metavar="FILE",
    help="File of the same items to compare with; may be repeated.",
)
@click.option("--run", type=PATH, metavar="RUN", help="Run folder, for training curves and images.")
@click.option(
    "--images",
    type=PATH,
    metavar="ROOT",
    help="Folder of the images; the paths in FILE are relative to it.",
)
@click.option(
    "--out",
    type=PATH,
    metavar="FILE",
    default="report.html",
    show_default=True,
    help="Page to write.",
)
@click.option(
    "--distance",
    type=click.Choice(["l2", "cos"]),
    default="cos",
    show_default=True,
    help="Distance for neighbours, confused classes and the map; scores show both.",
)
@gallery_options
@nonfinite_option
@click.option(
    "--nmi/--no-nmi",
    default=None,
    help="Compute NMI and AMI by k-means.  [default: if it takes less than 2 min]",
)
@choice_option("--map", MAPS, "Method of the 2-D map, which shows up to 2,000 queries.")
@whole_option("--seed", "Seed of the random samples and of the map.", 0, default=0)
@device_option()
@force_option
def report(
    file: str,
    others: tuple[str, ...],
    run: str | None,
    images: str | None,
    out: str,
    gallery: str | None,
    labels: str | None,
    gallery_labels: str | None,
    force: bool,
    **given: Any,
) -> None:
    """Show an embedding file as one HTML page.

    The page shows scores, queries with their nearest images, confused classes, near-duplicates,
    histograms of distances and a 2-D map. It is one file and works offline. Embedding files of
    dmltool record where their images are; use --images if the images have moved or if another
    program wrote FILE.

    \b
    Examples:
      dmltool report embeddings.h5
      dmltool report features.npz --images photos
      dmltool report b/embeddings.h5 --compare a/embeddings.h5 --run b
    """
    from retrieval.loading.inputs import Inputs
    from retrieval.reporting.report import report as write_report

    folder, root = (Path(path) if path else None for path in (run, images))
    of_labels = {"labels": labels, "gallery_labels": gallery_labels}
    with ProgressBar() as progress:
        names = (file, gallery, *others)
        inputs = Inputs(*names, labels=[*of_labels.values()], train=False, progress=progress)
        target = _page(out, force, inputs.files, folder)
        data = inputs.load(file, gallery=gallery, **of_labels)
        found = write_report(
            data,
            target,
            compare_with=[inputs.load(name, **of_labels) for name in others],
            **_of_run(data, root, folder),
            force=force,
            before_writing=inputs.check_unchanged,
            progress=progress,
            **given,
        )
    for line in found.warnings:
        warn(line)
    click.echo(str(target))
    say_next(f"open {target} in a browser")


def _page(out: str, force: bool, files: list[Path], run: Path | None) -> Path:
    """The page to write, which must be none of the files that are read."""
    from retrieval.files import PAGE, check_target
    from retrieval.run_files import CONFIG, METRICS

    of_run = [run / CONFIG, run / METRICS] if run else []
    return check_target(out, PAGE, force, [*files, *of_run])


def _of_run(data: Embeddings, root: Path | None, run: Path | None) -> dict[str, Any]:
    """What a report shows besides the embeddings: their images, the run, and notes on both."""
    from trainer.reporting import Folder, note_on_run, pictures_of, run_view

    pictures, note = pictures_of(data, root, run)
    if root is None and isinstance(pictures, Folder):
        tell(f"Images from {pictures.root}")
    return {
        "pictures": pictures,
        "run_view": run_view(run) if run else None,
        "notes": [*filter(None, [note, note_on_run(data, run)])],
    }
