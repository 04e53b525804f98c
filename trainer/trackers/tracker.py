"""What a run needs of a tracker."""

from pathlib import Path
from typing import Protocol

from trainer.config import Config


class Tracker(Protocol):
    """What a run needs of a tracker."""

    run: str
    """The id by which a resumed run finds its own run again."""
    place: str
    """Where the run can be seen, for the user."""

    def __init__(self, folder: Path, config: Config, run: str | None) -> None: ...
    def add(self, values: dict[str, float], epoch: int) -> None: ...
    def close(self, finished: bool) -> None: ...
