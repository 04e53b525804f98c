"""Which files a name stands for."""

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.loading.sources import locate


def named(place):
    return [file.name for file in place.files]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path):
    np.save(tmp_path / "x[1].npy", np.ones((1, 2)))
    assert not locate(tmp_path / "x[1].npy").is_set
    with pytest.raises(DmlError, match="matches no file"):
        locate(tmp_path / "y[1].npy")


def test_a_pattern_without_files_names_a_folder_that_is_there(tmp_path):
    for pattern in ("none/*.npy", "*/none/x*.npy"):
        with pytest.raises(DmlError, match="matches no file") as caught:
            locate(f"{tmp_path}/{pattern}")
        assert caught.value.fix == f"Look there: ls {tmp_path}"


def test_folders_below_are_taken_by_two_stars_only(tmp_path):
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "2.npy", np.ones((1, 2)))
    np.save(tmp_path / "1.npy", np.ones((1, 2)))
    assert named(locate(tmp_path)) == ["1.npy"]
    for stars in ("**", "**/**"):  # glob gives 2.npy twice for the latter
        assert named(locate(f"{tmp_path}/{stars}/*.npy")) == ["1.npy", "2.npy"]


def test_links_that_lead_in_a_circle_are_an_error(tmp_path, monkeypatch):
    np.save(tmp_path / "1.npy", np.ones((1, 2)))
    for name in ("a", "b"):  # glob would find 2 ** 40 files
        (tmp_path / name).symlink_to(".")
    with pytest.raises(DmlError, match="leads in a circle") as error:
        locate(tmp_path / "**" / "*.npy")
    assert error.value.why.startswith(f"{tmp_path}/")
    for name in ("a", "b"):
        (tmp_path / name).unlink()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    np.save("2.npy", np.ones((1, 2)))
    for pattern in ("../other/*.npy", "../other/**/*.npy", "../other/../other/**"):
        assert named(locate(pattern)) == ["2.npy"]
