"""Declare the options of the commands that train, and convert them to settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval.console import tell, warn
from retrieval.distributed.world import from_environment
from retrieval.options import PATH, FieldChoice, options, whole_option

if TYPE_CHECKING:
    from trainer.config import Config

# Options of `dmltool train` that are called as the key of the configuration that they set.
SAME_NAME = {
    "data": ("dataset", "min_images", "skip_bad", "cache", "workers"),
    "network": ("backbone", "weights", "dim"),
    "loss": ("miner", "monitor"),
    "optimizer": ("lr",),
    "run": ("seed", "select", "device", "threads", "precision", "deterministic", "compile", "log"),
}
FLAGS = {name: f"{table}.{name}" for table, names in SAME_NAME.items() for name in names}
FLAGS |= {"data": "data.root", "loss": "loss.name", "epochs": "schedule.epochs"}

LISTS = {"loss.monitor", "run.log"}  # names with commas between them

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


settings_options = options(
    click.option("--preset", metavar="NAME", help="Start from a preset; see dmltool list presets."),
    click.option(
        "--config", "file", type=PATH, metavar="FILE", help="Start from a TOML file of settings."
    ),
    click.option(
        "--dataset", metavar="NAME", help="Data set; see dmltool list datasets.  [default: glyphs]"
    ),
    click.option(
        "--data",
        type=PATH,
        metavar="PATH",
        help="Folder of the data set, or a CSV table of images.",
    ),
    click.option("--loss", metavar="NAME", help="Loss; see dmltool list losses, or pml:NAME."),
    click.option(
        "--miner", metavar="NAME", help="Miner of pairs or triplets; see dmltool list miners."
    ),
    click.option(
        "--backbone", metavar="NAME", help="Backbone; see dmltool list backbones, or timm:NAME."
    ),
    click.option(
        "--weights",
        type=PATH,
        metavar="NAME|FILE",
        help="Initial weights: imagenet, none, or a file.",
    ),
    whole_option("--dim", "Embedding dimension; 0: that of the backbone.", 0),
    whole_option("--epochs", "Number of epochs."),
    click.option(
        "--batch",
        type=Batch(),
        metavar=Batch.name,
        help="N random images, or C classes x M images: 128, 6x9.",
    ),
    click.option("--lr", type=float, help="Learning rate."),
    whole_option("--seed", "Seed of the run.", 0),
    click.option(
        "--select",
        type=FieldChoice("trainer.config:Run", "select"),
        help="How to choose the best epoch. val: on a tenth of the training classes, which are "
        "held out; test: on the test set, as the papers do; last: the last epoch.  [default: val]",
    ),
    click.option(
        "--monitor", metavar="NAME,...", help="Additional losses to log, such as spce,pce."
    ),
    whole_option("--min-images", "Leave out training classes with fewer images than this."),
    click.option("--skip-bad", is_flag=True, help="Leave out unreadable images, also in export."),
    click.option("--allow-incomplete", is_flag=True, help="Accept a data set with missing images."),
    click.option(
        "--cache",
        type=FieldChoice("trainer.config:Data", "cache"),
        help="Where to cache resized images; auto: ram if they are not files of their own.",
    ),
    click.option(
        "--device",
        metavar="DEVICE",
        help="Device: cpu, cuda, cuda:1, mps, ...  [default: a GPU if there is one]",
    ),
    whole_option("--threads", "Number of CPU threads.  [default: a short trial chooses]"),
    click.option(
        "--precision",
        type=FieldChoice("trainer.config:Run", "precision"),
        help="Precision of the network; auto: bf16 on GPUs that support it, else fp32.",
    ),
    click.option(
        "--deterministic", is_flag=True, help="Make repeated runs give identical results."
    ),
    click.option("--compile", is_flag=True, help="Compile the network with torch.compile."),
    click.option(
        "--log",
        metavar="NAME,...",
        help="Send metrics to trackers too: tensorboard, mlflow, wandb.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change any setting; see docs/settings.md.",
    ),
)
"""The options that say what is trained, from --preset to --set."""


@dataclass(frozen=True)
class Start:
    """What a run is made of: a preset or a file, flags by dotted key, `table.key=value`."""

    preset: str | None = None
    file: Path | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()


def start_of(
    preset: str | None,
    file: str | None,
    settings: tuple[str, ...],
    batch: dict[str, int] | None,
    allow_incomplete: bool,
    **given: Any,
) -> Start:
    """Return what the options of `settings_options` say."""
    flags = {
        FLAGS[name]: value
        for name, value in given.items()
        if value is not None and value is not False  # 0 is a value
    }
    for key in LISTS & flags.keys():
        flags[key] = [part.strip() for part in flags[key].split(",")]
    if allow_incomplete:
        settings = (*settings, "data.options.allow_incomplete=true")
    return Start(preset, Path(file) if file else None, flags | (batch or {}), settings)


def resolved(start: Start) -> tuple[Config, str]:
    """Return the settings of a new run, and its name."""
    from trainer.resolve import (
        needs_weights,
        own_images_preset,
        parsed,
        preset_path,
        resolve,
        starting_preset,
    )

    preset, file = start.preset, start.file
    config, name = resolve(preset, file, start.flags, start.settings, OPTION_OF)
    source = str(file or preset or starting_preset({**start.flags, **parsed(start.settings)}))
    if from_environment().rank:
        return config, name  # the first process prints the notes
    if not preset and not file:
        tell(f"Settings of the preset {source}; --dry-run shows them")
    if config.network.weights == "none" and needs_weights(file or preset_path(source)):
        warn(
            f"The settings of {source} are for pretrained weights. Own images without any "
            f"learn with --preset {own_images_preset(pretrained=False)}"
        )
    return config, name
