"""`export`: write model.onnx and embeddings.h5 for a run, and check that they retrieve alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from exporter import networks, parity
from exporter.embedding import BACKENDS
from exporter.embedding.engine import Engine, onnx_engine, own_processors
from exporter.embedding.writing import EmbedSettings, embed, told
from exporter.image_samples import calibration_images, comparison_images
from exporter.networks import Member, Together
from exporter.onnx import INPUTS, PRECISIONS, metadata, precision, trace
from exporter.onnx.metadata import Preprocessing
from exporter.onnx.model import Model
from exporter.onnx.session import TimedSession
from exporter.results import (
    EXPORT,
    EmbeddingsResult,
    ExportResult,
    ModelResult,
    ParityResult,
    PrecisionResult,
)
from retrieval.console import to_json
from retrieval.distributed.processes import agree
from retrieval.distributed.world import ALONE, World
from retrieval.errors import DmlError
from retrieval.files import (
    Kind,
    check_target,
    made_folder,
    remove_scratch_folders,
    scratch_folder,
    write_text,
)
from retrieval.formats.hdf5.writing import KIND
from retrieval.formats.shard_sets import part_name
from retrieval.ranking.backends.choice import require_device
from retrieval.resources import StageProgress
from retrieval.run_files import EMBEDDINGS, MODEL
from retrieval.settings import one_of, within
from trainer.data.datasets import DataSet
from trainer.data.datasets.splitting import chosen_splits
from trainer.run.device import use_threads

FORM = ("precision", "normalize", "input")  # settings that say what the model is like
SCRATCH = ".export-"  # how the names of folders begin that an export works in


@dataclass(frozen=True)
class Settings(EmbedSettings):
    """How to export; the settings of embedding apply to embeddings.h5."""

    onnx: bool = True
    """Write model.onnx."""
    embeddings: bool = True
    """Write embeddings.h5."""
    precision: str = one_of(*PRECISIONS, default=PRECISIONS[0])
    input: str = one_of(*INPUTS, default=next(iter(INPUTS)))
    normalize: bool = False
    """Embeddings of length 1."""
    backend: str = one_of(*BACKENDS, default=BACKENDS[0])
    """What computes embeddings.h5: onnx or torch."""
    max_recall_drop: float | None = within(0, 100, default=None)
    """Points of Recall@1 that the model may lose; None: depends on the precision."""
    data: str | Path | None = None
    """Where the data set is now, if it has moved."""


@dataclass(frozen=True)
class Job:
    """Everything that the steps of one export share."""

    members: Sequence[Member]
    network: Together
    data: DataSet
    splits: dict[str, np.ndarray]
    """Rows to embed by split."""
    folder: Path
    settings: Settings
    progress: StageProgress | None
    world: World = ALONE

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing.from_checkpoint(self.members[0].state, self.settings.input)


def export(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    settings: Settings | None = None,
    progress: StageProgress | None = None,
    world: World = ALONE,
    **changes: Any,
) -> ExportResult:
    """Write a checked model.onnx, and embeddings.h5 of the test set.

    Parameters
    ----------
    runs : str, Path or sequence of them
        Run folders or checkpoints. Several become one model, whose embeddings are theirs side by
        side.
    out : str or Path, optional
        The output folder. Default: the folder of the run.
    settings : Settings, optional
        How to export.
    progress : function, optional
        Called with (stage, done, total).
    world : World, optional
        The processes that share the images of embeddings.h5; all of them call this. Rank 0 writes
        and checks the model, while the others wait.
    changes
        Fields of `Settings` that replace those of `settings`: onnx, precision, half, force, ...

    Returns
    -------
    dict
        What was compared and written; export.json in the output folder holds it too.
    """
    settings = replace(settings or Settings(), **changes)
    paths = [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)]
    job = prepare(paths, None if out is None else Path(out), settings, progress, world)
    result: ExportResult = {
        "runs": [str(path) for path in paths],
        "folder": str(job.folder),
        "notes": [note for member in job.members if (note := networks.unfinished(member))],
    }
    before = torch.get_num_threads()
    try:
        job, note = with_threads(job)
        if note:
            result["threads"] = note
        with made_folder(job.folder):
            write_files(job, result)
    finally:
        torch.set_num_threads(before)
    if world.rank == 0:
        write_text(job.folder / EXPORT, to_json(result), force=True)
    return result


def prepare(
    paths: Sequence[Path],
    out: Path | None,
    settings: Settings,
    progress: StageProgress | None,
    world: World,
) -> Job:
    """Check what can be checked before the long work, and load the networks and their data."""
    if not (settings.onnx or settings.embeddings):
        raise DmlError(
            "There is nothing to export.",
            "--no-onnx and --no-embeddings exclude both files.",
            "Leave one of them out.",
        )
    require_device(settings.device)
    folder = output_folder(paths, out)
    members = [networks.load_member(path) for path in paths]
    if world.rank == 0 and folder.exists():  # the others would find its files
        check_targets(folder, paths, settings)
    networks.check_same_images(members)
    data = networks.load_training_data(members[0], settings.data)
    splits = chosen_splits(data, settings.splits)
    if all(member.config.data.skip_bad for member in members):  # as in the training
        settings = replace(settings, skip_bad=True)
    network = Together([member.embedder for member in members], settings.normalize)
    return Job(members, network, data, splits, folder, settings, progress, world)


def with_threads(job: Job) -> tuple[Job, str]:
    """The job with a number of threads, which torch takes over; a note on it, if there is one."""
    threads = job.settings.threads or own_processors(job.world)
    note = use_threads(job.network, job.members[0].config.input.crop, threads or 0)
    if note:  # ONNX Runtime gets the same number
        threads = torch.get_num_threads()
    return replace(job, settings=replace(job.settings, threads=threads)), note


def write_files(job: Job, result: ExportResult) -> None:
    """Write the model and the embeddings, as far as they are wanted, and add them to the result."""
    model = None
    if job.settings.onnx and job.world.rank == 0:
        model, result["model"] = export_model(job)
    agree(False, job.world)  # the others wait for the model
    if job.settings.embeddings:
        result["embeddings"] = export_embeddings(job, model)


def output_folder(runs: Sequence[Path], out: Path | None) -> Path:
    """The folder that an export of these runs writes to."""
    if out is None:
        if len(runs) > 1:
            raise DmlError(
                "An ensemble has no folder of its own.",
                f"{len(runs)} runs become one model.",
                "Name a folder: --out FOLDER",
            )
        out = runs[0] if runs[0].is_dir() else runs[0].parent
    if out.exists() and not out.is_dir():
        raise DmlError(
            f"{out} is a file.",
            "An export writes several files into a folder.",
            "Name a folder: --out FOLDER",
        )
    return out


def embeddings_name(shard: tuple[int, int]) -> str:
    """The name of the embeddings that an export writes: of all images, or of a shard."""
    return part_name(EMBEDDINGS, *shard)


def check_targets(folder: Path, runs: Sequence[Path], settings: Settings) -> None:
    """Raise a DmlError if a file that will be written must not be overwritten."""
    models = Kind("an ONNX model", (".onnx",), rb"\x08")
    rows = embeddings_name(settings.shard)
    written = ((MODEL, models, settings.onnx), (rows, KIND, settings.embeddings))
    for name, kind, wanted in written:
        if wanted:
            check_target(folder / name, kind, settings.force or settings.resume, runs)


# The model


def export_model(job: Job) -> tuple[Model, ModelResult]:
    """Compare the model with the network and write model.onnx; return the model and its result."""
    settings, target = job.settings, (job.folder / MODEL).resolve()
    if settings.resume and target.exists():
        remove_scratch_folders(job.folder, SCRATCH)  # killed just after the model got its name
        wanted = {name: getattr(settings, name) for name in FORM}
        model = networks.existing_model(target, job.members, **wanted)
        return model, networks.earlier_result(model, target.with_name(EXPORT)) or _summary(model)
    images = comparison_images(job.data, job.preprocessing, settings.precision, settings.skip_bad)
    with scratch_folder(job.folder, SCRATCH) as folder:
        plain = write_plain(job, folder / "fp32.onnx")
        made = at_precision(job, plain, settings.precision)
        session = TimedSession(made, settings.provider, settings.threads)
        found = parity.check(
            job.network, session.run, *images, device=settings.ranking_device, progress=job.progress
        )
        parity.judge(found, settings.precision, settings.max_recall_drop)
        if made is plain:  # the comparison has measured all that the table shows
            size, speed = plain.path.stat().st_size, session.images_per_second
            rows = [precision.row("fp32", size, speed, found["recall_onnx"], 0.0)]
        else:
            rows = compare_precisions(job, plain, made, images)
        compared = metadata.to_properties({"parity": found})
        model = trace.save(made.load(), target, made.properties | compared)
    result: ModelResult = {**_summary(model), "precisions": rows}
    return model, {**result, "provider": session.provider, "provider_why": session.why}


def _summary(model: Model) -> ModelResult:
    own = model.metadata
    assert own is not None, "dmltool has written it"
    return {
        "path": str(model.path),
        "bytes": model.path.stat().st_size,
        "sha256": model.sha256,
        "dim": model.dim,
        "precision": own.precision,
        "normalized": own.normalized,
        "parity": cast(ParityResult, own.parity),
        "precisions": [],
    }


def write_plain(job: Job, path: Path) -> Model:
    """Write the float32 model."""
    if job.progress:
        job.progress("tracing the network", 0, 1)
    settings = job.settings
    alone = [
        metadata.describe_checkpoint(
            m.state, m.sha256, m.embedder.dim, settings.input, settings.normalize
        )
        for m in job.members
    ]
    said, network = alone[0], job.network
    if len(alone) > 1:  # each member as it is exported alone: this decides the last bits
        each = [Together([member.embedder], settings.normalize) for member in job.members]
        said, network = metadata.describe_ensemble(alone), Together(each, settings.normalize)
    size, properties = job.preprocessing.crop, metadata.to_properties(said)
    return trace.write_model(network, path, size=size, properties=properties, input=settings.input)


def at_precision(job: Job, plain: Model, name: str) -> Model:
    """Convert the float32 model to a precision, beside it."""
    target = plain.path.with_name(f"{name}.onnx")
    if name == "fp16":
        return precision.to_fp16(plain, target)
    if name == "int8":
        images = calibration_images(job.data, job.preprocessing, job.settings.skip_bad)
        return precision.to_int8(plain, target, images, job.progress)
    return plain


def compare_precisions(
    job: Job, plain: Model, made: Model, images: tuple[np.ndarray, np.ndarray]
) -> list[PrecisionResult]:
    """Compare all precisions, also the one that was not requested."""
    settings = job.settings
    models = {"fp32": plain, settings.precision: made}
    other = "fp16" if settings.precision == "int8" else "int8"
    with suppress(DmlError):  # the table goes without it
        models[other] = at_precision(job, plain, other)
    return precision.compare(
        {name: models[name] for name in ("fp32", "fp16", "int8") if name in models},
        *images,
        provider=settings.provider,
        threads=settings.threads,
        device=settings.ranking_device,
        progress=job.progress,
    )


# The embeddings


def export_embeddings(job: Job, model: Model | None) -> EmbeddingsResult:
    """Write embeddings.h5 with the model of this export or an earlier one, or with torch."""
    members, settings = job.members, job.settings
    if settings.backend == "torch":
        engine = torch_engine(job)
    else:
        if model is None:
            chosen = {name: getattr(settings, name) for name in FORM}  # unlike the defaults
            wanted = {name: v for name, v in chosen.items() if v != getattr(Settings, name)}
            model = networks.existing_model(job.folder / MODEL, members, **wanted)
        engine = onnx_engine(model, settings.provider, settings.threads)
    attrs = engine.attrs | {
        "checkpoint_sha256": ",".join(member.sha256 for member in members),
        "loss": ",".join(member.config.loss.name for member in members),
    }
    engine = replace(engine, attrs=attrs)
    target = job.folder / embeddings_name(settings.shard)
    found = embed(
        engine, job.data, job.splits, target, settings, progress=job.progress, world=job.world
    )
    return told(found, engine.why)


def torch_engine(job: Job) -> Engine:
    attrs = {
        "model": job.members[0].path.name,
        "model_sha256": ",".join(member.sha256 for member in job.members),
        "normalized": job.settings.normalize,
        "backend": "torch",
    }
    run = parity.torch_runner(job.network)
    return Engine(run, job.network.dim, job.preprocessing, attrs, "torch")
