"""Read any image file as RGB, the same way in training, export and evaluation."""

import io
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import ExifTags, Image

from retrieval import number_format
from retrieval.errors import DmlError, listed
from retrieval.resources import Progress, processors, results_of

# Formats that only hold pixels. Others that Pillow knows are left out on purpose: EPS starts
# Ghostscript, and the rest are rare.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
# A file of a few kilobytes can claim gigabytes of pixels. Pillow warns above this size and raises
# at twice of it; here both are refused.
MAX_PIXELS = 89_478_485
# Decoding one image takes at most so many bytes, and so many times the size of its file.
MEMORY, GROWTH = 200_000_000, 10
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
# Remarks on damaged metadata: what matters is whether the pixels can be read.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

WHITE = (255, 255, 255)
Colour = tuple[int, int, int]
Fits = Callable[[int, int], object]
R = TypeVar("R")

_UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {  # by EXIF orientation
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.transpose(1, 0, 2),
    6: lambda image: np.rot90(image, -1),
    7: lambda image: image[::-1, ::-1].transpose(1, 0, 2),
    8: lambda image: np.rot90(image),
}
_STRIP = 1 << 20  # pixels that are converted at a time
# Bytes a pixel as measured: of decoders, beside Pillow's image, and of that image by its mode.
_DECODERS = {"JPEG2000": 14, "WEBP": 12, "AVIF": 8, "TIFF": 4, "GIF": 4}
_DEPTHS = {"1": 1, "L": 1, "P": 1, "I;16": 8, "I;16B": 8, "I": 14, "F": 16}
_CONSTANT = 20_000_000  # strips, and the decoders themselves


