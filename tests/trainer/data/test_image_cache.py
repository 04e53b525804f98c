"""Resized images are kept whole or not at all, and found again."""

import os
import re
import resource
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from retrieval import files
from retrieval.errors import DmlError
from tests.trainer.data.pictures import SPEC, STILL, epochs, forbid_reading, spoil
from trainer.data import image_cache, transforms
from trainer.data.datasets.records import build
from trainer.data.source import open_images


def test_a_check_is_remembered_until_a_file_changes(data, monkeypatch):
    open_images(data, SPEC, cache="none")
    with monkeypatch.context() as patch:
        forbid_reading(patch)
        open_images(data, SPEC, cache="none")
    spoil(data, 4)
    with pytest.raises(DmlError, match="1 of 24"):
        open_images(data, SPEC, cache="none")
    with pytest.raises(DmlError, match="1 of 24"):
        open_images(data, SPEC, cache="none")


def test_a_check_needs_no_place_to_be_remembered_in(data, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_images(data, SPEC, cache="none").data is data


def test_a_second_run_reads_the_file_of_the_first(data, monkeypatch):
    expected = epochs(open_images(data, SPEC, cache="disk"))[0]
    forbid_reading(monkeypatch)
    seen = []
    source = open_images(data, SPEC, cache="disk", progress=lambda *done: seen.append(done))
    assert torch.equal(epochs(source)[0], expected)
    assert seen[-1] == (24, 24)


@pytest.mark.parametrize(
    "change", ["resize", "file", "keep_ratio", "interpolation", "draft", "rows"]
)
def test_other_images_have_another_file(data, cache, change):
    open_images(data, SPEC, cache="disk")
    spec = SPEC
    if change == "file":
        os.utime(data.root / data.paths[0], ns=(0, 0))
    elif change == "rows":
        data = data.take(np.arange(23))
    else:
        other = {"resize": 44, "keep_ratio": False, "interpolation": "bicubic", "draft": 0}
        value = other[change]
        spec = replace(SPEC, **{change: value})
    source = open_images(data, spec, cache="disk")
    assert len(list(cache.glob("*.images"))) == 2
    assert (source.resized(2) == transforms.resized(data.image(2, spec.short_side), spec)).all()


def test_random_changes_do_not_need_another_file(data, cache):
    open_images(data, SPEC, cache="disk")
    open_images(data, replace(SPEC, flip=False, crop=30, rotate=1.0), cache="disk")
    assert len(list(cache.glob("*.images"))) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1],
        lambda whole: whole[:1000],
        lambda whole: b"",
        lambda whole: whole + b"x",
        lambda whole: b"something else" + whole[14:],
        lambda whole: whole[:16] + b"\x63" + whole[17:],  # the version
    ],
)
def test_a_damaged_file_is_made_anew(data, cache, damage):
    expected = epochs(open_images(data, SPEC, cache="disk"))[0]
    (file,) = cache.glob("*.images")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert torch.equal(epochs(open_images(data, SPEC, cache="disk"))[0], expected)
    assert file.read_bytes() == whole


def test_a_full_disk_is_told_and_nothing_is_left(data, cache):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(DmlError) as caught:
            open_images(data, SPEC, cache="disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in caught.value.why
    assert str(cache) in caught.value.what
    assert "--cache none" in caught.value.fix
    assert list(cache.iterdir()) == []
    open_images(data, SPEC, cache="disk")


def test_an_interrupt_leaves_no_part_of_a_file(data, cache):
    def progress(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_images(data, SPEC, cache="disk", progress=progress)
    assert list(cache.iterdir()) == []


def test_what_a_killed_run_has_left_is_removed_whatever_it_was_caching(data, cache):
    cache.mkdir(exist_ok=True)
    left = cache / ".another-data-set.images.0123abcd.tmp"
    left.write_bytes(b"part")
    living, name = files.create_temporary(cache / "third.images")
    with living:
        open_images(data, SPEC, cache="disk")
        assert not left.exists()
        assert name.exists()


@pytest.mark.parametrize("kept", ["ram", "disk"])
def test_too_many_images_are_refused_before_all_are_read(squares, kept, monkeypatch, cache):
    data = squares.take(np.zeros(5000, np.int64))
    free = 36 * 36 * 3 * 1000
    monkeypatch.setattr(image_cache, "available_memory", lambda: free)
    usage = image_cache.shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(image_cache.shutil, "disk_usage", lambda _: usage)
    seen = []
    with pytest.raises(DmlError, match=r"fit into memory|cannot be kept") as caught:
        open_images(data, STILL, cache=kept, progress=lambda done, _: seen.append(done))
    assert re.search(r"about [\d.]+ .B; [\d.]+ .B are free", caught.value.why)
    assert max(seen) < 400
    assert kept == "disk" or "--cache disk" in caught.value.fix


def test_an_unevenly_sized_set_is_kept_whole(tmp_path):
    """Later images larger than the first ones foretold."""

    @dataclass(frozen=True)
    class Growing:
        def __call__(self, path, short_side=None):
            side = 8 if int(path) < 600 else 64
            return np.full((side, side, 3), int(path) % 251, np.uint8)

    data = build("growing", None, [(str(n), str(n % 3), "train") for n in range(1000)], Growing())
    kept = open_images(data, replace(STILL, resize=0), cache="ram").store
    assert kept.image(599).shape == (8, 8, 3)
    assert [int(kept.image(n)[-1, -1, -1]) for n in (0, 599, 600, 999)] == [0, 97, 98, 246]
    assert not kept.uniform
