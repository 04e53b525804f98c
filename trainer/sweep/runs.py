"""Train the runs of one setting, one per seed, and continue interrupted ones."""

import json
from collections.abc import Mapping
from pathlib import Path

from retrieval.distributed.world import from_environment
from retrieval.errors import DmlError
from retrieval.run_files import LAST, RESULT, VALIDATION
from trainer.config import Config
from trainer.resolve import ANY_TIME, resumed
from trainer.results import Outcome, SweepResult, Validation
from trainer.run.checkpoint import load_config
from trainer.run.train import train
from trainer.run.watch import Watch
from trainer.sweep import results
from trainer.sweep.plan import Plan, comparable


class SweepWatch(Watch):
    """Receives the progress of a sweep, and that of its runs."""

    def trial(self, number: int, trials: int, values: dict[str, str]) -> None:
        """A trial begins."""

    def trained(self, values: dict[str, str], outcomes: list[Outcome] | str) -> None:
        """A trial has ended, with an outcome for every seed or the reason of a failure."""


def train_all_seeds(plan: Plan, folder: Path, watch: Watch) -> SweepResult:
    """Train one setting with several seeds, each scored on the test set: the simplest sweep."""
    check_alone()
    outcomes = train_seeds(plan.runs({}), folder, watch, test=True)
    found = results.of_seeds(outcomes, folder.name, plan.config())
    results.write(found, folder)
    return found


def train_seeds(
    configs: Mapping[int, Config], folder: Path, watch: Watch, test: bool
) -> list[Outcome]:
    """Train a run for every seed under FOLDER/seed-N; finished ones are read."""
    return [
        train_seed(config, folder / f"seed-{seed}", watch, test) for seed, config in configs.items()
    ]


def train_seed(config: Config, folder: Path, watch: Watch, test: bool) -> Outcome:
    """Train a run, continue an interrupted one, or read a finished one.

    A finished run that was not scored on the test set is scored now if `test` is true.
    """
    started = (folder / LAST).exists()
    if started:
        config = continued(config, folder)
    found = finished(config, folder)
    if found is None or (test and found["test"] is None):
        train(config, folder, watch, resume=started, test=test)
        found = finished(config, folder)
    assert found is not None, folder
    return found


def check_alone() -> None:
    """Raise under torchrun or srun, whose processes would each train all runs."""
    if from_environment().size > 1:
        raise DmlError(
            "Several seeds or settings cannot be trained by torchrun or srun.",
            "Its processes share one run.",
            "Start the command without it; `dmltool sweep --workers N` trains N runs at a time.",
        )


def continued(config: Config, folder: Path) -> Config:
    """The saved settings of a run, with new values of those that its result does not depend on."""
    saved = load_config(folder)
    ours, theirs = comparable(config), comparable(saved)
    if ours != theirs:
        key = next(k for k in (*ours, *theirs) if ours.get(k) != theirs.get(k))
        raise DmlError(
            f"{folder} holds a run with other settings.",
            f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here.",
            "Choose another --out.",
        )
    given = config.dotted()
    return resumed(saved, {key: given[key] for key in ANY_TIME}, ())


def finished(config: Config, folder: Path) -> Outcome | None:
    """The outcome of a run whose last epoch is scored; None before that."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        validation: Validation | None = None
        if config.run.select != "last":
            validation = json.loads((folder / VALIDATION).read_text(encoding="utf-8"))
        if result["epochs"] < config.schedule.epochs:
            return None
        return {
            "seed": config.run.seed,
            "run": str(folder),
            "best_epoch": result["best_epoch"],
            "validation": validation,
            "test": result["test"] and result["test"]["distances"],
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None
