"""`run`: from a config to a folder with checkpoints, metrics and scores."""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrieval.errors import DmlError
from retrieval.evaluation import evaluate
from retrieval.writing import write_text
from trainer import checkpoint, datasets, distributed, history, losses, optimizers
from trainer.config import Config
from trainer.device import determinism, pick_device, precision, to_input
from trainer.distributed import World
from trainer.loading import Loader, testing_batches
from trainer.monitor import build_monitors
from trainer.scoring import embed, recall, sides
from trainer.setup import (
    build_embedder,
    check_folder,
    head_of,
    load_weights,
    open_data,
    wrapped,
)
from trainer.steps import Training, epoch_plan, train_epoch
from trainer.watch import Watch

CURVES_EVERY = 30.0  # seconds


def run(
    config: Config, folder: Path, watch: Watch | None = None, *, resume: bool = False
) -> dict[str, Any] | None:
    """Trains, keeps last.pt and best.pt, and scores the best on the test set: result.json.

    With `resume` the folder's last.pt goes on, bit for bit on a CPU as if never interrupted: what
    is random in an epoch depends on the seed and the epoch alone. Where torchrun started several
    processes, only the first returns the result.
    """
    device = pick_device(config.run.device)
    world = distributed.join(device.type)
    if device.type == "cuda" and world.size > 1:
        device = torch.device("cuda", world.local_rank)
    watch = watch if watch is not None and world.rank == 0 else Watch()
    state = checkpoint.load(folder / checkpoint.LAST) if resume else None
    training = None
    try:
        with determinism(config.run.deterministic):
            training = prepare(config, folder, world, device, watch, state)
            fit(training)
            result = finish(training)
            return result if world.rank == 0 else None
    finally:
        if training is not None:
            training.loader.close()
            if training.board:
                training.board.close()
            if world.rank == 0:
                with suppress(DmlError):  # a full disk has been told already
                    history.draw_curves(folder, training.records)
        distributed.leave(world)


def prepare(
    config: Config,
    folder: Path,
    world: World,
    device: torch.device,
    watch: Watch,
    state: dict[str, Any] | None,
) -> Training:
    if state is None:
        check_folder(folder)
    with distributed.first_alone(world):  # it checks images and fills the cache on the disk
        source = open_data(config, watch)
    data = source.data
    targets = data.targets("train")
    classes = data.classes("train")
    torch.manual_seed(config.run.seed)
    embedder = build_embedder(config, pretrained=state is None)
    for text in embedder.notes:
        watch.note(text)
    loss = losses.build(config.loss.name, len(classes), embedder.dim, **config.loss.options)
    if config.loss.classification_epochs:
        head_of(loss, config.loss.name)
    layout = torch.channels_last if config.run.channels_last else torch.preserve_format
    embedder.to(device, memory_format=layout)
    loss.to(device)
    monitors = None
    if config.loss.monitor and world.rank == 0:
        monitors = build_monitors(config.loss.monitor, len(classes), embedder.dim, loss)
    training = Training(
        config, folder, world, device, watch, source, targets, embedder,
        model=wrapped(embedder, config, world, device),
        loss=loss,
        optimizer=optimizers.build(config.optimizer, embedder, loss),
        scaler=torch.amp.GradScaler(
            device.type, enabled=precision(config, device) == torch.float16
        ),
        loader=Loader(
            source, config.input, data.rows("train"), targets, config.data.workers, device
        ),
        monitors=monitors,
    )  # fmt: skip
    if state is None:
        start(training)
    else:
        restore(training, state)
    if config.run.tensorboard and world.rank == 0:
        training.board = history.Board(folder, training.epoch)
    return training


def start(training: Training) -> None:
    """The folder and a first checkpoint: what can fail for lack of room fails now."""
    config, folder = training.config, training.folder
    if training.world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.toml", config.to_toml(), force=True)
        found = history.environment(str(training.device), training.world.size)
        write_text(folder / "environment.json", to_json(found), force=True)
        history.write_metrics(folder, [])
    save(training, best=False)


