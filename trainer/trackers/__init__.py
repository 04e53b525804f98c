"""The table of trackers, which show the metrics of runs, and the trackers of one run."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrieval import registry
from retrieval.errors import DmlError, install
from retrieval.files import write_text
from retrieval.registry import Registry, own_class
from retrieval.remote.address import without_secrets
from trainer.config import Config
from trainer.results import EpochRecord
from trainer.trackers.tracker import Tracker

STATE = "trackers.json"
LOGGED = ("loss", "lr", "images_per_second", "parts", "monitor", "scores", "train_scores")


@dataclass(frozen=True)
class Entry(registry.Entry):
    """A tracker, the module that it needs, and the extra of pyproject.toml that installs it."""

    module: str = ""
    extra: str = "trackers"


TRACKERS = Registry(
    "tracker",
    Entry(
        "tensorboard",
        "trainer.trackers.tensorboard:TensorBoard",
        "event files in RUN/tensorboard",
        "tensorboard",
        "extras",
    ),
    Entry(
        "mlflow",
        "trainer.trackers.mlflow:MLflow",
        "the server or folder in MLFLOW_TRACKING_URI; by default ./mlflow.db",
        "mlflow",
    ),
    Entry(
        "wandb",
        "trainer.trackers.wandb:WandB",
        "Weights & Biases; with WANDB_MODE=offline, files in RUN/wandb",
        "wandb",
    ),
    option="--log",
    listed="trackers",
    own=lambda path: Entry(path, path, "a tracker of your own"),
)


def check(names: Iterable[str]) -> None:
    """Raise for a tracker that does not exist or is not installed; packages are not imported."""
    for name in names:
        entry = TRACKERS.find(name)
        if not entry.module:  # one of the user's own
            own_class(TRACKERS.kind, entry, Tracker)
        elif find_spec(entry.module) is None:
            raise DmlError(
                f"--log {name} needs the package {entry.module}.",
                "It is not installed.",
                install(entry.extra),
            )


class Trackers:
    """The trackers of one run.

    One that fails is reported once and left out from then on: it never ends the training. What it
    missed is sent when the run is resumed.
    """

    def __init__(self, folder: Path, config: Config, note: Callable[[str], None]) -> None:
        self.folder, self.note = folder, note
        self.state = _read_state(folder)
        self.open: dict[str, Tracker] = {}
        for name in config.run.log:
            own = self.state.setdefault(name, {})
            try:
                kind = own_class(TRACKERS.kind, TRACKERS.find(name), Tracker)
                tracker = kind(folder, config, own.get("run"))
            except Exception as error:
                self._failed(name, error)
                continue
            own["run"] = tracker.run
            self.open[name] = tracker
            note(f"{name}: {tracker.place}")

    def add(self, records: Iterable[EpochRecord]) -> None:
        """Log the records of epochs; each tracker gets those that it does not have yet."""
        records = list(records)

        def send(name: str, tracker: Tracker) -> None:
            own = self.state[name]
            for record in records:
                if record["epoch"] > own.get("epoch", -1):
                    tracker.add(_numbers(record, LOGGED), record["epoch"])
                    own["epoch"] = record["epoch"]

        self._with_each(send)
        with suppress(DmlError):  # a full disk ends the run elsewhere
            write_text(self.folder / STATE, json.dumps(self.state) + "\n", force=True)

    def add_test(self, scores: dict[str, dict[str, float]], epoch: int) -> None:
        """Log scores on the test set, by distance and name, at the best epoch."""
        values = {f"{d} {key}": value for d in scores for key, value in scores[d].items()}
        numbers = _numbers({"test": values}, ["test"])
        self._with_each(lambda _, tracker: tracker.add(numbers, epoch))

    def close(self, finished: bool) -> None:
        """End the run in every tracker."""
        self._with_each(lambda _, tracker: tracker.close(finished))

    def _with_each(self, act: Callable[[str, Tracker], None]) -> None:
        for name, tracker in list(self.open.items()):
            try:
                act(name, tracker)
            except Exception as error:  # whatever a server, a disk or a library raises
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self.open.pop(name, None)
        kind = "" if isinstance(error, DmlError) else f"{type(error).__name__}: "
        text = " ".join(f"{kind}{error}".split())[:200]
        self.note(
            f"{name} failed, and the run continues without it ({without_secrets(text)}); "
            "metrics.jsonl has everything, and --resume sends what is missing"
        )


def _read_state(folder: Path) -> dict[str, dict[str, Any]]:
    """The run's id in each tracker, and the last epoch that the tracker has; empty if unknown."""
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    sound = isinstance(found, dict) and all(isinstance(each, dict) for each in found.values())
    return found if sound else {}


def _numbers(record: Mapping[str, Any], keys: Iterable[str]) -> dict[str, float]:
    """The finite numbers of a record by name: `loss`, `scores/cos`."""
    found = {}
    for key in keys:
        value = record.get(key, {})
        for name, number in (value if isinstance(value, dict) else {"": value}).items():
            if isinstance(number, int | float) and math.isfinite(number):
                found[f"{key}/{name}".rstrip("/")] = float(number)
    return found
