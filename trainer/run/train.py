"""`run`: from a config to a folder with checkpoints, metrics and scores."""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrieval.errors import DmlError
from retrieval.evaluation import evaluate
from retrieval.files import write_text
from trainer import losses
from trainer.config import Config
from trainer.data.loading import Loader, testing_batches
from trainer.losses.monitor import build_monitors
from trainer.run import checkpoint, distributed, metrics_log, optimizers
from trainer.run import folder as run_folder
from trainer.run.device import determinism, pick_device, precision, to_input
from trainer.run.distributed import World
from trainer.run.epoch import Training, epoch_plan, own_columns, train_epoch
from trainer.run.half_precision import allow_half
from trainer.run.scoring import Embeds, WithPixels, embed, recall, sides, verdict
from trainer.run.setup import (
    balanced,
    build_embedder,
    check_names,
    head_of,
    load_weights,
    open_data,
    wrapped,
)
from trainer.run.threads import use_threads
from trainer.run.watch import Watch

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
    threads = torch.get_num_threads()
    half, limited = precision(config, device), None
    if half is not None and device.type == "cpu":
        limited = allow_half(half)
    world = distributed.join(device.type)
    if device.type == "cuda" and world.size > 1:
        device = torch.device("cuda", world.local_rank)
    watch = watch if watch is not None and world.rank == 0 else Watch()
    if limited:
        watch.note(limited)
    try:
        with distributed.together(world):
            return train(config, folder, world, device, watch, resume)
    finally:
        torch.set_num_threads(threads)
        distributed.leave(world)


def train(
    config: Config, folder: Path, world: World, device: torch.device, watch: Watch, resume: bool
) -> dict[str, Any] | None:
    """From the checks of the names to the result; the folder is held meanwhile."""
    distributed.from_first(lambda: check_names(config, folder), world)
    if resume and distributed.from_first(lambda: run_folder.not_started(folder), world):
        watch.note(f"{folder} was stopped before its first checkpoint: it starts anew")
        resume = False
    own = nullcontext()
    if world.rank == 0:
        own = run_folder.locked(folder) if resume else run_folder.claimed(folder, config)
    with own, determinism(config.run.deterministic):
        state = None
        if resume:
            state = distributed.from_first(lambda: checkpoint.load(folder), world)
        with closing(prepare(config, folder, world, device, watch, state)) as training:
            fit(training)
            result = finish(training)
        return result if world.rank == 0 else None


def prepare(
    config: Config,
    folder: Path,
    world: World,
    device: torch.device,
    watch: Watch,
    state: dict[str, Any] | None,
) -> Training:
    with distributed.first_alone(world):  # it checks images and fills the cache on the disk
        source = open_data(config, watch)
    data = source.data
    config = balanced(config, data, world.size, watch)
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
    before = state["threads"] if state else 0
    trial = world.size == 1 and (before or not config.run.deterministic)
    if device.type == "cpu" and (trial or config.run.threads):
        told = use_threads(embedder, config.input.crop, config.run.threads, before)
        if told:
            watch.note(told)
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
            source, data.rows("train"), targets, config.data.workers, device
        ),
        monitors=monitors,
    )  # fmt: skip
    own_columns(epoch_plan(config, targets, 0), world)  # what cannot be shared is said now
    if config.run.tensorboard and world.rank == 0:
        training.board = metrics_log.Board(folder, state["epoch"] if state else 0)
    if state is None:
        run_folder.start(training)
    else:
        run_folder.restore(training, state)
    return training


def fit(training: Training) -> None:
    config = training.config
    if training.epoch >= config.schedule.epochs:
        return
    drawn = time.monotonic()
    steps = len(epoch_plan(config, training.targets, training.epoch))
    training.watch.begin(training.folder, config.schedule.epochs, steps, training.epoch)
    if training.epoch == 0 and not training.records:
        score_baselines(training)
    for epoch in range(training.epoch, config.schedule.epochs):
        record = train_epoch(training, epoch)
        check_sound(training, epoch)
        scores = validate(training)
        better = (  # of equals the later one: it has learnt for longer
            config.run.select == "last"
            or not training.best
            or scores["cos"] >= training.best["scores"]["cos"]
        )
        training.epoch = epoch + 1
        if better:
            training.best = {"epoch": epoch + 1, "scores": scores}
        record |= {"scores_of": config.run.select, "scores": scores, "best": better}
        training.records.append(record)
        if training.world.rank == 0:
            metrics_log.add_metrics(training.folder, record)
        if training.board:
            training.board.add(record)
        run_folder.save(training, better)
        training.watch.epoch(record)
        if training.world.rank == 0 and time.monotonic() - drawn > CURVES_EVERY:
            metrics_log.draw_curves(training.folder, training.records)
            drawn = time.monotonic()


