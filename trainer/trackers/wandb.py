"""Log to Weights & Biases, online or into files of the run folder."""

import os
from pathlib import Path
from uuid import uuid4

import wandb

from trainer.config import Config
from trainer.trackers.tracker import Tracker

PROJECT = "dmltool"


class WandB(Tracker):
    """A run of the project WANDB_PROJECT, by default dmltool, named by its folder."""

    def __init__(self, folder: Path, config: Config, run: str | None) -> None:
        online = os.environ.get("WANDB_MODE", "online") == "online"
        if online and not wandb.login(prompt=False):
            raise PermissionError("No account: run `wandb login`, or set WANDB_MODE=offline.")
        self.tracked = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=str(folder),
            id=run or uuid4().hex[:12],
            resume="allow",
            dir=str(folder),
            config=config.to_dict(),
            allow_val_change=True,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run = self.tracked.id
        # Epochs are the x axis: W&B's own step must never fall, also not in a resumed run.
        self.tracked.define_metric("*", step_metric="epoch")
        self.place = f"wandb sync {Path(self.tracked.dir).parent} uploads it"
        if not self.tracked.offline:
            self.place = str(self.tracked.url)

    def add(self, values: dict[str, float], epoch: int) -> None:
        self.tracked.log({"epoch": epoch, **values})

    def close(self, finished: bool) -> None:
        self.tracked.finish(exit_code=0 if finished else 1)
