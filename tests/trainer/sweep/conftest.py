"""A plan whose runs take a second each."""

import time
from types import SimpleNamespace

import pytest

from tests.trainer.small import SMALL
from trainer.sweep.plan import Plan
from trainer.sweep.space import cells, from_grid

pytest.importorskip("optuna", reason="Optuna is not installed")


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