def restore(training: Training, state: dict[str, Any]) -> None:
    if state["data_sha256"] != fingerprint(training.source.data):
        raise DmlError(
            f"The data set is not the one that {training.folder} was trained on.",
            "Images or classes were added, removed or renamed.",
            "Restore them, or start anew with another --out.",
        )
    load_weights(training.embedder, state["embedder"])
    load_weights(training.loss, state["loss"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.scaler.load_state_dict(state["scaler"])
    training.epoch = state["epoch"]
    training.best = state["best"]
    # A killed run may have told of an epoch whose checkpoint it did not finish.
    found = history.read_metrics(training.folder)
    training.records = [record for record in found if record["epoch"] <= training.epoch]
    if training.world.rank == 0:
        history.write_metrics(training.folder, training.records)


def fit(training: Training) -> None:
    config = training.config
    drawn = time.monotonic()
    steps = len(epoch_plan(config, training.targets, training.epoch))
    training.watch.begin(training.folder, config.schedule.epochs, steps, training.epoch)
    for epoch in range(training.epoch, config.schedule.epochs):
        record = train_epoch(training, epoch)
        scores = validate(training)
        better = (
            config.run.select == "last"
            or not training.best
            or scores["cos"] > training.best["scores"]["cos"]
        )
        training.epoch = epoch + 1
        if better:
            training.best = {"epoch": epoch + 1, "scores": scores}
        record |= {"scores_of": config.run.select, "scores": scores, "best": better}
        training.records.append(record)
        if training.world.rank == 0:
            history.add_metrics(training.folder, record)
        if training.board:
            training.board.add(record)
        save(training, better)
        training.watch.epoch(record)
        if training.world.rank == 0 and time.monotonic() - drawn > CURVES_EVERY:
            history.draw_curves(training.folder, training.records)
            drawn = time.monotonic()


def validate(training: Training) -> dict[str, float]:
    """Recall@1 of the split that picks the best epoch; nothing where none does."""
    data = training.source.data
    split = training.config.run.select
    if split == "last":
        return {}
    gallery, queries = sides(data, split)
    rows = gallery if queries is None else np.concatenate([gallery, queries])
    distributed.share_buffers(training.embedder, training.world)
    vectors = embed_rows(training, rows)
    return recall(vectors, data.labels[rows], None if queries is None else len(gallery))


def embed_rows(training: Training, rows: np.ndarray) -> np.ndarray:
    """(n, D) of these rows, shared among the processes."""
    config, world = training.config, training.world
    own = rows[world.rank :: world.size]
    batches = testing_batches(
        training.source,
        own,
        config.input,
        max(64, config.batches.total),
        config.data.workers,
        training.device,
    )
    half = precision(config, training.device)
    with torch.autocast(training.device.type, half or torch.bfloat16, enabled=half is not None):
        vectors = embed(
            training.embedder, batches, lambda images: to_input(images, training.device)
        )
    return distributed.gather_rows(vectors, len(rows), world).numpy()


def finish(training: Training) -> dict[str, Any]:
    """Scores the best epoch on the test set; what result.json says."""
    config, data, folder = training.config, training.source.data, training.folder
    result: dict[str, Any] = {
        "run": str(folder),
        "dataset": data.name,
        "loss": config.loss.name,
        "select": config.run.select,
        "best_epoch": training.best["epoch"],
        "epochs": training.epoch,
        "scores": training.best["scores"],
        "test": None,
    }
    gallery, queries = sides(data, "test")
    if len(gallery):
        best = checkpoint.load(folder / checkpoint.BEST)
        training.embedder.load_state_dict(best["embedder"])
        training.watch.stage("scoring the test set", 0, 1)
        rows = gallery if queries is None else np.concatenate([queries, gallery])
        vectors, labels = embed_rows(training, rows), data.labels[rows]
        n = len(rows) if queries is None else len(queries)
        pair = (None, None) if queries is None else (vectors[n:], labels[n:])
        if training.world.rank == 0:
            result["test"] = evaluate(
                vectors[:n], labels[:n], *pair, recall_at=config.run.recall_at, nmi=False
            )
    if training.world.rank == 0:
        write_text(folder / "result.json", to_json(result), force=True)
    return result


def save(training: Training, best: bool) -> None:
    if training.world.rank != 0:
        return
    data = training.source.data
    state = {
        "epoch": training.epoch,
        "config": training.config.to_dict(),
        "embedder": training.embedder.state_dict(),
        "loss": training.loss.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scaler": training.scaler.state_dict(),
        "label_names": [data.label_names[c] for c in data.classes("train")],
        "data_sha256": fingerprint(data),
        "preprocessing": training.embedder.preprocessing | preprocessing(training.config),
        "versions": history.versions(),
        "best": training.best,
    }
    checkpoint.save(training.folder, state, best)


def preprocessing(config: Config) -> dict[str, Any]:
    """What turns an image file into what the network sees, apart from mean and std."""
    names = ("resize", "keep_ratio", "crop", "interpolation")
    return {name: getattr(config.input, name) for name in names} | {"antialias": True}


def fingerprint(data: datasets.DataSet) -> str:
    """Of paths, labels and splits; not of pixels, nor of where the data set lies."""
    digest = hashlib.sha256()
    for text in (*data.paths, "", *data.label_names):
        digest.update(text.encode() + b"\0")
    digest.update(data.labels.tobytes() + data.splits.tobytes())
    return digest.hexdigest()


def to_json(result: dict[str, Any]) -> str:
    import json

    return json.dumps(result, indent=2, ensure_ascii=False) + "\n"
