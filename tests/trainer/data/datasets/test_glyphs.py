# ruff: noqa: RUF001 - letters that look like Latin ones are the point
"""The drawn letters: the same pixels everywhere, letters that can be told apart."""

import hashlib
import itertools
import pickle
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from retrieval.errors import DmlError
from trainer.data.datasets import load
from trainer.data.datasets.glyphs import (
    CLOSE,
    CURVE,
    FACES,
    FEWEST_FACES,
    LIKENESS,
    LIKENESS_OF_CASES,
    LINE,
    MOVE,
    SAMPLES,
    TEST,
    TRAIN,
    UPRIGHT,
    _flatten,
    covered,
    fill,
    outline,
)

ROOT = Path(__file__).parents[4]
PIXELS = "54765732b479339c6bcf29f655456c0bbc0f4989ab74793d062dd949010ac973"
PATHS = "8591e181ef2bd043cb156faeb254b4398db9f7816cb813aada1c31bd1db16f70"


@pytest.fixture(scope="module")
def data():
    return load("glyphs")


def ring(points):
    points = np.asarray(points, dtype=float)
    return np.stack([points, np.roll(points, -1, axis=0)], axis=1)


def square(low, high):
    return ring([(low, low), (high, low), (high, high), (low, high)])


def script(letter: str) -> str:
    return unicodedata.name(letter).split()[0]


# What is in it


def test_latin_and_greek_train_and_three_other_scripts_test():
    assert {script(letter) for letter in TRAIN} == {"LATIN", "GREEK"}
    assert {script(letter) for letter in TEST} == {"CYRILLIC", "ARMENIAN", "GEORGIAN"}
    assert len(set(TRAIN + TEST)) == len(TRAIN) + len(TEST)


def test_every_letter_is_drawn_in_at_least_twelve_faces(data):
    assert len(FACES) == len(set(FACES)) == 16
    sizes = np.bincount(data.labels)
    assert sizes.min() >= FEWEST_FACES
    assert sizes.max() == 16
    assert data.counts() == {"train": (3238, 215), "test": (1164, 92)}
    assert data.root is None
    assert data.files() is None


def test_bold_and_slanted_faces_ask_the_upright_ones(data):
    pair = load("glyphs", variant="query")
    asking = {pair.paths[row].split("/")[1] for row in pair.rows("query")}
    answering = {pair.paths[row].split("/")[1] for row in pair.rows("gallery")}
    assert answering == set(UPRIGHT)
    assert asking == set(FACES) - answering
    assert (pair.classes("query") == pair.classes("gallery")).all()
    assert pair.paths == data.paths
    assert len(pair.rows("query")) + len(pair.rows("gallery")) == len(data.rows("test"))
    assert (pair.rows("train") == data.rows("train")).all()


def test_copies_are_more_images_of_each_letter(data):
    more = load("glyphs", copies=2)
    assert len(more) == 2 * len(data)
    assert set(data.paths) < set(more.paths)
    first, second = more.image(0), more.image(1)
    assert (first == data.image(0)).all()
    assert (first != second).any()


def test_labels_show_code_point_and_letter(data):
    assert all(name[7:] == chr(int(name[2:6], 16)) for name in data.label_names)


@pytest.mark.parametrize(
    "options", [{"variant": "gallery"}, {"size": 4}, {"size": 9999}, {"size": 32.0}, {"copies": 0}]
)
def test_options_out_of_range_are_errors(options):
    with pytest.raises(DmlError) as caught:
        load("glyphs", **options)
    assert f"--set data.options.{next(iter(options))}=" in caught.value.fix


# Pixels


def test_pixels_are_the_same_everywhere(data):
    """The fonts, the jitter and the filling of outlines, down to the last bit."""
    digest = hashlib.sha256()
    for row in range(0, len(data), 37):
        digest.update(data.image(row).tobytes())
    assert digest.hexdigest() == PIXELS
    assert hashlib.sha256("\n".join(data.paths).encode()).hexdigest() == PATHS


