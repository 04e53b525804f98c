"""Images are read once before the start, and batches hold what the transforms make of them."""

import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from retrieval.errors import DmlError
from tests.trainer.data.pictures import SPEC, STILL, spoil
from trainer.config import Input
from trainer.data import sampling, transforms
from trainer.data.source import open_images


@pytest.mark.parametrize("crop", [36, 32, 31, 40])  # 40: larger than the images
def test_kept_images_of_one_size_are_taken_at_once(squares, crop):
    spec = replace(STILL, resize=0, crop=crop)
    kept, plain = (open_images(squares, spec, cache=c) for c in ("ram", "none"))
    assert kept.store.uniform
    rows = np.array([7, 3, 3, 29])
    assert (kept.batch(rows) == plain.batch(rows)).all()


def test_drawn_images_are_kept_in_memory_and_files_are_not(squares, data):
    assert open_images(squares, STILL).store.file is None
    assert open_images(data, STILL).store is None


def test_a_source_can_be_sent_to_another_process(data):
    rows = np.arange(len(data))
    for kept in ("none", "ram", "disk"):
        source = open_images(data, SPEC, cache=kept)
        sent = pickle.dumps(source)
        assert kept == "ram" or len(sent) < 10_000
        copy = pickle.loads(sent)  # noqa: S301 our own
        keys = sampling.keys(0, 0, 1, len(rows))[0]
        assert (copy.batch(rows, keys) == source.batch(rows, keys)).all()


@pytest.mark.parametrize("kept", ["none", "ram", "disk"])
def test_bad_images_are_listed_before_the_start(data, kept, cache):
    spoil(data, 3, 10)
    with pytest.raises(DmlError) as caught:
        open_images(data, SPEC, cache=kept)
    assert caught.value.what == "2 of 24 images cannot be read."
    assert str(data.root / data.paths[3]) in caught.value.why
    assert str(data.root / data.paths[10]) in caught.value.why
    assert "--skip-bad" in caught.value.fix


@pytest.mark.parametrize("kept", ["none", "ram", "disk"])
def test_bad_images_are_left_out_on_request(data, kept):
    spoil(data, 3, 10)
    good = np.setdiff1d(np.arange(24), [3, 10])
    for _ in range(2):  # the second time by what the first has found
        source = open_images(data, SPEC, cache=kept, skip_bad=True)
        assert source.data.paths == tuple(data.paths[row] for row in good)
        assert "2 unreadable images left out" in source.data.notes[-1]
        assert data.paths[3] in source.data.notes[-1]
        for row, old in enumerate(good):
            expected = transforms.resized(data.image(old, SPEC.short_side), SPEC)
            assert (source.resized(row) == expected).all()


@pytest.mark.parametrize("kept", ["none", "ram"])
def test_a_class_without_a_good_image_is_an_error(data, kept):
    spoil(data, 5, 11, 17, 23)
    with pytest.raises(DmlError, match="test has no images of 1 class") as caught:
        open_images(data, SPEC, cache=kept, skip_bad=True)
    assert "read of 5" in caught.value.why


def test_the_check_refuses_what_the_loader_would_refuse(data, tmp_path):
    long = data.root / data.paths[1]
    Image.new("L", (9000, 1)).save(long, "PNG")  # 40 x 360,000 pixels
    open_images(data, SPEC, cache="none")
    Image.new("L", (2_500_000, 1)).save(long, "PNG")
    for kept in ("none", "ram", "none"):
        with pytest.raises(DmlError, match="1 of 24") as caught:
            open_images(data, SPEC, cache=kept)
        assert "are allowed" in caught.value.why
    Image.new("RGB", (8000, 6000)).save(long, "JPEG")
    open_images(data, SPEC, cache="none")
    assert data.image(1, SPEC.short_side).shape == (750, 1000, 3)
    full = replace(SPEC, draft=0)
    with pytest.raises(DmlError, match="1 of 24") as caught:
        open_images(data, full, cache="none")
    assert "are allowed" in caught.value.why
    with pytest.raises(DmlError, match="cannot be read"):
        data.image(1, full.short_side)


def test_large_jpegs_are_decoded_at_twice_the_size_and_so_nearly_as_in_full(data, rng):
    noise = Image.fromarray(rng.integers(0, 256, (125, 125, 3), dtype=np.uint8))
    noise.resize((500, 500), Image.Resampling.BICUBIC).save(data.root / data.paths[0], quality=95)
    spec = replace(STILL, resize=60)
    assert data.image(0, spec.short_side).shape == (125, 125, 3)  # not 63, the least above 60
    full, usual, least = (
        open_images(data, replace(spec, draft=draft), cache="none").resized(0).astype(float)
        for draft in (0, Input.draft, 1)
    )
    assert 0 < np.abs(usual - full).mean() < 0.5 * np.abs(least - full).mean()


def test_progress_reaches_the_end(data):
    for kept in ("none", "ram", "disk"):
        seen = []
        open_images(data, SPEC, cache=kept, progress=lambda *done, seen=seen: seen.append(done))
        assert seen[-1] == (24, 24)
        assert seen == sorted(seen)


@pytest.mark.parametrize("name", ["images", "transforms", "image_cache", "source", "datasets"])
def test_reading_images_loads_no_torch(name):
    code = f"import sys, trainer.data.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
