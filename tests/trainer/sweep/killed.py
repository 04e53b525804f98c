"""Two settings of a sweep, and a watch that kills its runs."""

from tests.kills import Killed
from trainer.sweep.runs import SweepWatch

LR = "optimizer.lr=0.0001,0.003"


class KilledAt(SweepWatch):
    """Raises at the so-many-th epoch."""

    def __init__(self, epochs):
        self.left = epochs

    def epoch(self, record):
        self.left -= 1
        if not self.left:
            raise Killed