def test_another_process_draws_the_same(data):
    code = """
import hashlib, sys
from trainer.data.datasets import load
data = load("glyphs")
print(hashlib.sha256(b"".join(data.image(row).tobytes() for row in (4000, 3, 77))).hexdigest())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    here = b"".join(data.image(row).tobytes() for row in (4000, 3, 77))
    assert done.stdout.strip() == hashlib.sha256(here).hexdigest()


def test_seed_and_size_change_the_pixels_and_nothing_else(data):
    other = load("glyphs", seed=1, size=48)
    assert other.paths == data.paths
    assert other.image(0).shape == (48, 48, 3)
    assert (load("glyphs", seed=1).image(0) != data.image(0)).any()
    assert data.image(0).shape == (32, 32, 3)


def test_a_letter_is_black_on_white_and_wholly_inside(data):
    for row in range(0, len(data), 101):
        grey = data.image(row)[..., 0]
        assert grey.min() < 60, data.paths[row]
        edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
        assert edge.min() > 200, data.paths[row]


def test_the_reader_can_be_sent_to_a_worker(data):
    again = pickle.loads(pickle.dumps(data))  # noqa: S301 what worker processes do
    assert (again.image(9) == data.image(9)).all()


def test_an_outline_fits_a_unit_square():
    for letter in ("A", "ж", "-"):
        edges = outline("DejaVuSans", ord(letter))
        span = edges.max(axis=(0, 1)) - edges.min(axis=(0, 1))
        assert span.max() == pytest.approx(1)
        assert edges.max(axis=(0, 1)) == pytest.approx(span / 2)
        # Contours are closed: as many edges start at a point as end there.
        starts, ends = (sorted(map(tuple, edges[:, side].tolist())) for side in (0, 1))
        assert starts == ends


def test_contours_that_are_left_open_are_closed():
    points = np.array([(0, 0), (4, 0), (4, 4), (5, 5), (9, 5), (9, 9)], dtype=float)
    edges = _flatten(points, np.array([MOVE, LINE, LINE, MOVE, LINE, LINE]))
    assert edges.tolist() == np.concatenate([ring(points[:3]), ring(points[3:])]).tolist()
    closed = _flatten(points[[0, 1, 2, 0]], np.array([MOVE, LINE, LINE, CLOSE]))
    assert closed.tolist() == ring(points[:3]).tolist()


def test_a_curve_follows_its_control_point():
    points = np.array([(0, 0), (2, 4), (4, 0)], dtype=float)
    edges = _flatten(points, np.array([MOVE, CURVE, CURVE]))
    assert edges[0, 0].tolist() == [0, 0]
    assert edges[:, 1].tolist() == [[1, 1.5], [2, 2], [3, 1.5], [4, 0], [0, 0]]


def test_a_square_covers_its_area_exactly():
    grey = fill(square(2, 5), 8)
    assert (grey[2:5, 2:5] == 0).all()
    assert (grey == 255).sum() == 64 - 9
    half = fill(square(2.5, 5), 8)
    assert half[3, 2] == half[2, 3] == 127
    assert half[2, 2] == 191


def test_overlapping_shapes_add_up_and_opposite_ones_are_holes():
    both = np.concatenate([square(1, 5), square(3, 7)])
    assert (fill(both, 8)[3:5, 3:5] == 0).all()
    hole = np.concatenate([square(1, 7), square(3, 5)[:, ::-1]])
    assert (fill(hole, 8)[3:5, 3:5] == 255).all()
    assert (fill(hole, 8) == 0).sum() == 36 - 4


def test_shapes_that_leave_the_image_are_cut():
    assert (fill(square(-5, 20), 8) == 0).all()
    assert (fill(square(9, 20), 8) == 255).all()
    assert (fill(square(-9, -2), 8) == 255).all()


def test_filling_agrees_with_matplotlib_at_every_sample():
    from matplotlib.path import Path as Shape

    size = 24
    edges = outline("DejaVuSerif", ord("g")) * 20
    edges = np.stack([12 + edges[..., 0], 12 - edges[..., 1]], axis=-1)
    starts = np.flatnonzero((edges[1:, 0] != edges[:-1, 1]).any(axis=1)) + 1
    contours = np.split(edges[:, 0], starts)
    at = (np.arange(size * SAMPLES) + 0.5) / SAMPLES
    samples = np.stack(np.meshgrid(at, at), axis=-1).reshape(-1, 2)
    inside = np.zeros(len(samples), dtype=bool)
    for contour in contours:  # of a letter with holes: in an odd number of contours
        inside ^= Shape(contour).contains_points(samples)
    ink = inside.reshape(size, SAMPLES, size, SAMPLES).sum(axis=(1, 3))
    wanted = 255 - ink * 255 / SAMPLES**2
    # Rounding of corners to 1/256 pixel may move a sample or two across the border.
    assert (np.abs(fill(edges, size) - wanted) > 1).sum() <= 2
    assert inside.mean() > 0.1


# Letters that can be told apart


def drawn(letters: str, face: str, across: float, down: float) -> np.ndarray:
    """(n, 32, 32) ink of the letters without jitter, blurred by 3 x 3 pixels."""
    inks = []
    for letter in letters:
        edges = outline(face, ord(letter)) * 24
        edges = np.stack([16 + across * edges[..., 0], 16 - down * edges[..., 1]], axis=-1)
        inks.append(255.0 - fill(edges, 32))
    blurred = np.array(inks)
    for axis in (1, 2):
        blurred = sum(np.roll(blurred, by, axis) for by in (-1, 0, 1)) / 3
    return blurred


def unit(images: np.ndarray) -> np.ndarray:
    rows = images.reshape(len(images), -1).astype(np.float32)
    rows -= rows.mean(axis=1, keepdims=True)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def likeness(letters: str, face: str) -> np.ndarray:
    """(n, n) the largest correlation over small shifts and stretches."""
    still = unit(drawn(letters, face, 1, 1))
    best = np.full((len(letters), len(letters)), -1, dtype=np.float32)
    for across, down in itertools.product((0.87, 1, 1.15), repeat=2):
        images = drawn(letters, face, across, down)
        for shift in itertools.product((-2, 0, 2), repeat=2):
            moved = unit(np.roll(images, shift, axis=(1, 2)))
            np.maximum(best, still @ moved.T, out=best)
    return np.maximum(best, best.T)


def alike(a: str, b: str, score: float) -> bool:
    return score > (LIKENESS_OF_CASES if a.lower() == b.lower() else LIKENESS)


def test_no_two_letters_are_alike():
    face = "DejaVuSans"
    letters = "".join(c for c in TRAIN + TEST if ord(c) in covered(face))
    assert len(letters) > 300
    scores = likeness(letters, face)
    pairs = itertools.combinations(range(len(letters)), 2)
    found = [
        (letters[a], letters[b]) for a, b in pairs if alike(letters[a], letters[b], scores[a, b])
    ]
    assert not found


@pytest.mark.parametrize("pair", ["xX", "cC", "oO", "AΑ", "HН", "pр", "Дд", "Çç"])
def test_the_rule_finds_letters_that_differ_in_size_or_script_only(pair):
    assert alike(*pair, likeness(pair, "DejaVuSans")[0, 1])


def test_the_rule_leaves_letters_that_differ():
    for pair in ("Aa", "bd", "ЖД"):
        assert not alike(*pair, likeness(pair, "DejaVuSans")[0, 1])


def test_letters_can_be_drawn_by_several_threads(data):
    """A font holds one letter at a time; another thread must not change it in between."""
    interval = sys.getswitchinterval()
    rows = [row for row in range(len(data)) if "/DejaVuSans/" in data.paths[row]][:150]
    alone = [data.image(row) for row in rows]
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(data.image, rows * 4))
    finally:
        sys.setswitchinterval(interval)
    for row, image in enumerate(together):
        assert (image == alone[row % len(rows)]).all()
