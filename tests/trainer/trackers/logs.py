"""Log the epochs of a run that was stopped and resumed, as a run does."""

from trainer.config import Config, Run
from trainer.trackers import Trackers

RECORDS = [
    {"epoch": 0, "scores": {"cos": 0.25}},
    {"epoch": 1, "loss": 2.5, "lr": 0.1, "parts": {}, "scores": {"cos": 0.5}},
    {"epoch": 2, "loss": 1.5, "lr": 0.1, "monitor": {"spce": None}, "scores": {"cos": 0.75}},
]
TEST = {"cos": {"recall@1": 0.625}}
NOT_INSTALLED = 'too large for make test: pip install -c constraints.txt ".[trackers]"'


def opened(name, folder, notes=None):
    """The trackers of a run folder with one tracker, which works."""
    folder.mkdir(parents=True, exist_ok=True)
    notes = [] if notes is None else notes
    found = Trackers(folder, Config(run=Run(log=(name,))), notes.append)
    assert found.open, notes
    return found


def logged(name, folder):
    """Log two epochs, stop, and go on with all of them, as a resumed run does."""
    first = opened(name, folder)
    first.add(RECORDS[:2])
    first.close(finished=False)
    second = opened(name, folder)
    second.add(RECORDS)
    second.add_test(TEST, 2)
    second.close(finished=True)
    assert first.open[name].run == second.open[name].run
    return second.open[name].run
