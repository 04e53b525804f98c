"""Which files a name stands for."""

import os

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.loading import load
from retrieval.sources import Sources, locate


def named(place):
    return [file.name for file in place.files]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    np.save(tmp_path / "x[1].npy", np.ones((1, 2)))
    assert not locate(tmp_path / "x[1].npy").is_set
    with pytest.raises(DmlError, match="matches no file"):
        locate(tmp_path / "y[1].npy")


def test_folders_below_are_taken_by_two_stars_only(tmp_path):
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "2.npy", np.ones((1, 2)))
    np.save(tmp_path / "1.npy", np.ones((1, 2)))
    assert named(locate(tmp_path)) == ["1.npy"]
    assert named(locate(tmp_path / "**" / "*.npy")) == ["1.npy", "2.npy"]


def test_a_change_of_any_shard_is_noticed(tmp_path):
    for n in range(3):
        np.save(tmp_path / f"{n}.npy", np.ones((1, 2)))
    sources = Sources(str(tmp_path), None)
    sources.check_unchanged()
    os.utime(tmp_path / "1.npy", (1, 1))
    with pytest.raises(DmlError, match=r"1\.npy was changed"):
        sources.check_unchanged()


def test_a_file_that_was_changed_while_it_was_read_is_told_as_such(tmp_path):
    file = tmp_path / "x.npz"
    np.savez(file, embeddings=np.ones((4, 2), np.float32), labels=np.arange(4))
    sources = Sources(str(file))
    with sources.being_read():
        load(file, places=sources.places)
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(DmlError, match="was changed while it was read"), sources.being_read():
        load(file, places=sources.places)
    damaged = Sources(str(file))  # nobody changes it now
    with pytest.raises(DmlError, match="cannot be read as npz"), damaged.being_read():
        load(file, places=damaged.places)
