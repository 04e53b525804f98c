"""Rows, and a writer that may stop before all of them are written."""

from contextlib import suppress

import numpy as np

from retrieval.formats.hdf5 import writing as hdf5

X = np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)
Y = np.arange(10) // 2
PATHS = np.array([f"{n}.png" for n in range(10)])
ATTRS = {"model_sha256": "abc", "preprocessing": {"size": 224, "crop": "centre"}}


def writer(path, **changes):
    given = {"splits": {"test": (Y, PATHS)}, "dim": 4, "attrs": ATTRS} | changes
    return hdf5.Writer(path, **given)


def stop_early(path, **changes):
    with suppress(KeyboardInterrupt), writer(path, **changes) as out:
        out.write("test", 0, X[:6])
        raise KeyboardInterrupt
