"""Resize, crop and randomly change images for the network.

Images are (H, W, 3) uint8 arrays; `spec` is the `input` table of the config. Training, evaluation
and export use these functions and no others. An image that was resized before (a kept one) gives
the same pixels as the image itself.
"""

import math
from random import Random

import numpy as np
from PIL import Image, ImageEnhance

from retrieval.errors import DmlError
from trainer.config import INTERPOLATIONS, Input
from trainer.data.images import MAX_PIXELS

_TRIES = 10  # as in torchvision

Window = tuple[int, int, int, int]  # left, top, width, height


def resized_size(width: int, height: int, spec: Input) -> tuple[int, int]:
    """Width and height after `resized`; an image of this size is not resized again."""
    if not spec.resize:
        return width, height
    if not spec.keep_ratio:
        return spec.resize, spec.resize
    short, long = sorted((width, height))
    longer = int(spec.resize * long / short)
    if spec.resize * longer > MAX_PIXELS:
        raise DmlError(
            f"An image of {width} x {height} pixels cannot be resized.",
            f"With its short side at {spec.resize} it would have {spec.resize * longer:,} pixels; "
            f"{MAX_PIXELS:,} are allowed.",
            "Leave it out, or make both sides equal: --set input.keep_ratio=false",
        )
    return (spec.resize, longer) if width <= height else (longer, spec.resize)


def resized(image: np.ndarray, spec: Input) -> np.ndarray:
    """Resize with antialiasing; an image that has the size already is returned as it is."""
    return part(image, spec, resized_size(image.shape[1], image.shape[0], spec))


def for_testing(image: np.ndarray, spec: Input) -> np.ndarray:
    """Resize, then crop the centre: (crop, crop, 3), maybe a view."""
    size = resized_size(image.shape[1], image.shape[0], spec)
    return square(image, spec, size, *centre(*size, spec.crop))


def for_training(image: np.ndarray, spec: Input, rng: Random) -> np.ndarray:
    """Resize, then crop and change at random: (crop, crop, 3), maybe a view."""
    size = resized_size(image.shape[1], image.shape[0], spec)
    left = top = 0
    if spec.train_crop == "resized":
        image = part(image, spec, size, random_part(*size, spec, rng))
        size = (spec.crop, spec.crop)
        image = part(image, spec, size)
    elif spec.train_crop == "random":
        left, top = random_place(*size, spec.crop, rng)
    else:
        left, top = centre(*size, spec.crop)
    if moves(spec):
        image = moved(part(image, spec, size), left, top, spec, rng)
    else:
        image = square(image, spec, size, left, top)
    if any(spec.jitter):
        image = jittered(image, spec.jitter, rng)
    if spec.flip and rng.random() < 0.5:
        image = image[:, ::-1]
    return image


def is_random(spec: Input) -> bool:
    """Whether `for_training` differs from `for_testing`."""
    return spec.train_crop != "center" or spec.flip or any(spec.jitter) or moves(spec)


# Crops


def centre(width: int, height: int, crop: int) -> tuple[int, int]:
    """Left and top of the central square; negative where the image is smaller."""
    return _middle(width, crop), _middle(height, crop)


