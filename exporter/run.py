"""`export`: from a run to model.onnx and embeddings.h5, shown to retrieve like the network."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exporter import ensemble, graph, parity, precision
from exporter.decoding import side_by_side
from exporter.embedding import embed
from exporter.metadata import Preprocessing, describe_checkpoint, to_properties
from exporter.model import describe
from exporter.session import Session
from retrieval.errors import DmlError
from retrieval.threads import StageProgress
from retrieval.writing import check_target, write_text
from trainer import checkpoint
from trainer.config import Config
from trainer.datasets import DataSet
from trainer.embedder import Embedder
from trainer.loading import Source
from trainer.resolve import from_dict
from trainer.setup import load_data, load_embedder
from trainer.transforms import for_testing

MODEL, EMBEDDINGS, RESULT = "model.onnx", "embeddings.h5", "export.json"
COMPARED = {"small": 1000, "large": 128}
"""Images of the parity check: small ones up to 96 pixels, and larger ones, which take longer."""
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
    """Several networks as one: their embeddings l2-normalised, side by side."""

    def __init__(self, members: Sequence[Embedder]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.register_buffer("pixel_mean", members[0].pixel_mean)
        self.dim = sum(member.dim for member in members)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([nn.functional.normalize(m(images)) for m in self.members], dim=1)


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
    folder = output_folder(runs, out)
    targets = {
        name: check_target(folder / name, settings.force or settings.resume)
        for name, wanted in ((MODEL, settings.onnx), (EMBEDDINGS, settings.embeddings))
        if wanted
    }
    members = [load_member(run) for run in runs]
    data = load_matching(members, settings.data)
    splits = chosen_splits(data, settings.splits)
    network = members[0].embedder if len(members) == 1 else Together([m.embedder for m in members])
    result: dict[str, Any] = {"runs": [str(run) for run in runs], "folder": str(folder)}
    if settings.onnx:
        result["model"] = export_model(members, network, data, targets[MODEL], settings, progress)
    if settings.embeddings:
        result["embeddings"] = export_embeddings(
            members, network, data, splits, folder, settings, progress
        )
    write_text(folder / RESULT, json.dumps(result, indent=2) + "\n", force=True)
    return result


# What is exported


def output_folder(runs: Sequence[Path], out: Path | None) -> Path:
    if out is None:
        if len(runs) > 1:
            raise DmlError(
                "An ensemble has no folder of its own.",
                f"{len(runs)} runs become one model.",
                "Name one: --out FOLDER",
            )
        out = runs[0] if runs[0].is_dir() else runs[0].parent
    if not out.exists():
        out.mkdir(parents=True)
    return out


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
            f"--split {next(iter(there))}",
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
    images, labels = some_images(data, prepared)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as folder:
        plain = Path(folder) / "fp32.onnx"
        write_plain(members, plain, settings, progress)
        made = at_precision(plain, data, prepared, settings, progress)
        session = Session(describe(made), settings.provider)
        # An ensemble is normalised member by member.
        normalize = settings.normalize and len(members) == 1
        timed = Timed(session)
        found = parity.check(network, timed, images, labels, normalize=normalize, progress=progress)
        parity.judge(found, settings.precision, settings.max_recall_drop)
        if made == plain:  # all that there is to say of it was just seen
            speed = timed.images / timed.seconds
            rows = [precision.Row("fp32", plain.stat().st_size, speed, found.recall_onnx, 0.0)]
        else:
            compared = {"fp32": plain, settings.precision: made}
            rows = precision.compare(
                compared, images, labels, provider=settings.provider, progress=progress
            )
        graph.add_properties(made, to_properties({"parity": found.to_dict()}))
        os.replace(made, target)
    return {
        "path": str(target),
        "bytes": target.stat().st_size,
        "sha256": describe(target).sha256,
        "dim": network.dim,
        "precision": settings.precision,
        "normalized": settings.normalize or len(members) > 1,
        "provider": session.provider,
        "provider_why": session.why,
        "parity": found.to_dict(),
        "precisions": [asdict(row) for row in rows],
    }


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
        graph.write_model(
            member.embedder,
            paths[-1],
            size=member.config.input.crop,
            properties=properties,
            input=settings.input,
            normalize=settings.normalize,
        )
    if len(members) > 1:
        ensemble.write_ensemble(paths, path)


def at_precision(
    plain: Path,
    data: DataSet,
    prepared: Preprocessing,
    settings: Settings,
    progress: StageProgress | None,
) -> Path:
    target = plain.with_name(f"{settings.precision}.onnx")
    if settings.precision == "fp16":
        precision.to_fp16(plain, target)
    elif settings.precision == "int8":
        rows = spread(data.rows("train"), CALIBRATION)
        images = (
            prepared_images(data, rows[at : at + 8], prepared) for at in range(0, len(rows), 8)
        )
        precision.to_int8(plain, target, images, progress=progress, total=len(rows))
    return target


def reused(members: Sequence[Member], path: Path, settings: Settings) -> dict[str, Any]:
    """The model that an interrupted export left, if it is the one that is wanted."""
    model = describe(path)
    own = model.metadata
    wanted = (members[0].sha256, settings.precision, settings.normalize)
    if len(members) == 1 and (
        own is None or (own.checkpoint_sha256, own.precision, own.normalized) != wanted
    ):
        raise DmlError(
            f"{path} is not the model of this export.",
            "It is of another checkpoint or precision, so its rows cannot be completed.",
            "Start anew: --force instead of --resume",
        )
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "sha256": model.sha256,
        "dim": model.dim,
        "precision": own.precision if own else "",
        "normalized": bool(own and own.normalized),
        "parity": own.parity if own else {},
        "precisions": [],
    }


def some_images(data: DataSet, prepared: Preprocessing) -> tuple[np.ndarray, np.ndarray]:
    """Images of whole classes, held-out ones first, and their labels: (N, H, W, 3), (N,)."""
    most = COMPARED["small" if prepared.crop <= 96 else "large"]
    held = np.concatenate([data.rows(s) for s in ("test", "query", "gallery")])
    rows = held if len(held) > 1 else np.arange(len(data))
    order = np.argsort(data.labels[rows], kind="stable")
    if len(rows) > most:  # at least two of a class, so that there is something to find
        labels = data.labels[rows][order]
        starts = np.flatnonzero(np.diff(labels, prepend=-1))
        each = max(2, most // len(starts))
        order = np.concatenate([part[:each] for part in np.split(order, starts[1:])])[:most]
    rows = rows[order]
    return prepared_images(data, rows, prepared), data.labels[rows]


def spread(rows: np.ndarray, count: int) -> np.ndarray:
    """At most so many, evenly among all."""
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]


def prepared_images(data: DataSet, rows: np.ndarray, prepared: Preprocessing) -> np.ndarray:
    source = Source(data, prepared.spec())
    return np.stack([for_testing(source.resized(row), prepared.spec()) for row in rows.tolist()])


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
    prepared = Preprocessing.from_checkpoint(members[0].state, settings.input)
    normalized = settings.normalize or len(members) > 1
    attrs: dict[str, object] = {
        "checkpoint_sha256": ",".join(member.sha256 for member in members),
        "loss": ",".join(member.config.loss.name for member in members),
        "backend": settings.backend,
        "normalized": normalized,
    }
    if settings.backend == "torch":
        run = parity.torch_runner(network, settings.normalize and len(members) == 1)
        attrs |= {"model": str(members[0].path.name), "model_sha256": attrs["checkpoint_sha256"]}
        why, lanes = "torch", 1
    else:
        model = existing_model(folder)
        session, lanes = side_by_side(model, settings.provider)
        run, why = session.run, session.why
        attrs |= {"model": MODEL, "model_sha256": model.sha256}
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
        progress=progress,
    )
    return asdict(found) | {"path": str(found.path), "run_by": why}


def existing_model(folder: Path):
    if not (folder / MODEL).exists():
        raise DmlError(
            f"{folder} has no {MODEL} to embed with.",
            "--no-onnx uses the one that is there.",
            "Leave out --no-onnx, or use the checkpoint itself: --backend torch",
        )
    return describe(folder / MODEL)