def read_rgb(
    path: str | Path,
    short_side: int | None = None,
    background: Colour = WHITE,
    *,
    fits: Fits | None = None,
    quick: bool = False,
) -> np.ndarray:
    """(H, W, 3) uint8, upright. Transparency shows the background; of an animation the first frame
    is read.

    With short_side a JPEG is decoded at 1/2, 1/4 or 1/8 of its size if its short side stays at
    least that long: a large photograph costs a fraction, and the caller resizes to the exact size.

    fits: called with width and height before the image is decoded; raises a DmlError if they are
    of no use. quick: accept and refuse the same files, but return the smallest image possible.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
            raise OSError("it is not a file")
        with (
            _Bounded(io.FileIO(path), found.st_size) as file,
            Image.open(file, formats=_formats()) as image,
        ):
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
            size = _reduced(image, short_side)
            _check_memory(image, size, found.st_size)
            if fits is not None:
                fits(*size)
            side = 1 if quick else short_side
            if side is not None:
                image.draft(None, (side, side))
            image.load()
            pixels, turn = _pixels(image, background), _turn(image)
        return pixels if turn is None else np.ascontiguousarray(turn(pixels))
    except Exception as error:  # decoders raise nearly anything when a file is damaged
        why, fix = _reason(error)
        raise DmlError(f"{path} cannot be read as an image.", why, fix) from error


class _Bounded(io.BufferedReader):
    """A file that limits each read to the bytes that are left.

    Pillow reads as many bytes as a part of an image claims to have, and room is made for all.
    """

    def __init__(self, raw: io.FileIO, length: int) -> None:
        super().__init__(raw)
        self.length = length

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > 0:
            size = min(size, max(0, self.length - self.tell()))
        return super().read(size)


def _reduced(image: Image.Image, short_side: int | None) -> tuple[int, int]:
    """Width and height after Pillow's `draft`."""
    if short_side is None or image.format not in ("JPEG", "MPO"):
        return image.size
    most = min(image.size) // short_side
    scale = next((scale for scale in (8, 4, 2) if scale <= most), 1)
    return -(-image.width // scale), -(-image.height // scale)


def _check_memory(image: Image.Image, size: tuple[int, int], length: int) -> None:
    """Refuses an image that takes more memory than a file of this length may.

    Three bytes a pixel are the result; Pillow keeps a pointer for each row.
    """
    width, height = size
    each = _DEPTHS.get(image.mode, 4) + 3
    needed = _CONSTANT + width * height * each + 16 * height
    needed += image.width * image.height * _DECODERS.get(image.format or "", 0)
    allowed = MEMORY + GROWTH * length
    if needed > allowed:
        raise DmlError(
            f"It has {image.width:,} x {image.height:,} pixels in a file of {length:,} bytes.",
            f"That would take {number_format.size(needed)} of memory, and "
            f"{number_format.size(allowed)} are allowed.",
            "Make it smaller, or leave it out: --skip-bad",
        )


def _pixels(image: Image.Image, background: Colour) -> np.ndarray:
    """(H, W, 3) uint8; a large image is converted in strips, which takes less memory."""
    width, height = image.size
    if width * height <= _STRIP or image.mode.startswith(("I", "F")):
        return np.asarray(to_rgb(image, background))
    out = np.empty((height, width, 3), np.uint8)
    step = max(1, _STRIP // width)
    for top in range(0, height, step):
        strip = image.crop((0, top, width, min(top + step, height)))
        out[top : top + step] = np.asarray(to_rgb(strip, background))
    return out


def to_rgb(image: Image.Image, background: Colour = WHITE) -> Image.Image:
    """8-bit RGB from any mode that Pillow reads."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode == "La":  # Pillow goes from here to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        front = image.convert("RGBA")
        behind = Image.new("RGBA", front.size, (*background, 255))
        return Image.alpha_composite(behind, front).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> np.ndarray:
    """(H, W) uint8 from 16-bit grey, from 32-bit integers that hold 16 bits, and from floats."""
    values = np.asarray(image)
    if image.mode != "F":
        return ((np.clip(values, 0, 65_535).astype(np.uint32) + 128) // 257).astype(np.uint8)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255):  # NaN fails as well
        raise DmlError(
            f"It holds floating-point values from {low:g} to {high:g}.",
            "",
            "Convert it to 8 bits, or to values from 0 to 1.",
        )
    return np.rint(values * (255 if high <= 1 else 1)).astype(np.uint8)


def _turn(image: Image.Image) -> Callable[[np.ndarray], np.ndarray] | None:
    """The orientation in the EXIF data of an image; damaged EXIF data is ignored."""
    try:
        return _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # the picture itself may be sound
        return None


def check_images(
    paths: Sequence[str | Path],
    workers: int | None = None,
    progress: Progress | None = None,
    short_side: int | None = None,
    fits: Fits | None = None,
) -> list[tuple[int, str]]:
    """Decodes every file; (place in paths, reason) of those that cannot be read, in order.

    short_side: as of `read_rgb` when the images are read for use.

    JPEGs are decoded at 1/8 of their size: that reads the whole file, at half the price.
    """

    def fault(path: str | Path) -> str:
        try:
            read_rgb(path, short_side, fits=fits, quick=True)
        except DmlError as error:
            return error.why
        return ""

    found = results_of(fault, paths, workers or processors())
    faults = told(found, len(paths), progress)
    return [(place, why) for place, why in enumerate(faults) if why]


def told(results: Iterable[R], total: int, progress: Progress | None) -> Iterator[R]:
    """The results as they come; each one is counted as progress."""
    for done, result in enumerate(results, 1):
        yield result
        if progress is not None:
            progress(done, total)


def bad_images(paths: Sequence[str | Path], bad: Sequence[tuple[int, str]]) -> DmlError:
    """The error that lists what `check_images` found."""
    shown = "  " + listed((f"{paths[place]}: {why}" for place, why in bad), 20, "\n  ")
    return DmlError(
        f"{len(bad):,} of {len(paths):,} images cannot be read.",
        shown,
        "Replace or remove them, or leave them out: --skip-bad",
    )


@cache
def _formats() -> list[str]:
    """Those of FORMATS that this build of Pillow reads."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _reason(error: Exception) -> tuple[str, str]:
    """Why an image cannot be read, and what to do about it."""
    if isinstance(error, DmlError):
        return " ".join(part for part in (error.what, error.why) if part), error.fix
    if isinstance(error, FileNotFoundError):
        return "There is no such file.", ""
    if isinstance(error, Image.UnidentifiedImageError):
        fix = f"Known kinds: {', '.join(_formats())}. Convert it to one of these."
        return "It is not an image of a known kind.", fix
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"It has more than {MAX_PIXELS:,} pixels.", ""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}.", ""
    text = str(error).rstrip(".") or type(error).__name__
    return f"{text[0].upper()}{text[1:]}.", ""
