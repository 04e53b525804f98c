"""Train a network: from a config to a folder with checkpoints, metrics and scores."""

import json
import time
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from retrieval.console import to_json
from retrieval.distributed import processes
from retrieval.embeddings import HELD_OUT
from retrieval.files import write_text
from retrieval.run_files import BEST, RESULT, VALIDATION
from trainer import losses
from trainer.config import Config
from trainer.data.loading import Loader
from trainer.data.source import Source
from trainer.losses.miners import add_miner
from trainer.losses.monitor import build_monitors
from trainer.networks import weights
from trainer.resolve import resolve
from trainer.results import EpochRecord, Recalls, RunResult
from trainer.run import (
    checkpoint,
    distributed,
    metrics_log,
    optimizers,
    resuming,
    setup,
    validation,
)
from trainer.run import folder as run_folder
from trainer.run.device import determinism, in_layout, pick_device, precision, use_threads
from trainer.run.epoch import check_shares, epoch_plan, train_epoch
from trainer.run.half_precision import allow_half
from trainer.run.scoring import flat, verdict
from trainer.run.state import Job, Training
from trainer.run.watch import Watch
from trainer.trackers import Trackers

CURVES_EVERY = 30.0  # seconds
OWN = ("run.device", "run.threads")  # settings that each process has of its own


def train(
    config: Config | str,
    folder: str | Path,
    watch: Watch | None = None,
    *,
    resume: bool = False,
    test: bool = True,
) -> RunResult | None:
    """Train a network, keep its checkpoints, and score the best one on the test set.

    Parameters
    ----------
    config : Config or str
        All settings, from `trainer.resolve.resolve`, or the name of a preset.
    folder : str or Path
        The run folder: new, or with `resume` that of an interrupted run. It holds best.pt,
        last.pt, config.toml, metrics.jsonl, curves.png, validation.json and result.json.
    watch : Watch, optional
        Is told of stages, steps and epochs.
    resume : bool
        Continue from last.pt, on a CPU bit for bit as if never interrupted: what is random in an
        epoch depends on the seed and the epoch alone.
    test : bool
        Score the best epoch on the test set. A sweep scores only the settings that it chooses;
        a finished run that is resumed is scored later.

    Returns
    -------
    dict or None
        The content of result.json. Of several processes started by torchrun, only the first
        returns it.
    """
    if isinstance(config, str):
        config, _ = resolve(config, None, {})
    device = pick_device(config.run.device)
    threads = torch.get_num_threads()
    half, limited = precision(config, device), None
    if half is not None and device.type == "cpu":
        limited = allow_half(half)
    try:
        with processes.joined(device.type) as world:
            if device.type == "cuda" and world.size > 1:
                device = torch.device("cuda", processes.own_gpu(world))
            compared = _compared(config) | {"resume": resume, "test": test}
            processes.require_same_options(compared, world, ", ".join(OWN))
            watch = watch if watch is not None and world.rank == 0 else Watch()
            if limited:
                watch.note(limited)
            return train_job(Job(config, Path(folder), world, device, watch), resume, test)
    finally:
        torch.set_num_threads(threads)


def _compared(config: Config) -> dict[str, object]:
    """The settings that all processes of a run share; files may be elsewhere on each machine."""
    own = ("data.root", *OWN)
    settings: dict[str, Any] = {k: v for k, v in config.dotted().items() if k not in own}
    settings["data.options"] = {k: v for k, v in config.data.options.items() if k != "images"}
    if weights.is_file(config.network.weights):
        settings["network.weights"] = "a file"
    return settings


def train_job(job: Job, resume: bool, test: bool) -> RunResult | None:
    """Check names, hold the folder, prepare, train all epochs, and score the best one."""
    folder, world = job.folder, job.world
    processes.from_first(lambda: setup.check_names(job.config, folder), world)
    if resume and processes.from_first(lambda: run_folder.not_started(folder), world):
        job.watch.note(f"{folder} was stopped before its first checkpoint: it starts anew")
        resume = False
    own: AbstractContextManager[object] = nullcontext()
    if world.rank == 0:
        own = run_folder.locked(folder) if resume else run_folder.claimed(folder, job.config)
    with own, determinism(job.config.run.deterministic):
        saved = None
        if resume:
            saved = processes.from_first(lambda: checkpoint.load(folder), world)
        with closing(prepare(job, saved)) as training:
            fit(training)
            result = finish(training, test)
        return result if world.rank == 0 else None


def prepare(job: Job, saved: dict[str, Any] | None) -> Training:
    """Open the data, build what is trained, and start the run or restore a checkpoint."""
    with processes.first_alone(job.world):  # it checks images and fills the cache on the disk
        source = setup.open_data(job.config, job.watch)
    job = replace(job, config=setup.balanced(job.config, source.data, job.world.size, job.watch))
    training = build(job, source, saved)
    for epoch in {0, job.config.phase.epochs}:  # raises now if the batches cannot be shared out
        check_shares(job.config, training.targets, epoch, job.world)
    if saved is None:
        setup.tell_unused(job.config, job.watch)
        run_folder.start(training)
    else:
        resuming.resume(training, saved)
    if job.config.run.log and job.world.rank == 0:
        training.trackers = Trackers(job.folder, job.config, job.watch.note)
        training.trackers.add(training.records)
    return training


