"""Which files a name stands for."""

import os

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.sources import Sources, locate


def named(place):
    return [file.name for file in place.files]


def test_rows_follow_the_natural_order_of_names(tmp_path):
    for name in ("part-10", "part-9", "part-2", "part-02", "part-1b", "part-1a"):
        np.save(tmp_path / f"{name}.npy", np.ones((1, 2)))
    stems = ["part-1a", "part-1b", "part-02", "part-2", "part-9", "part-10"]
    wanted = [f"{name}.npy" for name in stems]
    assert named(locate(tmp_path)) == wanted
    assert named(locate(tmp_path / "*.npy")) == wanted
    assert locate(f"{tmp_path}/*.npy::key").key == "key"


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


def test_other_files_in_a_folder_are_passed_over_and_other_formats_an_error(tmp_path):
    for name in ("_SUCCESS", ".part-0.parquet.crc", "_meta.parquet", "readme.md", "names.txt"):
        (tmp_path / name).write_text("x")
    np.save(tmp_path / "1.npy", np.ones((1, 2)))
    assert named(locate(tmp_path)) == ["1.npy"]
    (tmp_path / "1.csv").write_text("1,2\n")
    with pytest.raises(DmlError, match=r"several formats: \.csv, \.npy") as error:
        locate(tmp_path)
    assert f"'{tmp_path}/*.csv'" in error.value.fix


def test_a_change_of_any_shard_is_noticed(tmp_path):
    for n in range(3):
        np.save(tmp_path / f"{n}.npy", np.ones((1, 2)))
    sources = Sources(str(tmp_path), None)
    sources.check_unchanged()
    os.utime(tmp_path / "1.npy", (1, 1))
    with pytest.raises(DmlError, match=r"1\.npy was changed"):
        sources.check_unchanged()
