"""The run folder: made, filled and found again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from retrieval import files
from retrieval.errors import DmlError
from retrieval.files import write_text
from trainer.config import Config, Schedule
from trainer.data.datasets import DataSet
from trainer.data.datasets.records import counted
from trainer.data.images import WHITE
from trainer.resolve import from_dict
from trainer.run import checkpoint, metrics_log
from trainer.run.checkpoint import BEST, LAST, STARTING
from trainer.run.epoch import Training
from trainer.run.optimizers import rate
from trainer.run.setup import load_weights

CONFIG, ENVIRONMENT, RESULT = "config.toml", "environment.json", "result.json"
BEFORE = (CONFIG, ENVIRONMENT, metrics_log.METRICS, STARTING)  # there before the first checkpoint


class FolderTaken(DmlError):
    """Another run has it."""


def locked(folder: Path) -> AbstractContextManager[bool]:
    """Hold a run folder, so that one process at a time trains it; False where nothing locks."""
    return files.locked_folder(
        folder,
        FolderTaken(
            f"{folder} is being trained by another process.",
            "Two would overwrite each other's checkpoints.",
            "Wait for it, stop it, or choose another --out.",
        ),
    )


@contextmanager
def claimed(folder: Path, config: Config) -> Iterator[None]:
    """Makes the folder of a new run. If the run fails before its first checkpoint, it goes again.

    Of several runs that want the same folder, one gets it: whoever writes STARTING, which is
    there until the first checkpoint is. Left by a run that was killed, it gives the folder free.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, FileExistsError):
            raise _taken(folder) from None
        raise DmlError(
            f"{folder} cannot be made.", f"{error.strerror}.", "Choose another --out."
        ) from error
    with locked(folder) as held:
        if held:
            files.remove_leftovers(folder / STARTING)  # of a run killed while it wrote that
            if not_started(folder):
                clear_start(folder)
        if any(folder.iterdir()):
            raise _taken(folder)
        if not held:  # only one process can make it
            (folder / STARTING).open("x").close()
        try:
            write_text(folder / STARTING, config.to_toml(), force=True)
            yield
        except BaseException:
            if not_started(folder):
                clear_start(folder)
                for path in made:
                    with suppress(OSError):
                        path.rmdir()
            raise


def not_started(folder: Path) -> bool:
    """A run that has not come to its first checkpoint, or was stopped before it."""
    return (folder / STARTING).exists() and not (folder / LAST).exists()