def _middle(length: int, crop: int) -> int:
    return round((length - crop) / 2) if length >= crop else -((crop - length) // 2)


def random_place(width: int, height: int, crop: int, rng: Random) -> tuple[int, int]:
    """Left and top of a random square; the centre where the image is smaller."""
    left, top = centre(width, height, crop)
    if width > crop:
        left = below(width - crop + 1, rng)
    if height > crop:
        top = below(height - crop + 1, rng)
    return left, top


def random_part(W: int, H: int, spec: Input, rng: Random) -> Window:
    """Left, top, width and height with the distribution of torchvision's RandomResizedCrop."""
    for _ in range(_TRIES):
        area = H * W * between(*spec.scale, rng)
        ratio = math.exp(between(math.log(spec.ratio[0]), math.log(spec.ratio[1]), rng))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= W and 0 < height <= H:
            return below(W - width + 1, rng), below(H - height + 1, rng), width, height
    width, height, shape = W, H, W / H
    if shape < spec.ratio[0]:
        height = max(1, round(W / spec.ratio[0]))
    elif shape > spec.ratio[1]:
        width = max(1, round(H * spec.ratio[1]))
    return (W - width) // 2, (H - height) // 2, width, height


def part(
    image: np.ndarray, spec: Input, size: tuple[int, int], window: Window | None = None
) -> np.ndarray:
    """A window of the image resized to `size`, or all of it; a view if it has that size."""
    left, top, width, height = window or (0, 0, *size)
    if size == (image.shape[1], image.shape[0]):
        return image if window is None else image[top : top + height, left : left + width]
    from trainer.data.resampling import resample

    out = np.empty((height, width, 3), np.uint8)
    resample(_constant(image), *size, left, top, INTERPOLATIONS.index(spec.interpolation), out)
    return out


def square(
    image: np.ndarray, spec: Input, size: tuple[int, int], left: int, top: int
) -> np.ndarray:
    """The crop at a place of the image resized to `size`; beyond it, the colour of its border."""
    crop, (width, height) = spec.crop, size
    if left >= 0 and top >= 0 and left + crop <= width and top + crop <= height:
        return part(image, spec, size, (left, top, crop, crop))
    image = part(image, spec, size)
    out = np.empty((crop, crop, 3), np.uint8)
    out[:] = border_colour(image)
    here = image[max(top, 0) : top + crop, max(left, 0) : left + crop]
    out[max(-top, 0) :, max(-left, 0) :][: here.shape[0], : here.shape[1]] = here
    return out


def _constant(image: np.ndarray) -> np.ndarray:
    """Make an array contiguous and read-only, so that kernels are compiled for one type only."""
    image = np.ascontiguousarray(image).view()
    image.flags.writeable = False
    return image


def border_colour(image: np.ndarray) -> np.ndarray:
    """(3,) median over the outermost pixels, so that a plain background stays plain."""
    edges = np.concatenate([image[0], image[-1], image[1:-1, 0], image[1:-1, -1]])
    edges.sort(axis=0)
    return edges[len(edges) // 2]


# Affine changes


def moves(spec: Input) -> bool:
    """Whether training images are turned, scaled, slanted or shifted."""
    return bool(spec.rotate or spec.shear or spec.shift or spec.zoom != (1.0, 1.0))


def moved(image: np.ndarray, left: int, top: int, spec: Input, rng: Random) -> np.ndarray:
    """The square at a place, turned, scaled, slanted and shifted about its middle.

    One bilinear resampling; what lies around the square comes in, and beyond the image the colour
    of its border.
    """
    from trainer.data.resampling import warp

    a, b, c, d, e, f = affine(
        spec.crop,
        between(-spec.rotate, spec.rotate, rng),
        between(*spec.zoom, rng),
        between(-spec.shear, spec.shear, rng),
        spec.crop * between(-spec.shift, spec.shift, rng),
        spec.crop * between(-spec.shift, spec.shift, rng),
    )
    out = np.empty((spec.crop, spec.crop, 3), np.uint8)
    warp(_constant(image), (a, b, c + left, d, e, f + top), border_colour(image), out)
    return out


def affine(
    side: int, rotate: float, zoom: float, shear: float, right: float, down: float
) -> tuple[float, ...]:
    """Where in the image each point of the result lies: x' = ax + by + c, y' = dx + ey + f.

    Degrees, clockwise; as torchvision's `affine` with these as angle, scale, (shear, 0), translate.
    """
    cos, sin = math.cos(math.radians(rotate)), math.sin(math.radians(rotate))
    tan = math.tan(math.radians(shear))
    a, b = (cos - sin * tan) / zoom, (sin + cos * tan) / zoom
    d, e = -sin / zoom, cos / zoom
    x, y = side / 2 + right, side / 2 + down
    return a, b, side / 2 - a * x - b * y, d, e, side / 2 - d * x - e * y


# Colours


def jittered(image: np.ndarray, amounts: tuple[float, ...], rng: Random) -> np.ndarray:
    """Brightness, contrast, saturation and hue changed in random order, as by ColorJitter."""
    factors = [between(max(0.0, 1 - amount), 1 + amount, rng) for amount in amounts[:3]]
    factors.append(between(-amounts[3], amounts[3], rng))
    picture = Image.fromarray(np.ascontiguousarray(image))
    for change in sorted(range(4), key=lambda _: rng.random()):
        if amounts[change]:
            picture = _CHANGES[change](picture, factors[change])
    return np.asarray(picture)


def hue(image: Image.Image, turn: float) -> Image.Image:
    """Turn the hue by a share of the colour circle."""
    h, s, v = image.convert("HSV").split()
    by = int(turn * 255) % 256
    h = h.point([(value + by) % 256 for value in range(256)])
    return Image.merge("HSV", (h, s, v)).convert("RGB")


_CHANGES = (
    lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    hue,
)


# Numbers: only `random()`, whose values do not change between versions of Python


def between(low: float, high: float, rng: Random) -> float:
    """A random number from low to high."""
    return low + (high - low) * rng.random()


def below(count: int, rng: Random) -> int:
    """A random whole number from 0 to count - 1."""
    return int(count * rng.random())
