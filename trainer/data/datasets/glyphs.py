"""Letters in the sixteen text faces that matplotlib carries: data that need no download.

Latin and Greek letters train; Cyrillic, Armenian and Georgian letters test. Every image is one
letter in one face, slightly turned, slanted, scaled and moved. Size says nothing, so that of
letters that differ in size only (x and X) one is here, and none of the test letters has the shape
of another letter of either side (Latin A, Greek Alpha and Cyrillic A).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from retrieval.errors import DmlError
from trainer.data.datasets.outlines import covered, fill, outline
from trainer.data.datasets.records import DataSet, build

# Upright regular faces, then bold and slanted ones.
UPRIGHT = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "STIXGeneral")
OTHERS = (
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-Oblique",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "DejaVuSerif-BoldItalic",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
)
FACES = (*UPRIGHT, *OTHERS)
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
            "Choose one: --set data.options.variant=test",
        )
    for name, value, low, high in (("size", size, 8, LARGEST), ("copies", copies, 1, 1000)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise DmlError(
                f"{name} is {value!r}.", f"It is a whole number from {low} to {high}.", "Change it."
            )
    return build("glyphs", None, _rows(variant, copies), GlyphReader(size, seed))


def _rows(variant: str, copies: int) -> Iterator[tuple[str, str, str]]:
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
