"""The commands export and embed. What they call is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter.embedding import BACKENDS
from exporter.onnx import INPUTS, LAYOUTS, PRECISIONS, PROVIDERS
from retrieval.console import (
    ProgressBar,
    next_step,
    on_interrupt,
    print_json,
    resumable,
    several_processes,
    stdout_console,
    tell,
    warn,
)
from retrieval.embeddings import SPLITS
from retrieval.options import (
    PATH,
    FieldChoice,
    Numbers,
    choice_option,
    device_option,
    force_option,
    json_option,
    options,
    whole_option,
)

if TYPE_CHECKING:
    from exporter.results import EmbeddingsResult
    from retrieval.distributed.world import World


SHARDS = Path("shards")  # a folder to collect shards in


three_numbers = Numbers("R,G,B", "three numbers such as 0.485,0.456,0.406", float, 3)
colour = Numbers(
    "R,G,B", "three whole numbers from 0 to 255 such as 255,255,255", int, 3, low=0, high=255
)
shard = Numbers("K/N", "a shard such as 2/8, the second of eight", int, 2, low=1, separator="/")
embedding_options = options(
    click.option(
        "--split",
        "splits",
        multiple=True,
        type=click.Choice(SPLITS),
        help="Split to embed; may be repeated.  [default: test, or query and gallery; all images "
        "of a data set without splits]",
    ),
    choice_option(
        "--provider",
        PROVIDERS,
        "Execution provider of ONNX Runtime; auto: CUDA if it works, else CPU.",
    ),
    whole_option("--threads", "Number of CPU threads.  [default: a short trial chooses]"),
    device_option("Device that finds neighbours (export) and counts ranks for --half"),
    whole_option("--batch-size", "Images per batch.", default=32),
    click.option(
        "--shard",
        type=shard,
        callback=lambda _ctx, _param, given: given or (1, 1),
        help="Embed only part K of N of the images, for machines without a shared disk. `eval` "
        "reads a folder of all N files; export writes embeddings-K-of-N.h5.",
    ),
    click.option(
        "--half", is_flag=True, help="Store embeddings as float16 and show the effect on Recall@1."
    ),
    click.option(
        "--skip-bad",
        is_flag=True,
        help="Leave out unreadable images. export always does so if train did.",
    ),
    click.option("--resume", is_flag=True, help="Continue an interrupted export or embed."),
    force_option,
    json_option,
)


@click.command()
@click.argument("runs", type=PATH, metavar="RUN...", nargs=-1, required=True)
@click.option("--onnx/--no-onnx", default=True, help="Write model.onnx.  [default: yes]")
@click.option(
    "--embeddings/--no-embeddings", default=True, help="Write embeddings.h5.  [default: yes]"
)
@choice_option(
    "--precision",
    PRECISIONS,
    "Precision of the model; int8 is calibrated on training images.",
)
@click.option("--normalize", is_flag=True, help="Scale embeddings to length 1 inside the model.")
@choice_option(
    "--input",
    INPUTS,
    "Type and layout of the input; the model normalises it in both cases.",
)
@click.option(
    "--max-recall-drop",
    type=float,
    metavar="POINTS",
    help="Largest accepted drop of Recall@1, in points.  [default: 0.1, fp16 0.5, int8 1.0]",
)
@choice_option("--backend", BACKENDS, "Compute the embeddings with the ONNX model or with torch.")
@click.option("--data", type=PATH, metavar="PATH", help="Folder of the data set, if it has moved.")
@click.option(
    "--out", type=PATH, metavar="FOLDER", help="Output folder.  [default: the folder of the run]"
)
@embedding_options
@several_processes
def export(
    runs: tuple[str, ...], out: str | None, as_json: bool, world: World, **given: Any
) -> None:
    """Export a trained run as a checked model.onnx and embeddings.h5.

    The ONNX model is compared with the trained network on real and random images: embeddings,
    nearest neighbours and Recall@1. If they differ too much, the command fails and no model is
    written. Several runs become one ensemble model, which concatenates their embeddings.

    \b
    Examples:
      dmltool export runs/glyphs-ce
      dmltool export runs/glyphs-ce --precision int8 --no-embeddings --force
      dmltool export runs/a runs/b runs/c --out ensemble
    """
    from exporter.exporting import Settings, embeddings_name, output_folder
    from exporter.exporting import export as run_export
    from exporter.tables import export_tables
    from retrieval.run_files import MODEL

    folder = output_folder([Path(run) for run in runs], Path(out) if out else None)
    rows = folder / embeddings_name(given["shard"])
    left = resumable(folder / MODEL, Path(f"{rows}.partial"), resume=given["resume"])
    with on_interrupt(left), ProgressBar() as report:
        result = run_export(runs, folder, Settings(**given), report, world)
    if world.rank:
        return
    written = result.get("embeddings")
    by = written["run_by"] if written else result["model"].get("provider_why", "")
    _tell_embedding(by, written, result.get("threads"))
    for note in result["notes"]:
        warn(note)
    if as_json:
        print_json(result)
        return
    stdout_console().print(export_tables(result))
    if given["embeddings"]:
        _next_eval(rows, SHARDS, given["shard"][1])
    else:
        next_step("embed", folder / MODEL, "photos", "--out", "photos.h5")


@click.command()
@click.argument("model", type=PATH, metavar="MODEL.onnx")
@click.argument("data", type=PATH, metavar="DATA")
@click.option(
    "--out", type=PATH, metavar="FILE", required=True, help="Embedding file to write (.h5)."
)
@whole_option("--size", "Side of the square input, in pixels.")
@whole_option("--resize", "Short side before cropping, in pixels.  [default: --size]")
@click.option("--squash", is_flag=True, help="Resize to a square instead of cropping.")
@click.option(
    "--interpolation",
    type=FieldChoice("trainer.config:Input", "interpolation"),
    help="Resizing filter.  [default: bilinear]",
)
@click.option("--mean", type=three_numbers, help="Mean to subtract, for colours from 0 to 1.")
@click.option("--std", type=three_numbers, help="Standard deviation to divide by.")
@click.option(
    "--scale",
    type=click.Choice(["1", "255"]),
    callback=lambda _ctx, _param, value: value and int(value),
    help="255 if --mean and --std are for colours from 0 to 255.  [default: 1]",
)
@click.option("--bgr", is_flag=True, help="Pass channels as BGR; --mean and --std stay R,G,B.")
@click.option(
    "--background", type=colour, help="Colour behind transparent pixels.  [default: white]"
)
@click.option("--no-draft", is_flag=True, help="Decode large JPEGs at full size.")
@click.option("--layout", type=click.Choice(LAYOUTS), help="Order of the input axes.")
@click.option("--output-name", metavar="NAME", help="Output that holds the embeddings.")
@embedding_options
@several_processes
def embed(model: str, data: str, out: str, as_json: bool, world: World, **given: Any) -> None:
    """Embed images with an ONNX model of dmltool or another program.

    DATA is a folder with one folder per class, a CSV table with the columns path and label,
    `glyphs`, or a data set as NAME:FOLDER, such as cub:CUB_200_2011. `photos` embeds all images of
    the folder. `folder:photos` splits the classes as `train` does and embeds the test split, or the
    split given by --split (val: the classes that the model's training held out, which are not in
    train). Labels are optional: DATA may be a folder of images or a table with only paths. Models
    exported by dmltool contain their preprocessing. For other models, pass --size, --mean and
    --std.

    \b
    Examples:
      dmltool embed runs/glyphs-ce/model.onnx photos --out photos.h5
      dmltool embed model.onnx folder:photos --split train --out train.h5
      dmltool embed net.onnx photos --out p.h5 --mean .5,.5,.5 --std .5,.5,.5
      torchrun --nproc-per-node=8 -m cli embed model.onnx photos --out photos.h5
    """
    from exporter.embedding.embed import embed as run_embed
    from exporter.tables import embeddings_table

    left = resumable(Path(f"{out}.partial"), resume=given["resume"])
    with on_interrupt(left), ProgressBar() as report:
        result = run_embed(model, data, out, progress=report, world=world, **given)
    if world.rank:
        return
    _tell_embedding(result["run_by"], result)
    if as_json:
        print_json({"embeddings": result})
        return
    stdout_console().print(embeddings_table(result))
    labels = [] if result["labelled"] else ["--labels", "labels.txt"]
    here = Path(out).parent.resolve() == Path.cwd()
    _next_eval(Path(out), SHARDS if here else Path(out).parent, given["shard"][1], *labels)


def _next_eval(file: Path, folder: Path, shards: int, *options: str) -> None:
    """Name the evaluation of a file; one of several shards is evaluated with the others."""
    if shards > 1:
        tell(f"Collect all {shards} shards in one folder, such as {folder}.")
    next_step("eval", folder if shards > 1 else file, *options)


def _tell_embedding(
    by: str, found: EmbeddingsResult | None = None, threads: str | None = None
) -> None:
    """Say on stderr what computed the embeddings and which images were left out."""
    if by:
        tell(f"Runs on {by}")
    if threads:
        tell(f"With {threads}")
    if found is None:
        return
    for note in found.get("notes", ()):
        warn(note)
    for path, reason in found["skipped"]:
        warn(f"left out: {path}: {reason}")
