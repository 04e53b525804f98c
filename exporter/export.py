"""`export`: from a run to model.onnx and embeddings.h5, shown to retrieve like the network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from exporter import parity
from exporter.embedding.decoding import side_by_side
from exporter.embedding.writing import embed
from exporter.onnx import ensemble, precision, trace
from exporter.onnx.metadata import INPUTS, Preprocessing, describe_checkpoint, to_properties
from exporter.onnx.model import Model, describe
from exporter.onnx.session import Session
from retrieval.errors import DmlError
from retrieval.files import check_target, claim, is_at, lock, write_text
from retrieval.resources import StageProgress
from trainer.config import Config
from trainer.data.datasets import DataSet
from trainer.data.source import Source
from trainer.data.transforms import for_testing
from trainer.networks.embedder import Embedder
from trainer.resolve import from_dict
from trainer.run import checkpoint
from trainer.run.setup import load_data, load_embedder
from trainer.run.threads import use_threads

MODEL, EMBEDDINGS, RESULT = "model.onnx", "embeddings.h5", "export.json"
COMPARED = {"fp32": 500, "fp16": 1000, "int8": 1000}
"""Images of the parity check, up to 96 pixels; float32 differs in the sixth digit or is wrong."""
COMPARED_LARGE = 128
"""Of larger ones, which take longer."""
CALIBRATION = 128


@dataclass(frozen=True)
class Settings:
    """How to export."""

    onnx: bool = True
    embeddings: bool = True
    splits: tuple[str, ...] = ()
    """Of the data set; none: test, or query and gallery."""
    precision: str = "fp32"
    input: str = "uint8-nhwc"
    normalize: bool = False
    backend: str = "onnx"
    provider: str = "auto"
    threads: int | None = None
    """Of torch and of ONNX Runtime on a CPU; None: a short trial chooses."""
    batch_size: int = 32
    max_recall_drop: float | None = None
    """Points of Recall@1; None: by precision."""
    half: bool = False
    data: str | None = None
    """Where the data set is now, if it has moved."""
    skip_bad: bool = False
    force: bool = False
    resume: bool = False


@dataclass(frozen=True)
class Member:
    """A trained network and what its checkpoint says of it."""

    path: Path
    sha256: str
    state: dict[str, Any]
    config: Config
    embedder: Embedder


class Together(nn.Module):
    """Several networks as one: their embeddings l2-normalised, side by side.

    normalize: all of it of length 1 as well, not only each part.
    """

    def __init__(self, members: Sequence[Embedder], normalize: bool = False) -> None:
        super().__init__()
        self.length = len(members) ** 0.5 if normalize else 1.0
        self.members = nn.ModuleList(members)
        self.register_buffer("pixel_mean", members[0].pixel_mean)
        self.dim = sum(member.dim for member in members)

    def forward(self, images: Tensor) -> Tensor:
        parts = [nn.functional.normalize(member(images)) for member in self.members]
        return torch.cat(parts, dim=1) / self.length


def export(
    runs: Sequence[Path],
    out: Path | None = None,
    settings: Settings | None = None,
    progress: StageProgress | None = None,
) -> dict[str, Any]:
    """Writes OUT/model.onnx and OUT/embeddings.h5; several runs become one model.

    OUT is the folder of the run by default. The result says what was compared and written, and is
    kept as OUT/export.json.
    """
    settings = settings or Settings()
    if not (settings.onnx or settings.embeddings):
        raise DmlError(
            "There is nothing to export.",
            "--no-onnx and --no-embeddings leave nothing.",
            "Leave one of them out.",
        )
    folder = output_folder(runs, out)
    if folder.exists() and all(run.exists() for run in runs):  # before long work
        check_targets(folder, runs, settings)
    members = [load_member(run) for run in runs]
    if all(member.config.data.skip_bad for member in members):  # as in the training
        settings = replace(settings, skip_bad=True)
    data = load_matching(members, settings.data)
    splits = chosen_splits(data, settings.splits)
    folder.mkdir(parents=True, exist_ok=True)
    targets = check_targets(folder, runs, settings)
    network = network_of(members, settings.normalize)
    result: dict[str, Any] = {"runs": [str(run) for run in runs], "folder": str(folder)}
    before = torch.get_num_threads()
    told = use_threads(network, members[0].config.input.crop, settings.threads or 0)
    if told:  # the number that was found serves ONNX Runtime too
        settings = replace(settings, threads=torch.get_num_threads())
        result["threads"] = told
    try:
        if settings.onnx:
            result["model"] = export_model(
                members, network, data, targets[MODEL], settings, progress
            )
        if settings.embeddings:
            result["embeddings"] = export_embeddings(
                members, network, data, splits, folder, settings, progress
            )
    finally:
        torch.set_num_threads(before)
    write_text(folder / RESULT, json.dumps(result, indent=2) + "\n", force=True)
    return result


# What is exported


def network_of(members: Sequence[Member], normalize: bool) -> Embedder | Together:
    """The network that is exported: one, or several side by side."""
    if len(members) == 1:
        return members[0].embedder
    return Together([member.embedder for member in members], normalize)


def output_folder(runs: Sequence[Path], out: Path | None) -> Path:
    if out is None:
        if len(runs) > 1:
            raise DmlError(
                "An ensemble has no folder of its own.",
                f"{len(runs)} runs become one model.",
                "Name one: --out FOLDER",
            )
        out = runs[0] if runs[0].is_dir() else runs[0].parent
    if out.exists() and not out.is_dir():
        raise DmlError(f"{out} is a file.", "Two files go into a folder.", "Name another: --out")
    return out


def check_targets(folder: Path, runs: Sequence[Path], settings: Settings) -> dict[str, Path]:
    return {
        name: check_target(folder / name, settings.force or settings.resume, runs)
        for name, wanted in ((MODEL, settings.onnx), (EMBEDDINGS, settings.embeddings))
        if wanted
    }


def load_member(run: Path) -> Member:
    """The best checkpoint of a run, or the checkpoint at a path."""
    path = run / checkpoint.BEST if run.is_dir() else run
    if run.is_dir() and not path.exists() and (run / checkpoint.LAST).exists():
        raise DmlError(
            f"{run} has no {checkpoint.BEST} yet.",
            "Its first epoch is not finished.",
            f"Go on: dmltool train --resume {run}, or name a checkpoint: {run / checkpoint.LAST}",
        )
    state = checkpoint.load(path)
    config = from_dict(state["config"], f"The configuration in {path}")
    if missing := asdict(config).keys() - state["config"].keys():
        raise DmlError(
            f"{path} is damaged.",
            f"Its configuration lacks {', '.join(sorted(missing))}, so its network is not known.",
            "Use another checkpoint, or train anew.",
        )
    state |= {"config": asdict(config)}  # with keys that an older one leaves to defaults
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Member(path, sha256, state, config, load_embedder(state))


def load_matching(members: Sequence[Member], root: str | None) -> DataSet:
    """The data set of the first, which all must have been trained on, as it was then."""
    first = members[0]
    for other in members[1:]:
        if other.state["label_names"] != first.state["label_names"]:
            raise DmlError(
                f"{first.path} and {other.path} were trained on different classes.",
                "The members of an ensemble embed the same images.",
            )
    config = first.config
    if root is not None:
        config = replace(config, data=replace(config.data, root=root))
    data = load_data(config)
    now = [data.label_names[c] for c in data.classes("train")]
    then = first.state["label_names"]
    if now != then:
        gone, new = sorted(set(then) - set(now))[:3], sorted(set(now) - set(then))[:3]
        raise DmlError(
            f"The data set {data.name} is not the one that {first.path} was trained on.",
            f"{len(then):,} training classes then, {len(now):,} now; gone: {gone}; new: {new}.",
            "Name the right place: --data PATH, or embed these images: dmltool embed",
        )
    return data


def chosen_splits(data: DataSet, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    """Rows by the name of their split; test, or query and gallery, unless others are named."""
    there = data.counts()
    names = list(wanted) or [s for s in ("test", "query", "gallery") if s in there]
    missing = [name for name in names if name not in there]
    if missing or not names:
        raise DmlError(
            f"{data.name} has no split {', '.join(missing) or 'to test on'}.",
            f"It has: {', '.join(there)}.",
            f"Choose one: --split {next(iter(there))}",
        )
    return {name: data.rows(name) for name in names}


# The model


class Timed:
    """A session that counts its images and seconds; its first run, which allocates, aside."""

    def __init__(self, session: Session) -> None:
        self.session, self.runs, self.images, self.seconds = session, 0, 0, 0.0

    def run(self, batch: np.ndarray) -> np.ndarray:
        start = time.perf_counter()
        found = self.session.run(batch)
        if self.runs:
            self.images += len(batch)
            self.seconds += time.perf_counter() - start
        self.runs += 1
        return found


def export_model(
    members: Sequence[Member],
    network: Embedder | Together,
    data: DataSet,
    target: Path,
    settings: Settings,
    progress: StageProgress | None,
) -> dict[str, Any]:
    """The model appears under its name only after it has been compared with the network."""
    if settings.resume and target.exists():
        return reused(members, target, settings)
    prepared = Preprocessing.from_checkpoint(members[0].state, settings.input)
    images, labels = compared_images(data, prepared, settings.precision, settings.skip_bad)
    with work_folder(target.parent) as folder:
        plain = folder / "fp32.onnx"
        write_plain(members, plain, settings, progress)
        made = at_precision(plain, settings.precision, data, prepared, settings, progress)
        session = Session(describe(made), settings.provider, settings.threads)
        normalize = settings.normalize and len(members) == 1  # an ensemble does it itself
        timed = Timed(session)
        found = parity.check(network, timed, images, labels, normalize=normalize, progress=progress)
        parity.judge(found, settings.precision, settings.max_recall_drop)
        if made == plain:  # all that there is to say of it was just seen
            speed = timed.images / timed.seconds
            rows = [precision.Row("fp32", plain.stat().st_size, speed, found.recall_onnx, 0.0)]
        else:
            paths = {"fp32": plain, settings.precision: made}
            other = "fp16" if settings.precision == "int8" else "int8"
            with suppress(DmlError):  # not asked for: it is in the table if it can be had
                paths[other] = at_precision(plain, other, data, prepared, settings, progress)
            compared = {name: paths[name] for name in ("fp32", "fp16", "int8") if name in paths}
            rows = precision.compare(
                compared,
                images,
                labels,
                provider=settings.provider,
                threads=settings.threads,
                progress=progress,
            )
        trace.add_properties(made, to_properties({"parity": found.to_dict()}))
        os.replace(made, target)
    return {
        "path": str(target),
        "bytes": target.stat().st_size,
        "sha256": describe(target).sha256,
        "dim": network.dim,
        "precision": settings.precision,
        "normalized": settings.normalize,
        "provider": session.provider,
        "provider_why": session.why,
        "parity": found.to_dict(),
        "precisions": [asdict(row) for row in rows],
    }


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """On the disk of the target. Those that killed exports left are removed; a lock, which ends
    with its process, tells them from those in use.
    """
    for left in parent.glob(".export-*"):
        with suppress(OSError):
            left.rmdir()  # its export was killed before it had made its lock
        with suppress(OSError), claim(left / "lock") as file:
            if lock(file):
                shutil.rmtree(left, ignore_errors=True)
    folder, file = locked_folder(parent)
    with file:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def locked_folder(parent: Path) -> tuple[Path, BinaryIO]:
    """A new folder and its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=".export-"))
        with suppress(FileNotFoundError):  # another export took it for a leftover
            file = (folder / "lock").open("wb")
            with suppress(BlockingIOError):
                lock(file)
                if is_at(file, folder / "lock"):
                    return folder, file
            file.close()