def build(job: Job, source: Source, saved: dict[str, Any] | None) -> Training:
    """Build network, loss, optimiser and loader; a resumed run gets its weights later."""
    config, device, world = job.config, job.device, job.world
    targets = source.data.targets("train")
    classes = len(source.data.classes("train"))
    torch.manual_seed(config.run.seed)
    embedder = setup.build_embedder(config, pretrained=saved is None)
    for text in embedder.notes:
        job.watch.note(text)
    loss = losses.build(config.loss.name, classes, embedder.dim, **config.loss.options)
    if config.loss.miner:
        add_miner(loss, config.loss.name, config.loss.miner, config.loss.miner_options)
    layout = torch.channels_last if config.run.channels_last else torch.preserve_format
    in_layout(embedder.to(device), layout)
    loss.to(device)
    before = saved["threads"] if saved else 0
    trial = world.size == 1 and (before or not config.run.deterministic)
    if device.type == "cpu" and (trial or config.run.threads):
        told = use_threads(embedder, config.input.crop, config.run.threads, before)
        if told:
            job.watch.note(told)
    monitors = None
    if config.loss.monitor and world.rank == 0:
        monitors = build_monitors(config.loss.monitor, classes, embedder.dim, loss)
    model = distributed.wrap(embedder, world, device)
    half = precision(config, device)
    rows = source.data.rows("train")
    spec = config.optimizer_in(max(0, saved["epoch"] - 1) if saved else 0)  # of the last epoch
    return Training(
        **vars(job),
        source=source,
        targets=targets,
        embedder=embedder,
        model=cast(nn.Module, torch.compile(model)) if config.run.compile else model,
        loss=loss,
        optimizer=optimizers.build(spec, embedder, loss),
        scaler=torch.amp.GradScaler(device.type, enabled=half == torch.float16),
        loader=Loader(source, rows, targets, config.data.workers, device),
        monitors=monitors,
    )


def fit(training: Training) -> None:
    """Train the epochs that are left; validate, record and save each."""
    config = training.config
    if training.epoch >= config.schedule.epochs:
        return
    drawn = time.monotonic()
    steps = len(epoch_plan(config, training.targets, training.epoch))
    training.watch.begin(training.folder, config.schedule.epochs, steps, training.epoch)
    if training.epoch == 0 and not training.records:
        first = validation.score_baselines(training)
        if first:
            record(training, first)
            training.watch.epoch(first)
    for epoch in range(training.epoch, config.schedule.epochs):
        means = train_epoch(training, epoch)
        validation.check_sound(training)
        vectors = validation.validation_vectors(training, training.embedder)
        scores = validation.validate(training, vectors)
        better = is_better(training, scores)
        training.epoch = epoch + 1
        if better:
            training.best = {"epoch": epoch + 1, "scores": scores}
            training.best_vectors = vectors
        found: EpochRecord = {
            **means,
            "scores_of": config.run.select,
            "scores": scores,
            "best": better,
        }
        if config.run.train_recall:
            found["train_scores"] = validation.training_recall(training)
        record(training, found)
        run_folder.save(training, better)
        training.watch.epoch(found)
        if training.world.rank == 0 and time.monotonic() - drawn > CURVES_EVERY:
            metrics_log.draw_curves(training.folder, training.records)
            drawn = time.monotonic()


def is_better(training: Training, scores: Recalls) -> bool:
    """Whether these scores are the best so far; of equal scores, the later epoch wins."""
    if training.config.run.select == "last" or training.best is None:
        return True
    return scores["cos"] >= training.best["scores"]["cos"]


def record(training: Training, found: EpochRecord) -> None:
    """Add the record of an epoch to metrics.jsonl and the trackers."""
    training.records.append(found)
    if training.world.rank == 0:
        metrics_log.add_metrics(training.folder, found)
    if training.trackers:
        training.trackers.add([found])


def finish(training: Training, test: bool) -> RunResult:
    """Score the best epoch, optionally on the test set; write validation.json and result.json."""
    config, data, folder = training.config, training.source.data, training.folder
    chosen, compared = training.best, validation.baselines(training)
    assert chosen is not None, "an epoch was trained"
    told = verdict(chosen, compared, training.epoch) if compared else ""
    if told:
        training.watch.note(told)
    tested = test and bool(data.counts().keys() & set(HELD_OUT))
    if tested or validation.needs_vectors(training):
        path = folder / BEST
        best = processes.from_first(lambda: checkpoint.load(path)["embedder"], training.world)
        setup.load_weights(training.embedder, best)
    result: RunResult = {
        "run": str(folder),
        "dataset": data.name,
        "loss": config.loss.name,
        "select": config.run.select,
        "best_epoch": chosen["epoch"],
        "epochs": training.epoch,
        "scores": chosen["scores"],
        "baselines": compared,
        "counts": {split: list(count) for split, count in data.counts().items()},
        "test": validation.score_test(training) if test else None,
    }
    found = validation.score_validation(training)
    if training.world.rank == 0:
        if found:
            write_text(folder / VALIDATION, json.dumps(found) + "\n", force=True)
        write_text(folder / RESULT, to_json(result), force=True)
    if training.trackers and result["test"]:
        training.trackers.add_test(flat(result["test"]["distances"]), chosen["epoch"])
    return result
