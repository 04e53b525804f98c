"""What a run needs of a tracker."""

from pathlib import Path
from typing import Protocol

from trainer.config import Config


class Tracker(Protocol):
    """The base class of trackers.

    Tracker(folder, config, run) opens a run: a new one, or that of the id `run`, which an earlier
    tracker of the same folder had as its attribute `run`. add(values, epoch) logs numbers by name;
    close(finished) ends the run. Errors that it raises are reported and do not end the training.
    """

    run: str
    """The id by which a resumed run finds its own run again."""
    place: str
    """Where the run can be seen, for the user."""

    def __init__(self, folder: Path, config: Config, run: str | None) -> None: ...
    def add(self, values: dict[str, float], epoch: int) -> None: ...
    def close(self, finished: bool) -> None: ...
