"""Letters in the sixteen text faces that matplotlib carries: data that need no download.

Latin and Greek letters train; Cyrillic, Armenian and Georgian letters test. Every image is one
letter in one face, slightly turned, slanted, scaled and moved. Size says nothing, so that of
letters that differ in size only (x and X) one is here, and none of the test letters has the shape
of another letter of either side (Latin A, Greek Alpha and Cyrillic A).
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import DmlError
from trainer.data.datasets.records import DataSet, Row, build

STYLES = {  # upright regular faces, and what their names end in where they are bold or slanted
    "DejaVuSans": ("-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSansMono": ("-Bold", "-Oblique", "-BoldOblique"),
    "DejaVuSerif": ("-Bold", "-Italic", "-BoldItalic"),
    "STIXGeneral": ("Bol", "Italic", "BolIta"),
}
UPRIGHT = tuple(STYLES)
FACES = (*UPRIGHT, *(face + style for face, styles in STYLES.items() for style in styles))
LARGEST = 512

# Letters that at least FEWEST_FACES faces have, Latin first; each is here if those before it are
# unlike it. Two letters are alike if, drawn upright in the same size and blurred by three pixels of
# 32, their correlation in some upright face exceeds LIKENESS after the best shift by up to two
# pixels and the best stretch by up to 15% either way. Capital and small letter must differ more.
FEWEST_FACES, LIKENESS, LIKENESS_OF_CASES = 12, 0.92, 0.88

TRAIN = (
    "ABCDEGHIKLMNOPRSTUVWXYZabdefgmnqryÆÇÈÑÙÞßàæèìíïðñøûýąĆĉĎĘęĜĝĢĤĥĲ"
    "ĶĻņŉŒœŔŕŖŚŝŞţŤťųŵŹƁƂƆƈƋƎƏƐƑƔƕƛƜƝƢƣƤƧƩƪưƷƸƺƻƾƿǡǣǨǩǪǭǮǶǺȓȜȤȫȲȵȸȹȻȾ"
    "ȿɀɁɄɐɕɖɘɚɜɝɞɟɠɤɧɨɬɮɰɱɲɳɷɸɹɻɽɿʁʂʃʊʋʍʎʐʑʕʚʝʞʣʤʦʧʨʩʪʫʬʭʮΎΏΐΔΞΨάέήΰα"
    "βδζμνξςτώϐϑϒϓϔϖϗϞϟϠϡϰϱϺ"
)
TEST = (
    "ЂЉЊЋЍДЖЛЧЪЫЭЮЯцѢѪҒҘҤҺӂӃӛӞӬӵӸԲԴԵԶԷԸԹԻԽԾԿՀՁՃՅՆՇՉՊՋՎՐՒՔՖթիխճմչջփևადეზთკლმნოჟრსტუფღყცჭჯჰჱჲჳჴჵჷჸჹ"
)

FILL = 0.57  # of the image, before scaling
HALF_ANGLE = 0.10510423526567646  # tan(6 degrees): turned by up to 12 degrees
SCALE = (0.75, 1.15)
SHEAR = 0.15
SHIFT = 0.08  # of the image

MOVE, LINE, CURVE, CLOSE = 1, 2, 3, 79  # matplotlib's path codes
STEPS = 4  # straight pieces of a curve; a letter has a dozen curves and 32 pixels
SAMPLES = 4  # per pixel and axis
GRID = 256  # units per pixel; a sample stands in the middle of its GRID // SAMPLES units

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class GlyphReader:
    """Draws `U+0416/DejaVuSans/0`: letter, face, copy."""

    size: int
    seed: int

    def __call__(self, path: str, short_side: int | None = None) -> np.ndarray:
        letter, face, _ = path.split("/")
        edges = outline(face, int(letter[2:], 16)) * (FILL * self.size)
        grey = fill(_jitter(edges, path, self.seed, self.size), self.size)
        return np.repeat(grey[..., None], 3, axis=2)

    def draws(self, path: str) -> bool:
        """Whether the path names a letter of the data set, a face that has it, and a copy."""
        found = re.fullmatch(r"U\+([0-9A-F]{4})/([\w-]+)/[0-9]{1,6}", path)
        if found is None or found[2] not in FACES:
            return False
        letter = int(found[1], 16)
        return chr(letter) in TRAIN + TEST and letter in covered(found[2])

    def at_size(self, size: int) -> GlyphReader:
        """The reader of the same letters with sides of `size` pixels."""
        return replace(self, size=size)


def read(*, variant: str = "test", size: int = 32, copies: int = 1, seed: int = 0) -> DataSet:
    """List the letters in all faces.

    variant: `query` makes bold and slanted faces the queries, upright regular ones the gallery.
    """
    if variant not in ("test", "query"):
        raise DmlError(
            f"The data set glyphs has no variant {variant!r}.",
            "There are two: `test`, where each test image is a query for all others, and `query`, "
            "where bold and slanted faces are the queries and upright regular ones the gallery.",
            "Choose one: --set data.options.variant=test (embed: glyphs:test)",
        )
    for name, value, low, high in (("size", size, 8, LARGEST), ("copies", copies, 1, 1000)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise DmlError(
                f"{name} is {value!r}.",
                f"It is a whole number from {low} to {high}.",
                f"Give another one: --set data.options.{name}={low}",
            )
    return build("glyphs", None, _rows(variant, copies), GlyphReader(size, seed))


def _rows(variant: str, copies: int) -> Iterator[Row]:
    for split, letters in (("train", TRAIN), ("test", TEST)):
        for letter in letters:
            for face in FACES:
                if ord(letter) not in covered(face):
                    continue
                part = split
                if split == "test" and variant == "query":
                    part = "gallery" if face in UPRIGHT else "query"
                code = f"U+{ord(letter):04X}"
                for copy in range(copies):
                    yield f"{code}/{face}/{copy}", f"{code} {letter}", part


def _jitter(edges: np.ndarray, path: str, seed: int, size: int) -> np.ndarray:
    """Edges in pixels, y downward, by an affine map that the path and the seed determine."""
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    numbers = np.frombuffer(digest, ">u4").tolist()
    turn, scale, shear, right, below = (number / 2**31 - 1 for number in numbers[:5])  # -1 .. 1
    t = turn * HALF_ANGLE
    # Half-angle formulas: exact arithmetic, where sine and cosine differ between machines.
    cos, sin = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
    factor = (SCALE[0] + SCALE[1]) / 2 + scale * (SCALE[1] - SCALE[0]) / 2
    x, y = edges[..., 0], edges[..., 1]
    x = x + shear * SHEAR * y
    across = (cos * x - sin * y) * factor + size * (0.5 + right * SHIFT)
    upward = (sin * x + cos * y) * factor + size * (0.5 + below * SHIFT)
    return np.stack([across, size - upward], axis=-1)


# Letters as pixels, the same on every machine. Font libraries hint and smooth in ways that change
# with their version: only the outlines are taken from the font, in its own units, and they are
# filled in whole numbers.


@cache
def _font(face: str) -> Any:
    import matplotlib
    from matplotlib.ft2font import FT2Font

    return FT2Font(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf")


@cache
def covered(face: str) -> frozenset[int]:
    """The code points that a face has a shape for."""
    return frozenset(_font(face).get_charmap())


def outline(face: str, code: int) -> np.ndarray:
    """(E, 2, 2) edges, start and end, x and y, of the shape scaled to fit a unit square at 0."""
    from matplotlib.ft2font import LoadFlags

    font = _font(face)
    with _one_at_a_time:  # a font holds the letter that was loaded last, whoever asked for it
        font.load_char(code, flags=LoadFlags.NO_SCALE)
        path = font.get_path()
    edges = _flatten(*path)
    low, high = edges.min(axis=(0, 1)), edges.max(axis=(0, 1))
    return (edges - (low + high) / 2) / (high - low).max()


def _flatten(vertices: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Straight edges of closed contours; curves have one control point, as in TrueType."""
    edges: list[tuple[tuple[float, float], tuple[float, float]]] = []
    points = [tuple(p) for p in vertices.tolist()]
    start = here = points[0]
    steps = chain(zip(points, codes.tolist(), strict=True), [(start, CLOSE)])
    for point, kind in steps:
        if kind in (MOVE, CLOSE):
            if here != start:
                edges.append((here, start))
            if kind == MOVE:
                start = point
            here = start
        elif kind == LINE:
            edges.append((here, point))
            here = point
        else:
            assert kind == CURVE, f"path code {kind}"
            end, _ = next(steps)
            for bend in _bends(here, point, end):
                edges.append((here, bend))
                here = bend
    return np.array(edges, dtype=np.float64)


