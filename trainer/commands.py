"""The commands train, list and report; `report` also shows a run and reads images.

What they call is imported when they run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval import interrupts
from retrieval.console import (
    ProgressBar,
    indented,
    next_step,
    print_json,
    safe_console,
    say_next,
    stdout_console,
    tell,
    warn,
)
from retrieval.options import force_option, gallery_options, json_option

if TYPE_CHECKING:
    from retrieval.registry import Registry
    from trainer.config import Config

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

# How error messages name a key: by the option that sets it.
OPTION_OF = {key: f"--{name.replace('_', '-')}" for name, key in FLAGS.items()} | dict.fromkeys(
    ("batches.size", "batches.classes", "batches.images"), "--batch"
)


class Batch(click.ParamType):
    """128 images at random, or 6x9: classes x images of each."""

    name = "N|CxM"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, int]:
        try:
            numbers = [int(part) for part in value.lower().split("x")]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or min(numbers) < 1:
            self.fail(f"{value!r} is neither a number of images nor CxM such as 6x9.", param, ctx)
        if len(numbers) == 1:
            return {"batches.size": numbers[0], "batches.classes": 0, "batches.images": 0}
        return {"batches.classes": numbers[0], "batches.images": numbers[1]}


@click.command()
@click.option("--preset", metavar="NAME", help="Start from a preset; see dmltool list presets.")
@click.option("--config", "file", metavar="FILE", help="Start from a TOML file of settings.")
@click.option(
    "--dataset", metavar="NAME", help="Data set; see dmltool list datasets.  [default: glyphs]"
)
@click.option("--data", metavar="PATH", help="Folder with one folder per class, or a CSV table.")
@click.option("--loss", metavar="NAME", help="Loss; see dmltool list losses; also pml:NAME.")
@click.option(
    "--backbone", metavar="NAME", help="Backbone; see dmltool list backbones; also timm:NAME."
)
@click.option("--weights", metavar="NAME|FILE", help="Initial weights: imagenet, none, or a file.")
@click.option("--dim", type=click.IntRange(0), help="Embedding dimension; 0: the backbone's own.")
@click.option("--epochs", type=click.IntRange(1), help="Number of epochs.")
@click.option("--batch", type=Batch(), help="N random images, or C classes x M images: 128, 6x9.")
@click.option("--lr", type=float, help="Learning rate.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the run.")
@click.option(
    "--select",
    type=click.Choice(["val", "test", "last"]),
    help="How to choose the best epoch: val (held-out training classes), test (test set, as in "
    "many papers) or last (last epoch).  [default: val]",
)
@click.option("--monitor", metavar="NAME,...", help="Additional losses to log: spce, pce.")
@click.option(
    "--min-images", type=click.IntRange(1), help="Leave out training classes with fewer images."
)
@click.option("--skip-bad", is_flag=True, help="Leave out unreadable images, also in export.")
@click.option("--allow-incomplete", is_flag=True, help="Accept a data set with missing images.")
@click.option(
    "--cache",
    type=click.Choice(["none", "ram", "disk"]),
    help="Where to cache resized images.",
)
@click.option("--workers", type=click.IntRange(0), help="Number of processes that load images.")
@click.option("--device", help="cpu, cuda, cuda:1, mps, ...  [default: a GPU if there is one]")
@click.option(
    "--threads",
    type=click.IntRange(1),
    metavar="N",
    help="CPU threads.  [default: found by a short trial]",
)
@click.option(
    "--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Precision of the network."
)
@click.option("--deterministic", is_flag=True, help="Make runs repeat exactly.")
@click.option("--compile", is_flag=True, help="Compile the network with torch.compile.")
@click.option("--tensorboard", is_flag=True, help="Also write logs for TensorBoard.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change any setting; see docs/settings.md.",
)
@click.option("--out", metavar="RUN", help="Folder of the run.  [default: runs/PRESET]")
@click.option(
    "--resume", metavar="RUN", help="Continue a run; with --epochs N, up to N epochs in total."
)
@click.option("--dry-run", is_flag=True, help="Print the settings as TOML and stop.")
@json_option
def train(
    preset: str | None,
    file: str | None,
    settings: tuple[str, ...],
    out: str | None,
    resume: str | None,
    dry_run: bool,
    as_json: bool,
    allow_incomplete: bool,
    **given: Any,
) -> None:
    """Train an embedding network: CE, SPCE, Group Loss and others.

    Without options it trains on letters drawn from fonts: no download, about two minutes. It
    writes checkpoints (best.pt, last.pt), config.toml, metrics.jsonl, curves.png and result.json
    to the run folder.

    \b
    Examples:
      dmltool train
      dmltool train --preset cub-ce --data CUB_200_2011
      dmltool train --data photos --loss group --batch 6x4
      dmltool train --resume runs/cub-ce
      torchrun --nproc-per-node=4 -m cli train --preset sop-ce --data SOP
    """
    if resume and (preset or file or out):
        raise click.UsageError(
            "--resume continues a run as it was: no --preset, --config or --out."
        )
    flags = _flags(**given)
    if allow_incomplete:
        settings = (*settings, "data.options.allow_incomplete=true")
    folder = Path(out) if out else None
    if resume:
        config, folder = _resumed(Path(resume), flags, settings)
        name = folder.name
    else:
        config, name = _resolved(preset, Path(file) if file else None, flags, settings)
    if dry_run:
        from trainer.validate import check_names

        check_names(config)
        click.echo(config.to_toml(), nl=False)
        return
    result = _run(config, folder, name, bool(resume))
    if result is None:  # another process of the same run shows it
        return
    if as_json:
        print_json(result)
        return
    from trainer.tables import result_table

    stdout_console().print(result_table(result))
    next_step("export", result["run"])


def _flags(batch: dict[str, int] | None, monitor: str | None, **given: Any) -> dict[str, Any]:
    """Return dotted keys of the configuration for the options that were given."""
    flags = {
        FLAGS[name]: value
        for name, value in given.items()
        if value is not None and value is not False  # 0 is a value
    }
    if monitor:
        flags["loss.monitor"] = [part.strip() for part in monitor.split(",")]
    return flags | (batch or {})


def _resumed(run: Path, flags: dict[str, Any], settings: tuple[str, ...]) -> tuple[Config, Path]:
    """Return the settings of an interrupted run, and its folder."""
    from trainer.resolve import resumed
    from trainer.run.checkpoint import load_config

    folder = run.parent if run.is_file() else run
    return resumed(load_config(folder), flags, settings, OPTION_OF), folder


def _resolved(
    preset: str | None, file: Path | None, flags: dict[str, Any], settings: tuple[str, ...]
) -> tuple[Config, str]:
    """Return the settings of a new run, and its name."""
    from trainer.resolve import needs_weights, preset_path, resolve, starting_preset

    config, name = resolve(preset, file, flags, settings, OPTION_OF)
    start = str(file or preset or starting_preset(flags, settings))
    if not preset and not file:
        tell(f"Settings of the preset {start}; --dry-run shows them")
    if config.network.weights == "none" and needs_weights(file or preset_path(start)):
        warn(
            f"The settings of {start} are for pretrained weights. Own images without any "
            "learn with --preset photos-scratch-ce"
        )
    return config, name


def _run(config: Config, folder: Path | None, name: str, resume: bool) -> dict | None:
    """Train and show it on stderr. Without a folder, the run gets a new one called `name`."""
    from trainer.tables import Display

    with Display(safe_console(stderr=True)) as watch:
        from trainer.run.folder import FolderTaken
        from trainer.run.train import train

        while True:
            target = folder or new_folder(Path("runs"), name)
            try:
                return train(config, target, watch, resume=resume)
            except FolderTaken:
                if folder:
                    raise  # else another run, started at the same moment, has taken the name
            except KeyboardInterrupt:
                watch.interrupted(target)
                raise click.exceptions.Exit(interrupts.INTERRUPTED) from None


def new_folder(parent: Path, name: str) -> Path:
    """Return PARENT/NAME, or PARENT/NAME-2 and so on where that is taken."""
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def listing(kind: str) -> dict[str, str]:
    """The summary of each entry of a table by its name. Nothing heavy is imported."""
    from trainer.data.datasets import DATASETS
    from trainer.losses import LOSSES
    from trainer.networks.backbones import BACKBONES
    from trainer.resolve import preset_names, preset_summary

    if kind == "presets":
        return {name: preset_summary(name) for name in preset_names()}
    tables: dict[str, Registry[Any]] = {
        "losses": LOSSES,
        "datasets": DATASETS,
        "backbones": BACKBONES,
    }
    return tables[kind].summaries()


@click.command("list")
@click.argument("kind", type=click.Choice(["presets", "losses", "datasets", "backbones"]))
@json_option
def list_command(kind: str, as_json: bool) -> None:
    """List the presets, losses, data sets or backbones of train.

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
@click.argument("file", metavar="FILE")
@click.option(
    "--compare",
    "others",
    multiple=True,
    metavar="FILE",
    help="File of the same items to compare with; may be repeated.",
)
@click.option("--run", metavar="RUN", help="Run folder, for training curves and images.")
@click.option(
    "--images", metavar="ROOT", help="Folder of the images; the paths in FILE are relative to it."
)
@click.option(
    "--out", metavar="FILE", default="report.html", show_default=True, help="Page to write."
)
@click.option(
    "--distance",
    type=click.Choice(["l2", "cos"]),
    default="cos",
    show_default=True,
    help="Distance for neighbours, confused classes and the map; scores show both.",
)
@gallery_options
@click.option(
    "--nmi/--no-nmi",
    default=None,
    help="Compute NMI and AMI by k-means.  [default: if it takes less than 30 s]",
)
@click.option(
    "--map",
    type=click.Choice(["tsne", "pca", "none"]),
    default="tsne",
    show_default=True,
    help="Method of the 2-D map, which shows up to 2,000 queries.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the random samples and of the map.",
)
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
    from retrieval.files import check_target
    from retrieval.formats.opening import Sources
    from retrieval.loading import load
    from retrieval.reporting.report import report as write_report
    from trainer.reporting import Folder, pictures_of, run_view

    sources = Sources(file, gallery, labels, gallery_labels, *others)
    folder, root = (Path(path) if path else None for path in (run, images))
    inputs = [folder / "config.toml", folder / "metrics.jsonl"] if folder else []
    target = check_target(out, force, [*sources.files, *inputs])
    with ProgressBar() as progress:
        data = load(file, labels=labels, gallery=gallery, gallery_labels=gallery_labels)
        pictures, note = pictures_of(data, root, folder)
        if root is None and isinstance(pictures, Folder):
            tell(f"Images from {pictures.root}")
        found = write_report(
            data,
            target,
            compare_with=[
                load(name, labels=labels, gallery_labels=gallery_labels) for name in others
            ],
            pictures=pictures,
            run_view=run_view(folder) if folder else None,
            notes=[note] if note else [],
            force=force,
            before_writing=sources.check_unchanged,
            progress=progress,
            **given,
        )
    for line in found.warnings:
        warn(line)
    click.echo(str(target))
    say_next(f"open {target} in a browser")