def write_plain(
    members: Sequence[Member], path: Path, settings: Settings, progress: StageProgress | None
) -> None:
    """The float32 model of one network, or of all together."""
    paths = []
    for number, member in enumerate(members):
        if progress:
            progress("tracing the network", number, len(members))
        paths.append(path if len(members) == 1 else path.with_name(f"{number}.onnx"))
        properties = describe_checkpoint(
            member.state,
            member.sha256,
            dim=member.embedder.dim,
            input=settings.input,
            normalize=settings.normalize,
        )
        trace.write_model(
            member.embedder,
            paths[-1],
            size=member.config.input.crop,
            properties=properties,
            input=settings.input,
            normalize=settings.normalize,
        )
    if len(members) > 1:
        ensemble.write_ensemble(paths, path, settings.normalize)


def at_precision(
    plain: Path,
    name: str,
    data: DataSet,
    prepared: Preprocessing,
    settings: Settings,
    progress: StageProgress | None,
) -> Path:
    target = plain.with_name(f"{name}.onnx")
    if name == "fp16":
        precision.to_fp16(plain, target)
    elif name == "int8":
        rows = spread(data.rows("train"), CALIBRATION)
        parts = (rows[at : at + 8] for at in range(0, len(rows), 8))
        read = (prepared_images(data, part, prepared, settings.skip_bad)[0] for part in parts)
        images = (part for part in read if len(part))
        precision.to_int8(plain, target, images, progress=progress, total=len(rows))
    return target


