"""Transforms have the values and the distributions of torchvision's, which the recipes used."""

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from retrieval.errors import DmlError
from trainer.config import Input
from trainer.data import transforms
from trainer.networks.vision import torchvision

T = torchvision.transforms
F = torchvision.transforms.functional
MODES = {"bilinear": T.InterpolationMode.BILINEAR, "bicubic": T.InterpolationMode.BICUBIC}
PLAIN = Input(resize=64, crop=56, train_crop="center", flip=False)


def apart(ours, theirs):
    """The largest difference. It is rounding: Pillow 13 and later begin with the columns where the
    height shrinks most (Pillow pull request 9549), this code and earlier versions with the rows.
    """
    return np.abs(ours.astype(int) - np.asarray(theirs)).max()


# Evaluation


@pytest.mark.parametrize("size", [(200, 133), (133, 200), (64, 64), (97, 65), (70, 300), (40, 30)])
@pytest.mark.parametrize("keep_ratio", [True, False])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_is_resize_and_center_crop_of_torchvision(
    picture, size, keep_ratio, interpolation
):
    image = picture(*size)
    spec = replace(PLAIN, keep_ratio=keep_ratio, interpolation=interpolation)
    target = 64 if keep_ratio else (64, 64)
    theirs = T.Compose([T.Resize(target, MODES[interpolation]), T.CenterCrop(56)])
    assert apart(transforms.for_testing(image, spec), theirs(Image.fromarray(image))) <= 2


def test_a_resized_image_is_not_resized_again(picture):
    once = transforms.resized(picture(211, 97), PLAIN)
    assert once.shape == (64, 139, 3)
    assert transforms.resized(once, PLAIN) is once


def test_resize_zero_leaves_images_as_they_are(picture):
    image = picture(50, 31)
    assert transforms.resized(image, replace(PLAIN, resize=0)) is image


@pytest.mark.parametrize(("width", "height"), [(28, 28), (27, 30), (100, 20), (20, 100)])
def test_a_smaller_image_lies_in_the_middle_of_its_border_colour(width, height):
    image = np.full((height, width, 3), (10, 20, 30), np.uint8)
    image[2:-2, 2:-2] = 200
    out = transforms.for_testing(image, Input(resize=0, crop=32, train_crop="center"))
    theirs = np.asarray(F.center_crop(Image.fromarray(image), [32, 32]))
    assert out.shape == (32, 32, 3)
    assert ((out == 200).all(-1) == (theirs == 200).all(-1)).all()  # theirs pads with black
    assert set(map(tuple, out.reshape(-1, 3).tolist())) == {(10, 20, 30), (200, 200, 200)}


def test_an_image_too_long_to_be_resized_is_an_error():
    with pytest.raises(DmlError, match="2 x 9000"):
        transforms.resized(np.zeros((9000, 2, 3), np.uint8), Input(resize=256))


@pytest.mark.parametrize("train_crop", ["resized", "random", "center"])
@pytest.mark.parametrize("rotate", [0.0, 9.0])
def test_a_kept_image_gives_the_pixels_of_the_image_itself(picture, train_crop, rotate):
    spec = Input(resize=64, crop=56, train_crop=train_crop, rotate=rotate)
    image = picture(150, 100)
    small = transforms.resized(image, spec)
    for key in range(10):
        one, two = (transforms.for_training(i, spec, random.Random(key)) for i in (image, small))
        assert (one == two).all()
    assert (transforms.for_testing(image, spec) == transforms.for_testing(small, spec)).all()


# Crops


