"""Create, lock and fill a run folder. `resuming` continues the run in one."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from retrieval import files
from retrieval.console import to_json
from retrieval.errors import DmlError, command
from retrieval.files import write_text
from retrieval.number_format import size
from retrieval.run_files import CONFIG, ENVIRONMENT, LAST, METRICS
from trainer.config import Config
from trainer.run import checkpoint, metrics_log, state
from trainer.run.checkpoint import STARTING
from trainer.run.state import Training

BEFORE = (CONFIG, ENVIRONMENT, METRICS, STARTING)  # there before the first checkpoint


class FolderTaken(DmlError):
    """The folder belongs to another run, or another process trains it."""


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
    """Make and hold the folder of a new run; remove it if the run fails before a checkpoint.

    Of several runs that want the same folder, one gets it: the one that writes STARTING, which is
    there until the first checkpoint is. A folder where a killed run left STARTING is free again.
    """
    if folder.is_file():
        raise _taken(folder)
    made = files.make_folder(folder)
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
                files.remove_empty(made)
            raise


def not_started(folder: Path) -> bool:
    """Whether a run has not reached its first checkpoint, or was stopped before it."""
    return (folder / STARTING).exists() and not (folder / LAST).exists()


def clear_start(folder: Path) -> None:
    """Remove what a run writes before its first checkpoint, STARTING last; nothing else."""
    files.remove_leftovers(folder)
    for name in BEFORE:
        (folder / name).unlink(missing_ok=True)


def _taken(folder: Path) -> FolderTaken:
    fix = f"Choose another --out, or continue that run: {command('train', '--resume', folder)}"
    if not (folder / LAST).exists():
        fix = "Choose another --out; the folder has no checkpoint to continue from."
    return FolderTaken(f"{folder} exists already.", "A run has a folder of its own.", fix)


def start(training: Training) -> None:
    """Write the settings and a first checkpoint, so that lack of room is found now."""
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
    """Raise if there is no room for two checkpoints, each with the optimiser's state."""
    specs = (training.config.optimizer, training.config.optimizer_in(0))
    slots = max(int(spec.momentum > 0) if spec.name == "sgd" else 2 for spec in specs)
    weights = [p for group in training.optimizer.param_groups for p in group["params"]]
    first = (training.folder / LAST).stat().st_size
    each = first + slots * sum(p.numel() * p.element_size() for p in weights)
    free = shutil.disk_usage(training.folder).free
    if free < 2 * each - first:
        (training.folder / LAST).unlink()
        raise DmlError(
            f"There is too little room for checkpoints in {training.folder}.",
            f"Two of them take {size(2 * each)}; {size(free)} are free.",
            "Make room there, or choose another --out.",
        ) from OSError(errno.ENOSPC, "No space left on device")


def write_environment(training: Training, before: dict[str, Any]) -> None:
    """Write where the run was started, and add where it is being resumed."""
    now = metrics_log.environment(str(training.device), training.world.size)
    if before:
        now = before | {"resumed": [*before.get("resumed", []), now | {"epoch": training.epoch}]}
    write_text(training.folder / ENVIRONMENT, to_json(now), force=True)


def save(training: Training, best: bool) -> None:
    """Write a checkpoint; of several processes the first does it."""
    if training.world.rank == 0:
        checkpoint.save(training.folder, state.saved(training), best)