def reused(members: Sequence[Member], path: Path, settings: Settings) -> dict[str, Any]:
    """The model that an interrupted export left, if it is the one that is wanted."""
    model = describe(path)
    own = model.metadata
    check_origin(model, members)
    form = (own.preprocessing.layout, own.preprocessing.dtype)
    found = [
        f"{option}: it has {there}"
        for option, there, wanted in (
            ("--precision", own.precision, settings.precision),
            ("--normalize", own.normalized, settings.normalize),
            ("--input", "-".join(reversed(form)), "-".join(reversed(INPUTS[settings.input]))),
        )
        if there != wanted
    ]
    if found:
        raise DmlError(
            f"{path} is not the model of this export.",
            "\n".join(found),
            "Start anew: --force instead of --resume",
        )
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "sha256": model.sha256,
        "dim": model.dim,
        "precision": own.precision,
        "normalized": own.normalized,
        "parity": own.parity,
        "precisions": [],
    } | told_before(path, model.sha256)


def told_before(path: Path, sha256: str) -> dict[str, Any]:
    """What was found when this very model was made, if that is still to be read beside it."""
    try:
        found = json.loads(path.with_name(RESULT).read_text())["model"]
        return found if found["sha256"] == sha256 else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def check_origin(model: Model, members: Sequence[Member]) -> None:
    """Whether a model was exported from these checkpoints."""
    own = model.metadata
    if own is None or own.checkpoints() != [member.sha256 for member in members]:
        names = ", ".join(str(member.path) for member in members)
        raise DmlError(
            f"{model.path} is not the model of {names}.",
            "It came from another checkpoint, so its embeddings are not those of this one.",
            "Export it anew: --onnx --force",
        )


