"""Run commands in the process of a test; the rows of a small table to run them on."""

import numpy as np
from click.testing import CliRunner

from cli import main

X = np.random.default_rng(0).standard_normal((12, 5))
Y = np.arange(12) // 3


def call(*args):
    """Runs a command in this process."""
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)
