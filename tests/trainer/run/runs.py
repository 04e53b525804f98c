"""Train small runs, interrupt them, and compare what they leave."""

import hashlib

import torch

from trainer.run import checkpoint, train
from trainer.run.watch import Watch


def weights(folder, name=checkpoint.LAST):
    state = checkpoint.load(folder / name)
    return {
        f"{part}.{key}": value
        for part in ("embedder", "loss")
        for key, value in state[part].items()
    }


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different, different


def assert_same_files(a, b):
    """An exported model names its checkpoint by the hash of the file."""
    for name in (checkpoint.BEST, checkpoint.LAST):
        digests = {hashlib.sha256((run / name).read_bytes()).hexdigest() for run in (a, b)}
        assert len(digests) == 1, name


def fit(config, folder, watch=None, resume=False):
    """Train without scores of the test set, which take as long as two epochs."""
    return train.train(config, folder, watch, resume=resume, test=False)


class Interruption(BaseException):
    pass


class Interrupting(Watch):
    """Ends a run after so many steps."""

    def __init__(self, steps):
        self.left = steps

    def step(self, *_):
        self.left -= 1
        if self.left < 0:
            raise Interruption


def told_by(texts):
    watch = Watch()
    watch.note = texts.append
    return watch
