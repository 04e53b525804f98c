"""What a run tells while it goes on. No torch: the command line fills it in."""

from pathlib import Path
from typing import Any


class Watch:
    """What a run tells while it goes on; each method may be overridden."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Work before the first epoch and after the last."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def begin(self, folder: Path, epochs: int, steps: int, epoch: int) -> None:
        """Before the first epoch; `epoch` are done already."""

    def step(self, epoch: int, step: int, steps: int, values: dict[str, float]) -> None:
        """After some of the steps: loss, its parts, images_per_second."""

    def epoch(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