def test_parts_are_distributed_as_those_of_random_resized_crop(picture):
    spec = Input(resize=0, scale=(0.16, 1.0), ratio=(0.75, 4 / 3))
    image, rng = picture(96, 64), random.Random(5)
    ours = np.array([transforms.random_part(96, 64, spec, rng) for _ in range(4000)], float)
    left, top, width, height = ours.T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (left + width).max() == 96
    assert (top + height).max() == 64
    area, ratio = width * height / (96 * 64), width / height
    assert area.min() > 0.15
    assert ratio.min() > 0.71  # whole pixels
    assert ratio.max() < 1.4
    torch.manual_seed(5)
    theirs = np.array(
        [
            T.RandomResizedCrop.get_params(Image.fromarray(image), spec.scale, spec.ratio)
            for _ in range(4000)
        ]
    )
    y, x, h, w = theirs.T
    for mine, other in (
        (area, h * w / (96 * 64)),
        (np.log(ratio), np.log(w / h)),
        (left, x),
        (top, y),
    ):
        # two samples of 4,000: the distance of their distributions is below 0.05 but once in 1e4
        points = np.sort(np.concatenate([mine, other]))
        cdf = [np.searchsorted(np.sort(v), points, "right") / 4000 for v in (mine, other)]
        assert np.abs(cdf[0] - cdf[1]).max() < 0.05


@pytest.mark.parametrize("size", [(300, 20), (20, 300), (50, 49)])
def test_where_no_part_fits_the_middle_is_taken_as_by_torchvision(picture, size):
    spec = Input(resize=0, scale=(1.0, 1.0), ratio=(0.9, 0.95))
    image = picture(*size)
    y, x, h, w = T.RandomResizedCrop.get_params(Image.fromarray(image), spec.scale, spec.ratio)
    assert transforms.random_part(*size, spec, random.Random(0)) == (x, y, w, h)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_resized_crop_has_the_pixels_of_torchvision(picture, interpolation):
    spec = Input(resize=64, crop=56, flip=False, interpolation=interpolation)
    image = picture(150, 100)
    small = F.resize(Image.fromarray(image), 64, MODES[interpolation])
    for key in range(20):
        x, y, w, h = transforms.random_part(*small.size, spec, random.Random(key))
        expected = F.resized_crop(small, y, x, h, w, [56, 56], MODES[interpolation])
        assert apart(transforms.for_training(image, spec, random.Random(key)), expected) <= 2


def test_a_random_crop_reaches_every_place_equally_often():
    x, y = np.meshgrid(np.arange(34), np.arange(33))
    image = np.stack([x, y, x], -1).astype(np.uint8)
    spec = Input(resize=0, crop=32, train_crop="random", flip=False)
    rng = random.Random(1)
    corners = Counter(
        tuple(transforms.for_training(image, spec, rng)[0, 0, :2].tolist()) for _ in range(3000)
    )
    assert sorted(corners) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert min(corners.values()) > 400


def test_half_of_the_images_are_mirrored(picture):
    image = picture(56, 56)
    spec = replace(PLAIN, resize=0, flip=True)
    results = [transforms.for_training(image, spec, random.Random(key)) for key in range(400)]
    mirrored = sum((result == image[:, ::-1]).all() for result in results)
    assert 160 < mirrored < 240
    assert all((r == image).all() or (r == image[:, ::-1]).all() for r in results)


def test_without_random_changes_training_sees_what_evaluation_sees(picture):
    image = picture(90, 70)
    assert not transforms.is_random(PLAIN)
    assert (
        transforms.for_training(image, PLAIN, random.Random(0))
        == transforms.for_testing(image, PLAIN)
    ).all()


@pytest.mark.parametrize(
    "change",
    [
        {"flip": True},
        {"train_crop": "random"},
        {"train_crop": "resized"},
        {"shift": 0.1},
        {"jitter": (0.1, 0.0, 0.0, 0.0)},
        {"rotate": 5.0},
        {"zoom": (0.9, 1.0)},
        {"shear": 5.0},
    ],
)
def test_every_random_change_is_known_as_such(picture, change):
    spec, image = replace(PLAIN, **change), picture(100, 80)
    assert transforms.is_random(spec)
    seen = {transforms.for_training(image, spec, random.Random(k)).tobytes() for k in range(8)}
    assert len(seen) > 1


def test_a_key_determines_the_result(picture):
    image = picture(120, 90)
    spec = Input(
        resize=64, crop=56, jitter=(0.3, 0.3, 0.3, 0.1), rotate=9.0, shift=0.1, zoom=(0.8, 1.2)
    )
    first = transforms.for_training(image, spec, random.Random(3))
    assert (first == transforms.for_training(image, spec, random.Random(3))).all()
    assert (first != transforms.for_training(image, spec, random.Random(4))).any()