def clear_start(folder: Path) -> None:
    """Removes what a run leaves before its first checkpoint, STARTING at the end; nothing else."""
    files.remove_leftovers(folder)
    for path in (folder / metrics_log.BOARD).glob("events.out.tfevents.*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        (folder / metrics_log.BOARD).rmdir()
    for name in BEFORE:
        (folder / name).unlink(missing_ok=True)


def _taken(folder: Path) -> FolderTaken:
    fix = f"Choose another --out, or go on with that run: --resume {folder}"
    if not (folder / LAST).exists():
        fix = "Choose another --out; there is no checkpoint in it to go on from."
    return FolderTaken(f"{folder} exists already.", "A run has a folder of its own.", fix)


def start(training: Training) -> None:
    """What a run begins with, and a first checkpoint: lack of room is found now."""
    if training.world.rank != 0:
        return
    folder = training.folder
    write_text(folder / CONFIG, training.config.to_toml(), force=True)
    write_environment(training, {})
    metrics_log.write_metrics(folder, [])
    save(training, best=False)
    check_room(training)
    (folder / STARTING).unlink(missing_ok=True)


def check_room(training: Training) -> None:
    """A checkpoint is written beside the last one, and will hold the optimiser's state as well."""
    spec = training.config.optimizer
    slots = int(spec.momentum > 0) if spec.name == "sgd" else 2
    weights = [p for group in training.optimizer.param_groups for p in group["params"]]
    first = (training.folder / LAST).stat().st_size
    each = first + slots * sum(p.numel() * p.element_size() for p in weights)
    free = shutil.disk_usage(training.folder).free
    if free < 2 * each - first:
        (training.folder / LAST).unlink()
        raise DmlError(
            f"There is too little room for checkpoints in {training.folder}.",
            f"Two of them take {2 * each / 1e6:,.0f} MB; {free / 1e6:,.0f} MB are free.",
            "Make room there, or choose another --out.",
        )


def restore(training: Training, state: dict[str, Any]) -> None:
    """Goes on where a checkpoint ends."""
    folder = training.folder
    if state["data_sha256"] != fingerprint(training.source.data):
        raise DmlError(
            f"The data set is not the one that {folder} was trained on.",
            "Images or classes were added, removed or renamed.",
            "Restore them, or start anew with another --out.",
        )
    load_weights(training.embedder, state["embedder"])
    load_weights(training.loss, state["loss"])
    try:
        training.optimizer.load_state_dict(state["optimizer"])
        training.scaler.load_state_dict(state["scaler"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise DmlError(
            f"{folder / LAST} is damaged.", f"The optimiser's state: {error}."
        ) from error
    training.epoch = state["epoch"]
    training.best = state["best"]
    for name, now, one in (
        ("threads", torch.get_num_threads(), "thread"),
        ("processes", training.world.size, "process"),
    ):
        if state[name] != now:
            training.watch.note(
                f"{counted(state[name], one, name)} before, {now} now: the result will differ in "
                "its last bits"
            )
    # A killed run may have told of an epoch whose checkpoint it did not finish.
    found = metrics_log.read_metrics(folder)
    known = (record for record in found if isinstance(record.get("epoch"), int))
    training.records = [record for record in known if record["epoch"] <= training.epoch]
    if training.world.rank == 0:
        files.remove_leftovers(folder)
        (folder / STARTING).unlink(missing_ok=True)
        metrics_log.write_metrics(folder, training.records)
        with suppress(OSError, ValueError):
            write_environment(training, json.loads((folder / ENVIRONMENT).read_text()))
    tell_epochs(training, from_dict(state["config"], f"The checkpoint in {folder}").schedule)


def tell_epochs(training: Training, before: Schedule) -> None:
    """Says what is left to do. More epochs than before are written down, to be resumed as well."""
    schedule, done = training.config.schedule, training.epoch
    if done >= schedule.epochs:
        training.watch.note(f"{training.folder} is finished; only its scores are computed again")
    if schedule.epochs == before.epochs:
        return
    share = rate(schedule, done, 1)  # counted in epochs
    training.watch.note(
        f"{schedule.epochs} epochs instead of {before.epochs}: from epoch {done + 1} on the "
        f"learning rate is that of a run of {schedule.epochs} epochs, {schedule.name}: now "
        f"{100 * share:.0f} % of the full rate"
    )
    if training.world.rank == 0:
        write_text(training.folder / CONFIG, training.config.to_toml(), force=True)
    save(training, best=False)


def write_environment(training: Training, before: dict[str, Any]) -> None:
    """Where the run is going on now is added to where it was started."""
    now = metrics_log.environment(str(training.device), training.world.size)
    if before:
        now = before | {"resumed": [*before.get("resumed", []), now | {"epoch": training.epoch}]}
    write_text(training.folder / ENVIRONMENT, to_json(now), force=True)


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
        "threads": torch.get_num_threads(),
        "processes": training.world.size,
        "label_names": [data.label_names[c] for c in data.classes("train")],
        "data_sha256": fingerprint(data),
        "preprocessing": training.embedder.preprocessing | preprocessing(training.config),
        "versions": metrics_log.versions(),
        "best": training.best,
    }
    checkpoint.save(training.folder, state, best)


def best_weights(folder: Path) -> dict[str, Any]:
    return checkpoint.load(folder / BEST)["embedder"]


def preprocessing(config: Config) -> dict[str, Any]:
    """What turns an image file into what the network sees, apart from mean and std."""
    names = ("resize", "keep_ratio", "crop", "interpolation", "draft")
    fixed = {"antialias": True, "background": list(WHITE)}
    return {name: getattr(config.input, name) for name in names} | fixed


def fingerprint(data: DataSet) -> str:
    """Of paths, labels and splits; not of pixels, nor of where the data set lies."""
    digest = hashlib.sha256()
    for text in (*data.paths, "", *data.label_names):
        digest.update(os.fsencode(text) + b"\0")
    digest.update(data.labels.tobytes() + data.splits.tobytes())
    return digest.hexdigest()


def to_json(result: dict[str, Any]) -> str:
    return json.dumps(result, indent=2) + "\n"