def _bends(a: tuple, control: tuple, b: tuple) -> Iterator[tuple[float, float]]:
    for step in range(1, STEPS + 1):
        t = step / STEPS
        u, v, w = (1 - t) * (1 - t), 2 * t * (1 - t), t * t
        yield u * a[0] + v * control[0] + w * b[0], u * a[1] + v * control[1] + w * b[1]


def fill(edges: np.ndarray, size: int) -> np.ndarray:
    """(size, size) uint8, black on white, of edges in pixels with y downward; non-zero winding."""
    units = np.floor(edges * GRID + 0.5).astype(np.int64)  # (E, 2, 2)
    (x0, y0), (x1, y1) = units[:, 0].T, units[:, 1].T
    down = y1 > y0
    top_x, top_y = np.where(down, x0, x1), np.where(down, y0, y1)
    low_x, low_y = np.where(down, x1, x0), np.where(down, y1, y0)
    step, half, side = GRID // SAMPLES, GRID // SAMPLES // 2, size * SAMPLES
    # Sample rows r with top_y <= r * step + half < low_y; level edges have none.
    first = np.clip(-((half - top_y) // step), 0, side)
    last = np.clip(-((half - low_y) // step), 0, side)
    count = last - first
    edge = np.repeat(np.arange(len(units)), count)
    row = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[edge]
    fall = row * step + half - top_y[edge]
    x = top_x[edge] + fall * (low_x - top_x)[edge] // (low_y - top_y)[edge]
    column = np.clip((x - half) // step + 1, 0, side)  # the first sample to the right
    place = row * (side + 1) + column
    cells = side * (side + 1)
    turns = np.bincount(place[down[edge]], minlength=cells)
    turns -= np.bincount(place[~down[edge]], minlength=cells)
    inside = turns.reshape(side, side + 1).cumsum(axis=1)[:, :side] != 0
    ink = inside.reshape(size, SAMPLES, size, SAMPLES).sum(axis=(1, 3))
    return (255 - (ink * 255 + SAMPLES * SAMPLES // 2) // (SAMPLES * SAMPLES)).astype(np.uint8)
