"""The interface through which a run reports to the command line."""

from pathlib import Path

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
