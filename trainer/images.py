"""Any image file as RGB: one function for training, export and evaluation."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from retrieval.errors import DmlError

# Formats that only hold pixels. Others that Pillow knows are left out on purpose: EPS starts
# Ghostscript, and the rest are rare.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF")
# A file of a few kilobytes can claim gigabytes of pixels. Pillow warns above this size and raises
# at twice of it; here both are refused.
MAX_PIXELS = 89_478_485
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
# Remarks on damaged metadata: what matters is whether the pixels can be read.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BATCH = 32

Progress = Callable[[int, int], None]  # files done, files in all


def read_rgb(path: str | Path, short_side: int | None = None) -> np.ndarray:
    """(H, W, 3) uint8, upright. Transparency shows white; of an animation the first frame is read.

    With short_side a JPEG is decoded at 1/2, 1/4 or 1/8 of its size if its short side stays at
    least that long: a large photograph costs a fraction, and the caller resizes to the exact size.
    """
    return np.asarray(open_rgb(path, short_side))


def open_rgb(path: str | Path, short_side: int | None = None) -> Image.Image:
    """As `read_rgb`, but a PIL image of mode RGB."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
            raise OSError("it is not a file")
        with Image.open(path, formats=_formats()) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
            if short_side is not None:
                image.draft(None, (short_side, short_side))
            image.load()
            return to_rgb(_upright(image))
    except DmlError as error:
        raise DmlError(f"{path} cannot be read as an image.", error.what, error.fix) from error
    except Exception as error:  # decoders raise nearly anything when a file is damaged
        raise DmlError(
            f"{path} cannot be read as an image.", _reason(error), _fix(error)
        ) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB from any mode that Pillow reads."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.mode == "La":  # Pillow goes from here to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        front = image.convert("RGBA")
        white = Image.new("RGBA", front.size, "white")
        return Image.alpha_composite(white, front).convert("RGB")
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> np.ndarray:
    """(H, W) uint8 from 16-bit grey, from 32-bit integers that hold 16 bits, and from floats."""
    values = np.asarray(image)
    if image.mode != "F":
        return ((np.clip(values, 0, 65_535).astype(np.uint32) + 128) // 257).astype(np.uint8)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255):  # NaN fails as well
        raise DmlError(
            f"it holds floating-point values from {low:g} to {high:g}",
            "",
            "Convert it to 8 bits, or to values from 0 to 1.",
        )
    return np.rint(values * (255 if high <= 1 else 1)).astype(np.uint8)


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF data says; damaged EXIF data says nothing."""
    try:
        turn = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # the picture itself may be sound
        turn = None
    return image if turn is None else image.transpose(turn)


def check_images(
    paths: Sequence[str | Path], workers: int | None = None, progress: Progress | None = None
) -> list[tuple[int, str]]:
    """Decodes every file; (place in paths, reason) of those that cannot be read, in order.

    Decoders run outside Python's lock, so threads suffice. JPEGs are decoded at 1/8 of their size:
    that reads the whole file, at half the price.
    """
    bad: list[tuple[int, str]] = []
    starts = range(0, len(paths), _BATCH)
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        try:
            for start, found in zip(
                starts, pool.map(lambda s: _faults(paths, s), starts), strict=True
            ):
                bad += found
                if progress is not None:
                    progress(min(start + _BATCH, len(paths)), len(paths))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return bad


def _faults(paths: Sequence[str | Path], start: int) -> list[tuple[int, str]]:
    found = []
    for place in range(start, min(start + _BATCH, len(paths))):
        try:
            open_rgb(paths[place], short_side=1)
        except DmlError as error:
            found.append((place, error.why))
    return found


def bad_images(paths: Sequence[str | Path], bad: Sequence[tuple[int, str]]) -> DmlError:
    """The error that lists what `check_images` found."""
    shown = "\n".join(f"  {paths[place]}: {why}" for place, why in bad[:20])
    more = f"\n  and {len(bad) - 20:,} more" if len(bad) > 20 else ""
    return DmlError(
        f"{len(bad):,} of {len(paths):,} images cannot be read.",
        shown + more,
        "Replace or remove them, or leave them out: --skip-bad",
    )


@cache
def _formats() -> list[str]:
    """Those of FORMATS that this build of Pillow reads."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, Image.UnidentifiedImageError):
        return "it is not an image of a known kind"
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"it has more than {MAX_PIXELS:,} pixels"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def _fix(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return f"Known kinds: {', '.join(_formats())}. Convert it to one of these."
    return ""
