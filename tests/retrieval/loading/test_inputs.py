"""The input files of a command."""

import os

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.loading.inputs import Inputs


def test_a_change_of_any_shard_is_noticed(tmp_path):
    for n in range(3):
        np.save(tmp_path / f"{n}.npy", np.ones((1, 2)))
    inputs = Inputs(str(tmp_path), None)
    inputs.check_unchanged()
    os.utime(tmp_path / "1.npy", (1, 1))
    with pytest.raises(DmlError, match=r"1\.npy was changed"):
        inputs.check_unchanged()


def test_a_file_that_was_changed_while_it_was_read_is_told_as_such(tmp_path):
    file = tmp_path / "x.npz"
    np.savez(file, embeddings=np.ones((4, 2), np.float32), labels=np.arange(4))
    inputs = Inputs(str(file))
    inputs.load(str(file))
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DmlError, match="was changed while it was read"):
        inputs.load(str(file))
    damaged = Inputs(str(file))  # nobody changes it now
    with pytest.raises(DmlError, match="cannot be read as npz"):
        damaged.load(str(file))
