"""Log to TensorBoard: event files in the run folder."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from trainer.config import Config
from trainer.trackers.tracker import Tracker

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """A run is its folder: the files of a resumed run join the earlier ones."""

    def __init__(self, folder: Path, config: Config, run: str | None) -> None:
        self.run = FOLDER
        self.place = f"tensorboard --logdir {folder / FOLDER} shows it"
        self.writer = SummaryWriter(str(folder / FOLDER))

    def add(self, values: dict[str, float], epoch: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()