def compared_images(
    data: DataSet, prepared: Preprocessing, precision: str, skip_bad: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The images of the parity check and their labels: (N, H, W, 3), (N,)."""
    most = COMPARED[precision] if prepared.crop <= 96 else COMPARED_LARGE
    return some_images(data, prepared, most, skip_bad)


def some_images(
    data: DataSet, prepared: Preprocessing, most: int, skip_bad: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """At most so many images, held-out ones first, and labels: (N, H, W, 3), (N,)."""
    held = np.concatenate([data.rows(s) for s in ("test", "query", "gallery")])
    rows = held if len(held) > 1 else np.arange(len(data))
    order = np.argsort(data.labels[rows], kind="stable")
    if len(rows) > most:  # at least two of a class, so that there is something to find
        labels = data.labels[rows][order]
        starts = np.flatnonzero(np.diff(labels, prepend=-1))
        each = max(2, most // len(starts))
        order = np.concatenate([part[:each] for part in np.split(order, starts[1:])])[:most]
    images, rows = prepared_images(data, rows[order], prepared, skip_bad)
    return images, data.labels[rows]


def spread(rows: np.ndarray, count: int) -> np.ndarray:
    """At most so many, evenly among all."""
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]


def prepared_images(
    data: DataSet, rows: np.ndarray, prepared: Preprocessing, skip_bad: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(n, H, W, 3) uint8, and the rows (n,) of those that can be read."""
    spec = prepared.spec()
    source = Source(data, spec)
    images, kept = [np.empty((0, spec.crop, spec.crop, 3), np.uint8)], []
    for row in rows.tolist():
        try:
            images.append(for_testing(source.resized(row), spec)[None])
        except DmlError as error:
            if not skip_bad:
                fix = "Replace it, or go on without it: --skip-bad"
                raise DmlError(error.what, error.why, fix) from error
        else:
            kept.append(row)
    return np.concatenate(images), np.array(kept, rows.dtype)


# The embeddings


def export_embeddings(
    members: Sequence[Member],
    network: Embedder | Together,
    data: DataSet,
    splits: dict[str, np.ndarray],
    folder: Path,
    settings: Settings,
    progress: StageProgress | None,
) -> dict[str, Any]:
    attrs: dict[str, object] = {
        "checkpoint_sha256": ",".join(member.sha256 for member in members),
        "loss": ",".join(member.config.loss.name for member in members),
        "backend": settings.backend,
    }
    if settings.backend == "torch":
        run = parity.torch_runner(network, settings.normalize and len(members) == 1)
        attrs |= {"model": str(members[0].path.name), "model_sha256": attrs["checkpoint_sha256"]}
        attrs["normalized"] = settings.normalize
        prepared = Preprocessing.from_checkpoint(members[0].state, settings.input)
        why, lanes, stop = "torch", 1, None
    else:
        model = existing_model(folder, members, settings)
        session, lanes = side_by_side(model, settings.provider, threads=settings.threads)
        run, stop, why, prepared = session.run, session.stop, session.why, session.preprocessing
        attrs |= {"model": MODEL, "model_sha256": model.sha256}
        attrs["normalized"] = model.metadata.normalized
    found = embed(
        run,
        network.dim,
        Source(data, prepared.spec()),
        prepared,
        splits,
        folder / EMBEDDINGS,
        attrs=attrs,
        half=settings.half,
        batch_size=settings.batch_size,
        resume=settings.resume,
        force=settings.force,
        skip_bad=settings.skip_bad,
        lanes=lanes,
        stop=stop,
        progress=progress,
    )
    return asdict(found) | {"path": str(found.path), "run_by": why}


def existing_model(folder: Path, members: Sequence[Member], settings: Settings) -> Model:
    """The model that this export wrote or, without one, an earlier export of the same runs."""
    if not (folder / MODEL).exists():
        raise DmlError(
            f"{folder} has no {MODEL} to embed with.",
            "--no-onnx uses the one that is there.",
            "Leave out --no-onnx, or use the checkpoint itself: --backend torch",
        )
    model = describe(folder / MODEL)
    check_origin(model, members)
    if settings.normalize and not model.metadata.normalized:
        raise DmlError(
            f"The embeddings of {model.path} are not of length 1.",
            "--normalize is a matter of the model, and --no-onnx uses the one that is there.",
            "Leave out --normalize, or export the model anew: --onnx --force",
        )
    return model
