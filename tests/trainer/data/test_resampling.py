"""Resampled and warped images have the pixels of Pillow and torchvision."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainer.config import INTERPOLATIONS, Input
from trainer.data import transforms
from trainer.data.resampling import warp
from trainer.networks.vision import torchvision

F = torchvision.transforms.functional
BILINEAR = torchvision.transforms.InterpolationMode.BILINEAR


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(*[st.integers(1, 90)] * 4),
    st.sampled_from(INTERPOLATIONS),
    st.tuples(*[st.floats(0, 1)] * 4),
    st.integers(0, 99),
)
def test_any_window_has_the_pixels_of_pillow(sizes, kind, place, seed):
    height, width, new_height, new_width = sizes
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    filter = getattr(Image, kind.upper())
    rows = Image.fromarray(image).resize((new_width, height), filter)
    whole = rows.resize((new_width, new_height), filter)  # one pass each: the same in any version
    w, h = 1 + int(place[0] * (new_width - 1)), 1 + int(place[1] * (new_height - 1))
    x, y = int(place[2] * (new_width - w)), int(place[3] * (new_height - h))
    found = transforms.part(image, Input(interpolation=kind), (new_width, new_height), (x, y, w, h))
    assert (found == np.asarray(whole)[y : y + h, x : x + w]).all()


@pytest.mark.parametrize(
    ("angle", "zoom", "shear", "right", "down"),
    [
        (0, 1, 0, 0, 0),
        (17, 1, 0, 0, 0),
        (0, 0.8, 0, 0, 0),
        (0, 1, 14, 0, 0),
        (0, 1, 0, 5, -3),
        (-23, 1.3, -8, -2, 6),
    ],
)
def test_an_affine_change_is_that_of_torchvision(picture, angle, zoom, shear, right, down):
    image = picture(48, 48)
    expected = F.affine(
        Image.fromarray(image), angle, [right, down], zoom, [shear, 0], BILINEAR, [9, 9, 9]
    )
    out = np.empty_like(image)
    matrix = transforms.affine(48, angle, zoom, shear, right, down)
    warp(image, matrix, np.array([9, 9, 9], np.uint8), out)
    difference = np.abs(out.astype(int) - np.asarray(expected)).max(-1)
    assert (difference <= 1).mean() > 0.995  # rounding; a pixel on the very edge may be the fill
