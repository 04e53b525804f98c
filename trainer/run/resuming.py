"""Resume a run: bring it to where its last checkpoint ends, and tell what differs from before.

What a checkpoint holds is written by `state.saved`. Epochs that a killed process had recorded but
not finished are taken out of metrics.jsonl.
"""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from retrieval import files
from retrieval.errors import DmlError, command
from retrieval.files import write_text
from retrieval.number_format import counted, percent
from retrieval.run_files import CONFIG, ENVIRONMENT
from trainer.config import Schedule
from trainer.run import folder, metrics_log
from trainer.run.checkpoint import STARTING, config_of
from trainer.run.optimizers import rate, restore
from trainer.run.setup import load_weights
from trainer.run.state import Training, fingerprint


def resume(training: Training, saved: dict[str, Any]) -> None:
    """Continue a prepared run from its checkpoint, and mend what a killed process has left."""
    path = training.folder
    _restore(training, saved)
    # A killed run may have recorded an epoch whose checkpoint it did not finish.
    known = filter(metrics_log.is_complete, metrics_log.read_metrics(path))
    training.records = [record for record in known if record["epoch"] <= training.epoch]
    if training.world.rank == 0:
        files.remove_leftovers(path)
        (path / STARTING).unlink(missing_ok=True)
        metrics_log.write_metrics(path, training.records)
        with suppress(OSError, ValueError):  # what describes the run, but no part of it
            before = json.loads((path / ENVIRONMENT).read_text(encoding="utf-8"))
            if isinstance(before, dict) and isinstance(before.get("resumed", []), list):
                folder.write_environment(training, before)
    _tell_epochs(training, config_of(saved, path).schedule)


def _restore(training: Training, state: dict[str, Any]) -> None:
    """Bring a prepared run to where its checkpoint ends."""
    if state["data_sha256"] != fingerprint(training.source.data):
        raise DmlError(
            f"The data set is not the one that {training.folder} was trained on.",
            "Images or classes were added, removed or renamed.",
            "Restore them, or start anew with another --out.",
        )
    load_weights(training.embedder, state["embedder"])
    load_weights(training.loss, state["loss"])
    try:
        restore(training.optimizer, state["optimizer"], state["epoch"])
        training.scaler.load_state_dict(state["scaler"])
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DmlError(
            f"The checkpoint in {training.folder} is damaged.",
            "The state of the optimiser in it does not fit the network and the settings.",
            "Train anew with another --out, or use the network as it is: "
            f"{command('export', training.folder)}",
        ) from error
    training.epoch, training.best = state["epoch"], state["best"] or None
    for name, now, one in (
        ("threads", torch.get_num_threads(), "thread"),
        ("processes", training.world.size, "process"),
    ):
        if state[name] != now:
            training.watch.note(
                f"{counted(state[name], one, name)} before, {now} now: the result will differ in "
                "its last bits"
            )


def _tell_epochs(training: Training, before: Schedule) -> None:
    """Say what is left to do, and save a larger number of epochs, so that it can be resumed too."""
    schedule, done = training.config.schedule, training.epoch
    if done >= schedule.epochs:
        training.watch.note(f"{training.folder} is finished; only its scores are computed again")
    if schedule.epochs == before.epochs:
        return
    share = rate(replace(schedule, warmup=0), done, 1)  # counted in epochs; warm-up is in steps
    training.watch.note(
        f"{schedule.epochs} epochs instead of {before.epochs}: from epoch {done + 1} on the "
        f"learning rate is that of a run of {schedule.epochs} epochs, {schedule.name}: now "
        f"{percent(share, 0)} % of the full rate"
    )
    if training.world.rank == 0:
        write_text(training.folder / CONFIG, training.config.to_toml(), force=True)
    folder.save(training, best=False)
