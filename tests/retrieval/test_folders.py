"""Which files of a folder hold its embeddings."""

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.sources import locate


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


def test_other_files_in_a_folder_are_passed_over_and_other_formats_an_error(tmp_path):
    for name in ("_SUCCESS", ".part-0.parquet.crc", "_meta.parquet", "readme.md", "names.txt"):
        (tmp_path / name).write_text("x")
    np.save(tmp_path / "1.npy", np.ones((1, 2)))
    assert named(locate(tmp_path)) == ["1.npy"]
    (tmp_path / "1.csv").write_text("1,2\n")
    with pytest.raises(DmlError, match=r"several formats: \.csv, \.npy") as error:
        locate(tmp_path)
    assert f"'{tmp_path}/*.csv'" in error.value.fix
