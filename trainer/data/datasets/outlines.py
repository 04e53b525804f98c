"""Letters as pixels, the same on every machine: font outlines filled in whole numbers.

Font libraries hint and smooth in ways that change with their version. Here only the outlines are
taken from the font, in its own units; the rest is addition, multiplication and rounding.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

MOVE, LINE, CURVE, CLOSE = 1, 2, 3, 79  # matplotlib's path codes
STEPS = 4  # straight pieces of a curve; a letter has a dozen curves and 32 pixels
SAMPLES = 4  # per pixel and axis
GRID = 256  # units per pixel; a sample stands in the middle of its GRID // SAMPLES units

_one_at_a_time = threading.Lock()


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
    points, kinds = [tuple(p) for p in vertices.tolist()], codes.tolist()
    start = here = points[0]
    at = 0
    while at < len(points):
        kind, point = kinds[at], points[at]
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
            at += 1
            for bend in _bends(here, point, points[at]):
                edges.append((here, bend))
                here = bend
        at += 1
    if here != start:
        edges.append((here, start))
    return np.array(edges, dtype=np.float64)


def _bends(a: tuple, control: tuple, b: tuple) -> list[tuple[float, float]]:
    points = []
    for step in range(1, STEPS + 1):
        t = step / STEPS
        u, v, w = (1 - t) * (1 - t), 2 * t * (1 - t), t * t
        points.append((u * a[0] + v * control[0] + w * b[0], u * a[1] + v * control[1] + w * b[1]))
    return points


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