# Colours


@pytest.mark.parametrize(
    ("ours", "theirs", "factors"),
    [
        (0, F.adjust_brightness, (0.7, 1.0, 1.3)),
        (1, F.adjust_contrast, (0.7, 1.0, 1.3)),
        (2, F.adjust_saturation, (0.0, 0.7, 1.3)),
        (3, F.adjust_hue, (-0.5, -0.1, 0.07, 0.5)),
    ],
)
def test_colours_change_as_by_torchvision(picture, ours, theirs, factors):
    image = Image.fromarray(picture(60, 40))
    for factor in factors:
        changed = transforms._CHANGES[ours](image, factor)
        assert (np.asarray(changed) == np.asarray(theirs(image, factor))).all()


def test_jitter_draws_factors_and_order_as_color_jitter(monkeypatch, picture):
    calls = []
    monkeypatch.setattr(
        transforms,
        "_CHANGES",
        [lambda image, f, n=n: calls.append((n, f)) or image for n in range(4)],
    )
    rng, image = random.Random(0), picture(8, 8)
    for _ in range(600):
        transforms.jittered(image, (0.25, 0.5, 1.0, 0.1), rng)
    orders = Counter(tuple(n for n, _ in calls[i : i + 4]) for i in range(0, 2400, 4))
    assert len(orders) == math.factorial(4)
    for number, low, high in ((0, 0.75, 1.25), (1, 0.5, 1.5), (2, 0.0, 2.0), (3, -0.1, 0.1)):
        drawn = [f for n, f in calls if n == number]
        assert low <= min(drawn) < low + 0.05 * (high - low)
        assert high >= max(drawn) > high - 0.05 * (high - low)


def test_what_is_not_jittered_is_not_touched(monkeypatch, picture):
    def forbidden(image, factor):
        raise AssertionError

    changes = [transforms._CHANGES[0], forbidden, forbidden, forbidden]
    monkeypatch.setattr(transforms, "_CHANGES", changes)
    transforms.jittered(picture(8, 8), (0.2, 0.0, 0.0, 0.0), random.Random(0))


# Affine changes


@pytest.mark.parametrize("background", [0, 255, 77])
def test_a_plain_background_stays_plain(background):
    image = np.full((32, 32, 3), background, np.uint8)
    image[10:22, 12:20] = 128
    image[31, 8:24] = 128  # touches the border
    spec = Input(
        resize=0,
        crop=32,
        train_crop="center",
        flip=False,
        rotate=45.0,
        zoom=(0.5, 0.9),
        shear=20.0,
        shift=0.2,
    )
    for key in range(50):
        out = transforms.for_training(image, spec, random.Random(key))
        assert (out[[0, 0, -1, -1], [0, -1, 0, -1]] == background).all()
        low, high = sorted((background, 128))
        assert low <= out.min() <= out.max() <= high
        assert (out == 128).any()


def test_a_shift_moves_by_at_most_its_share():
    image = np.zeros((64, 64, 3), np.uint8)
    image[30:34, 30:34] = 255
    spec = Input(resize=0, crop=64, train_crop="center", flip=False, shift=0.25)
    places = []
    for key in range(300):
        out = transforms.for_training(image, spec, random.Random(key))[..., 0].astype(float)
        y, x = np.indices(out.shape)
        places.append(((out * x).sum() / out.sum() - 31.5, (out * y).sum() / out.sum() - 31.5))
    places = np.array(places)
    assert (np.abs(places) <= 16.1).all()
    assert (places.max(0) > 14).all()
    assert (places.min(0) < -14).all()


def test_surroundings_come_in_before_the_fill():
    image = np.full((64, 64, 3), 200, np.uint8)
    image[0], image[-1], image[:, 0], image[:, -1] = 10, 10, 10, 10
    spec = Input(resize=0, crop=32, train_crop="center", flip=False, rotate=45.0)
    for key in range(20):
        assert (transforms.for_training(image, spec, random.Random(key)) == 200).all()