def score_baselines(training: Training) -> None:
    """Epoch 0 of metrics.jsonl: the network before training, and raw pixels, on the same images."""
    began = time.perf_counter()
    network = WithPixels(training.embedder)
    found = validation_vectors(training, network)
    if found is None:
        return
    vectors, *rest = found
    dim = training.embedder.dim
    untrained, pixels = distributed.from_first(
        lambda: [recall(part, *rest) for part in (vectors[:, :dim], vectors[:, dim:])],
        training.world,
    )
    seconds = time.perf_counter() - began
    record = {
        "epoch": 0, "loss": None, "parts": {}, "monitor": {}, "seconds": seconds,
        "images_per_second": len(vectors) / seconds, "lr": 0.0,
        "scores_of": training.config.run.select, "scores": untrained, "pixels": pixels,
        "best": False,
    }  # fmt: skip
    training.records.append(record)
    if training.world.rank == 0:
        metrics_log.add_metrics(training.folder, record)
    if training.board:
        training.board.add(record)
    training.watch.epoch(record)


def baselines(training: Training) -> dict[str, dict[str, float]]:
    """By name, from epoch 0; a run of an older version has none."""
    first = next(iter(training.records), {})
    if first.get("epoch") != 0:
        return {}
    return {"pixels": first["pixels"], "untrained": first["scores"]}


def check_sound(training: Training, epoch: int) -> None:
    """Before a checkpoint replaces the last: the last step of an epoch may have ruined it."""
    modules = (training.embedder, training.loss)
    tensors = [t.detach() for m in modules for t in (*m.parameters(), *m.buffers())]
    sound = all(t.isfinite().all() for t in tensors if t.is_floating_point())
    some = training.source.data.rows("train")[:64]
    if not sound or not np.isfinite(embed_rows(training, some)).all():
        raise DmlError(
            f"The network gives NaN or infinite embeddings after epoch {epoch + 1}.",
            f"Training has diverged. {training.folder / checkpoint.LAST} holds the end of epoch "
            f"{epoch}, which was sound.",
            "Start again with a smaller --lr, or with --set optimizer.clip=1.",
        )


def validate(training: Training) -> dict[str, float]:
    """Recall@1 of the split that picks the best epoch; nothing where none does."""
    found = validation_vectors(training, training.embedder)
    if found is None:
        return {}
    return distributed.from_first(lambda: recall(*found), training.world)


def validation_vectors(
    training: Training, network: Embeds
) -> tuple[np.ndarray, np.ndarray, int | None] | None:
    """Vectors, labels and the number of gallery rows of the split that picks the best epoch."""
    data = training.source.data
    split = training.config.run.select
    if split == "last":
        return None
    gallery, queries = sides(data, split)
    rows = gallery if queries is None else np.concatenate([gallery, queries])
    distributed.share_buffers(training.embedder, training.world)
    vectors = embed_rows(training, rows, network)
    return vectors, data.labels[rows], None if queries is None else len(gallery)


def embed_rows(
    training: Training,
    rows: np.ndarray,
    network: Embeds | None = None,
    full: bool = False,
) -> np.ndarray:
    """(n, D) of these rows, computed by all processes; full: in float32, as an export is."""
    config, world = training.config, training.world
    own = rows[world.rank :: world.size]
    batches = testing_batches(
        training.source,
        own,
        max(64, config.batches.total),
        config.data.workers,
        training.device,
    )
    half = None if full else precision(config, training.device)
    with torch.autocast(training.device.type, half or torch.bfloat16, enabled=half is not None):
        vectors = embed(
            network or training.embedder,
            batches,
            lambda images: to_input(images, training.device),
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
        "baselines": baselines(training),
        "counts": {split: list(count) for split, count in data.counts().items()},
        "test": None,
    }
    if result["baselines"] and (
        told := verdict(training.best, result["baselines"], result["epochs"])
    ):
        training.watch.note(told)
    gallery, queries = sides(data, "test")
    if len(gallery):
        best = distributed.from_first(lambda: run_folder.best_weights(folder), training.world)
        load_weights(training.embedder, best)
        training.watch.stage("scoring the test set", 0, 1)
        rows = gallery if queries is None else np.concatenate([queries, gallery])
        vectors, labels = embed_rows(training, rows, full=True), data.labels[rows]
        n = len(rows) if queries is None else len(queries)
        pair = (None, None) if queries is None else (vectors[n:], labels[n:])
        if training.world.rank == 0:
            result["test"] = evaluate(
                vectors[:n], labels[:n], *pair, recall_at=config.run.recall_at, nmi=False
            )
    if training.world.rank == 0:
        write_text(folder / run_folder.RESULT, run_folder.to_json(result), force=True)
    return result
