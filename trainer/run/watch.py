"""The interfaces through which a run reports: to the command line, and to trackers."""

from pathlib import Path
from typing import Protocol

from trainer.config import Config
from trainer.results import EpochRecord


class Watch:
    """Receives the progress of a run; each method may be overridden and does nothing here."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Work before the first epoch and after the last."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def begin(self, folder: Path, epochs: int, steps: int, epoch: int) -> None:
        """Before the first epoch; `epoch` are done already."""

    def step(self, epoch: int, step: int, steps: int, values: dict[str, float]) -> None:
        """After some of the steps: loss, its parts, images_per_second."""

    def epoch(self, record: EpochRecord) -> None:
        """A line of metrics.jsonl."""


class Tracker(Protocol):
    """What a run needs of a tracker."""

    run: str
    """The id by which a resumed run finds its own run again."""
    place: str
    """Where the run can be seen, for the user."""

    def __init__(self, folder: Path, config: Config, run: str | None) -> None: ...
    def add(self, values: dict[str, float], epoch: int) -> None: ...
    def close(self, finished: bool) -> None: ...
