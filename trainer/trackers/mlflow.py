"""Log to MLflow: a server, a database or a folder, as MLFLOW_TRACKING_URI says."""

import logging
import os
import re
import time
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from retrieval.remote.address import without_secrets
from trainer.config import Config
from trainer.trackers.tracker import Tracker

PROJECT = "dmltool"
LONGEST = 500  # characters of a parameter that every store takes
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


class MLflow(Tracker):
    """A run of the experiment MLFLOW_EXPERIMENT_NAME, by default dmltool, named by its folder."""

    def __init__(self, folder: Path, config: Config, run: str | None) -> None:
        logging.getLogger("mlflow").setLevel(logging.ERROR)  # tables it makes, on the progress bar
        logging.getLogger("alembic").setLevel(logging.ERROR)
        os.environ.setdefault(RETRIES, "3")  # its 7 stop the training for minutes if a server dies
        self.client = MlflowClient()
        if run is None:
            run = self._created(str(folder), config)
        else:
            self.client.update_run(run, status="RUNNING")
        self.run = run
        self.place = f"run {run} in {without_secrets(self.client.tracking_uri)}"

    def _created(self, name: str, config: Config) -> str:
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(wanted)
        number = experiment.experiment_id if experiment else self.client.create_experiment(wanted)
        run = self.client.create_run(number, run_name=name).info.run_id
        settings = [Param(key, str(value)[:LONGEST]) for key, value in config.dotted().items()]
        self.client.log_batch(run, params=settings)
        return run

    def add(self, values: dict[str, float], epoch: int) -> None:
        now = int(time.time() * 1000)
        allowed = {re.sub(r"[^\w\-. :/]", "_at_", name): value for name, value in values.items()}
        metrics = [Metric(name, value, now, epoch) for name, value in allowed.items()]
        self.client.log_batch(self.run, metrics=metrics)

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")
