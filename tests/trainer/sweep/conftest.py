"""A plan whose runs take a second each, and a watch that kills them."""

import time
from types import SimpleNamespace

import pytest

from tests.kills import Killed
from tests.trainer.conftest import SMALL
from trainer.sweep.plan import Plan
from trainer.sweep.runs import SweepWatch
from trainer.sweep.space import cells, from_grid

pytest.importorskip("optuna", reason="Optuna is not installed")

LR = "optimizer.lr=0.0001,0.003"


class KilledAt(SweepWatch):
    """Raises at the so-many-th epoch."""

    def __init__(self, epochs):
        self.left = epochs

    def epoch(self, record):
        self.left -= 1
        if not self.left:
            raise Killed


@pytest.fixture(autouse=True)
def _waiting_ends(monkeypatch):
    """A sweep that waits for a trial that nobody trains fails, and does not hang."""
    left = iter(range(60))

    def sleep(seconds):
        assert next(left, None) is not None, "the sweep waits for a trial that nobody trains"
        time.sleep(seconds)

    monkeypatch.setattr("trainer.sweep.sweep.time", SimpleNamespace(sleep=sleep))


@pytest.fixture
def plan(pictures):
    """plan("optimizer.lr=0.001,0.01", seeds=2): a sweep over pictures."""

    def made(*grid, **changes):
        space = from_grid(grid)
        given = {
            "flags": {
                "data.dataset": "folder",
                "data.root": str(pictures),
                "network.backbone": "smallcnn",
                "network.weights": "none",
                "batches.size": 16,
                "schedule.epochs": 1,
                "run.device": "cpu",
                "data.workers": 0,
            },
            "settings": tuple(word.removeprefix("--set=") for word in SMALL if "--set" in word),
            "preset": "photos-scratch-ce",
            "space": space,
            "seeds": 2,
            "threads": 1,
        }
        if space and "trials" not in changes:
            given["trials"] = len(cells(space))
        return Plan(**given | changes)

    return made
