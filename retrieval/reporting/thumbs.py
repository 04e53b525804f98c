"""Make thumbnails for the page, within a limit of bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from retrieval.errors import DmlError
from retrieval.resources import Progress, processors, results_of

SIDE = 64
BUDGET = 14 << 20  # characters of base64 in all

# (H, W, 3) uint8 RGB of the image at a path; None or a DmlError where there is none.
Pictures = Callable[[str], np.ndarray | None]


@dataclass(frozen=True)
class Thumbs:
    images: list[str]  # data: addresses
    of: dict[str, int]  # path -> index in images
    unread: list[str]  # a sentence for each image that could not be read


def thumbnails(
    paths: Sequence[str],
    pictures: Pictures,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> Thumbs:
    """Thumbnails of the paths in their order, until the budget is used up."""
    paths = list(dict.fromkeys(paths))
    encode, known = _encoder(), {}
    out = Thumbs([], {}, [])
    used = 0
    made = results_of(lambda path: _made(path, pictures, encode), paths, processors())
    with closing(made):
        for done, (path, (found, fault)) in enumerate(zip(paths, made, strict=True), 1):
            if progress:
                progress(done, len(paths))
            if fault:
                out.unread.append(fault)
                continue
            if found not in known:
                if used + len(found) > budget:
                    break
                used += len(found)
                known[found] = len(out.images)
                out.images.append(found)
            out.of[path] = known[found]
    return out


def _made(path: str, pictures: Pictures, encode: Callable) -> tuple[str, str]:
    """The thumbnail, or why there is none."""
    try:
        pixels = pictures(path)
        if pixels is None:
            return "", f"{path}: there is no such image"
        return encode(pixels), ""
    except DmlError as error:
        return "", f"{error.what} {error.why}".strip()
    except Exception as error:  # decoders raise nearly anything when a file is damaged
        return "", f"{path}: {type(error).__name__}"


def _encoder() -> Callable[[np.ndarray], str]:
    from PIL import Image, features

    webp = features.check("webp")
    form, kind = ("WEBP", "image/webp") if webp else ("JPEG", "image/jpeg")

    def encode(pixels: np.ndarray) -> str:
        image = Image.fromarray(pixels)
        image.thumbnail((SIDE, SIDE), Image.Resampling.BICUBIC, reducing_gap=2.0)
        out = io.BytesIO()
        image.save(out, form, quality=75)
        return f"data:{kind};base64,{base64.b64encode(out.getvalue()).decode()}"

    return encode
