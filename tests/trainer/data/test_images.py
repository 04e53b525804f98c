"""Every kind of image becomes upright 8-bit RGB, or an error that names the file."""

import os
import re
import struct
import subprocess
import sys
import threading
import tracemalloc
import warnings
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from retrieval.errors import DmlError
from trainer.data import images
from trainer.data.images import MAX_PIXELS, bad_images, check_images, read_rgb, to_rgb


def save(path: Path, image: Image.Image, **options) -> Path:
    image.save(path, **options)
    return path


def gradient(width=40, height=24) -> np.ndarray:
    """(H, W, 3) with no symmetry, so that a wrong turn shows."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], -1).astype(np.uint8)


def chunk(kind: bytes, data: bytes) -> bytes:
    crc = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG by hand: Pillow cannot write every kind that it must read."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + body + chunk(b"IEND", b"")


# Modes


def test_rgb_comes_back_as_it_was(tmp_path):
    path = save(tmp_path / "a.png", Image.fromarray(gradient()))
    pixels = read_rgb(path)
    assert pixels.dtype == np.uint8
    assert (pixels == gradient()).all()
    assert (read_rgb(str(path)) == gradient()).all()


def test_grey_fills_three_channels(tmp_path):
    grey = gradient()[..., 0]
    pixels = read_rgb(save(tmp_path / "a.png", Image.fromarray(grey)))
    assert (pixels == grey[..., None]).all()
    assert pixels.shape == (24, 40, 3)


def test_black_and_white_becomes_0_and_255(tmp_path):
    bits = Image.fromarray(gradient()[..., 0] > 99).convert("1")
    pixels = read_rgb(save(tmp_path / "a.png", bits))
    assert (pixels == np.where(gradient()[..., :1] > 99, 255, 0)).all()


def test_palette_colours_are_looked_up(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([200, 10, 20, 30, 40, 50])
    image.putdata([0, 1])
    pixels = read_rgb(save(tmp_path / "a.png", image))
    assert pixels.tolist() == [[[200, 10, 20], [30, 40, 50]]]


@pytest.mark.parametrize("transparency", [0, b"\x00\x80"])
def test_transparent_palette_entries_show_white(tmp_path, transparency):
    image = Image.new("P", (2, 1))
    image.putpalette([200, 10, 20, 0, 0, 0])
    image.putdata([0, 1])
    pixels = read_rgb(save(tmp_path / "a.png", image, transparency=transparency))
    second = [0, 0, 0] if transparency == 0 else [127, 127, 127]
    assert pixels.tolist() == [[[255, 255, 255], second]]


def test_alpha_lies_over_white(tmp_path):
    image = Image.new("RGBA", (3, 1))
    image.putdata([(200, 0, 0, 255), (200, 0, 0, 0), (0, 0, 0, 51)])
    pixels = read_rgb(save(tmp_path / "a.png", image))
    assert pixels.tolist() == [[[200, 0, 0], [255, 255, 255], [204, 204, 204]]]


def test_grey_with_alpha_lies_over_white(tmp_path):
    image = Image.new("LA", (2, 1))
    image.putdata([(9, 255), (9, 0)])
    assert read_rgb(save(tmp_path / "a.png", image))[..., 0].tolist() == [[9, 255]]


def test_one_transparent_colour_shows_white(tmp_path):
    image = Image.new("RGB", (2, 1))
    image.putdata([(1, 2, 3), (4, 5, 6)])
    pixels = read_rgb(save(tmp_path / "a.png", image, transparency=(1, 2, 3)))
    assert pixels.tolist() == [[[255, 255, 255], [4, 5, 6]]]
    grey = save(tmp_path / "b.png", Image.new("L", (1, 1), 7), transparency=7)
    assert read_rgb(grey).tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize("mode", ["La", "RGBa", "PA"])
def test_rarer_modes_with_alpha_become_rgb(mode):
    base = Image.new("LA" if mode == "La" else "RGBA", (2, 2), (0,) * (2 if mode == "La" else 4))
    image = Image.new("PA", (2, 2)) if mode == "PA" else base.convert(mode)
    assert to_rgb(image).mode == "RGB"
    if mode != "PA":
        assert to_rgb(image).getpixel((0, 0)) == (255, 255, 255)


def test_cmyk_becomes_rgb(tmp_path):
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    pixels = read_rgb(save(tmp_path / "a.jpg", image, quality=95))
    assert pixels.shape == (16, 16, 3)
    assert np.abs(pixels.astype(int) - [255, 0, 0]).max() < 8
    tiff = read_rgb(save(tmp_path / "a.tif", image))
    assert tiff[0, 0].tolist() == [255, 0, 0]


def test_sixteen_bit_grey_keeps_its_range(tmp_path):
    values = np.array([[0, 257, 128 * 257, 65_535, 65_407, 65_406]], dtype=np.uint16)
    for name in ("a.png", "a.tif"):
        pixels = read_rgb(save(tmp_path / name, Image.fromarray(values)))
        assert pixels[0, :, 0].tolist() == [0, 1, 128, 255, 255, 254]
        assert (pixels[..., :1] == pixels).all()


def test_big_endian_sixteen_bit_grey_is_read(tmp_path):
    rows = b"\x00" + struct.pack(">3H", 0, 32_896, 65_535)
    (tmp_path / "a.png").write_bytes(png(3, 1, 16, 0, rows))
    assert read_rgb(tmp_path / "a.png")[0, :, 0].tolist() == [0, 128, 255]


def test_sixteen_bit_rgb_is_read(tmp_path):
    rows = b"\x00" + struct.pack(">3H", 65_535, 32_896, 0)
    (tmp_path / "a.png").write_bytes(png(1, 1, 16, 2, rows))
    assert read_rgb(tmp_path / "a.png").tolist() == [[[255, 128, 0]]]


def test_32_bit_integers_are_taken_as_16_bits(tmp_path):
    values = np.array([[-5, 257, 65_535, 10**6]], dtype=np.int32)
    pixels = read_rgb(save(tmp_path / "a.tif", Image.fromarray(values)))
    assert pixels[0, :, 0].tolist() == [0, 1, 255, 255]


@pytest.mark.parametrize(
    ("values", "wanted"), [([0, 0.5, 1], [0, 128, 255]), ([0, 7.4, 255], [0, 7, 255])]
)
def test_floats_up_to_1_or_255_are_read(tmp_path, values, wanted):
    image = Image.fromarray(np.array([values], dtype=np.float32))
    assert read_rgb(save(tmp_path / "a.tif", image))[0, :, 0].tolist() == wanted


@pytest.mark.parametrize("values", [[0, 1000], [-1, 0], [0, np.nan]])
def test_floats_of_unknown_range_are_refused(tmp_path, values):
    path = save(tmp_path / "a.tif", Image.fromarray(np.array([values], dtype=np.float32)))
    with pytest.raises(DmlError, match="floating-point values") as caught:
        read_rgb(path)
    assert str(path) in caught.value.what


def test_the_first_frame_of_an_animation_is_read(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    path = save(tmp_path / "a.gif", frames[0], save_all=True, append_images=frames[1:])
    assert read_rgb(path)[0, 0].tolist() == [255, 0, 0]


def test_a_name_that_lies_about_the_kind_does_not_matter(tmp_path):
    path = save(tmp_path / "photo.jpg", Image.fromarray(gradient()), format="PNG")
    assert (read_rgb(path) == gradient()).all()


# Orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["png", "jpg", "tif"])
def test_exif_rotation_is_undone(tmp_path, orientation, kind):
    turned = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),  # the camera's picture, to be turned clockwise
        7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(np.ascontiguousarray(turned(gradient())))
    options = {"quality": 100, "subsampling": 0} if kind == "jpg" else {}
    pixels = read_rgb(save(tmp_path / f"a.{kind}", stored, exif=exif, **options))
    assert pixels.shape == gradient().shape
    assert np.abs(pixels.astype(int) - gradient()).max() <= (8 if kind == "jpg" else 0)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # as the module does
def test_damaged_exif_data_do_not_spoil_a_picture(tmp_path):
    path = tmp_path / "a.jpg"
    for exif in (
        b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\xff\xff",
        b"Exif\x00\x00garbage",
        b"Exif\x00\x00",
    ):
        Image.fromarray(gradient()).save(path, exif=exif)
        assert read_rgb(path).shape == (24, 40, 3)


def test_exif_data_that_cannot_be_parsed_say_nothing(tmp_path, monkeypatch):
    path = save(tmp_path / "a.png", Image.fromarray(gradient()))

    def refuse(image):
        raise SyntaxError("not a TIFF file")

    monkeypatch.setattr(Image.Image, "getexif", refuse)
    assert (read_rgb(path) == gradient()).all()


# Reduced decoding


@pytest.mark.parametrize(
    ("short_side", "size"),
    [
        (None, (300, 200)),
        (200, (300, 200)),
        (101, (300, 200)),
        (100, (150, 100)),
        (50, (75, 50)),
        (25, (38, 25)),
        (1, (38, 25)),
        (500, (300, 200)),
    ],
)
def test_a_jpeg_is_decoded_smaller_but_never_below_the_short_side(tmp_path, short_side, size):
    path = save(tmp_path / "a.jpg", Image.fromarray(gradient(300, 200)), quality=95)
    assert read_rgb(path, short_side).shape == (*size[::-1], 3)


def test_a_reduced_jpeg_looks_like_the_large_one_made_smaller(tmp_path):
    path = save(tmp_path / "a.jpg", Image.fromarray(gradient(256, 256)), quality=95)
    small = read_rgb(path, 64).astype(int)
    reference = np.asarray(
        Image.fromarray(read_rgb(path)).resize((64, 64), Image.Resampling.BOX)
    ).astype(int)
    assert np.abs(small - reference).mean() < 2


def test_a_reduced_jpeg_is_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = save(tmp_path / "a.jpg", Image.fromarray(gradient(300, 200)), exif=exif)
    assert read_rgb(path, 100).shape == (150, 100, 3)


# Files that are no use


@pytest.mark.parametrize("kind", ["jpg", "png", "gif", "bmp", "webp", "tif", "ppm"])
def test_a_truncated_image_is_an_error_at_any_size(tmp_path, kind):
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    path = save(tmp_path / f"a.{kind}", Image.fromarray(noise))
    whole = path.read_bytes()
    for part in (0.98, 0.5, 0.02):
        path.write_bytes(whole[: int(len(whole) * part)])
        for short_side in (None, 8):
            with pytest.raises(DmlError) as caught:
                read_rgb(path, short_side)
            assert str(path) in caught.value.what
            assert re.fullmatch(r"[A-Z].*\.", caught.value.why, re.S)


@pytest.mark.parametrize("content", [b"", b"hello", b"<svg></svg>", b"\xff\xd8\xff", bytes(500)])
def test_what_is_not_an_image_is_an_error_that_lists_the_known_kinds(tmp_path, content):
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(DmlError) as caught:
        read_rgb(tmp_path / "a.jpg")
    assert "a.jpg cannot be read as an image" in caught.value.what


def test_missing_files_folders_and_pipes_are_errors(tmp_path):
    with pytest.raises(DmlError, match="There is no such file"):
        read_rgb(tmp_path / "a.jpg")
    with pytest.raises(DmlError, match="not a file"):
        read_rgb(tmp_path)
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(DmlError, match="not a file"):
        read_rgb(tmp_path / "pipe.jpg")


def test_postscript_is_never_interpreted(tmp_path):
    (tmp_path / "a.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(DmlError, match="not an image of a known kind"):
        read_rgb(tmp_path / "a.jpg")


@pytest.mark.parametrize("side", [9_460, 13_400, 60_000])
@pytest.mark.parametrize("action", ["error", "default"])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(tmp_path, side, action):
    assert side * side > MAX_PIXELS
    path = tmp_path / "bomb.png"
    path.write_bytes(png(side, side, 8, 0, bytes(1000)))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter(action)
        with pytest.raises(DmlError, match=f"more than {MAX_PIXELS:,} pixels"):
            read_rgb(path)


# Checking a whole set


def test_the_check_finds_exactly_the_bad_files_in_order(tmp_path):
    paths = []
    for i in range(100):
        paths.append(save(tmp_path / f"{i}.jpg", Image.fromarray(gradient()), quality=90))
    whole = paths[7].read_bytes()
    paths[7].write_bytes(whole[:-60])
    paths[40].unlink()
    paths[99].write_bytes(b"no image")
    for workers in (1, 4):
        bad = check_images(paths, workers)
        assert [place for place, _ in bad] == [7, 40, 99]
        assert "truncated" in bad[0][1]
        assert "no such file" in bad[1][1]
    error = bad_images(paths, bad)
    assert "3 of 100" in error.what
    assert "40.jpg: There is no such file." in error.why
    assert "--skip-bad" in error.fix


def test_damage_after_a_sound_header_is_found(tmp_path):
    path = save(tmp_path / "a.png", Image.fromarray(gradient()))
    content = bytearray(path.read_bytes())
    middle = content.index(b"IDAT") + 12
    content[middle : middle + 8] = b"\xff" * 8
    path.write_bytes(content)
    with Image.open(path) as image:
        assert image.size == (40, 24)
    assert [place for place, _ in check_images([path])] == [0]


def test_progress_reaches_the_end_and_never_goes_back(tmp_path):
    path = save(tmp_path / "a.png", Image.fromarray(gradient()))
    seen = []
    assert check_images([path] * 70, 2, lambda done, total: seen.append((done, total))) == []
    assert seen == [(done, 70) for done in range(1, 71)]
    assert check_images([]) == []


def test_an_interrupted_check_stops_its_threads(monkeypatch):
    read, before = [], set(threading.enumerate())  # other tests leave pools of libraries behind
    monkeypatch.setattr(images, "read_rgb", lambda path, *_, **__: read.append(path))

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_images(["a.png"] * 5_000, 1, interrupt)
    assert len(read) < 100
    assert not set(threading.enumerate()) - before


def test_a_long_list_of_bad_files_is_cut():
    paths = [f"{i}.jpg" for i in range(50)]
    error = bad_images(paths, [(i, "broken") for i in range(50)])
    assert "and 30 more" in error.why
    assert "25.jpg" not in error.why


# Memory


READER = """
import os, sys
from PIL import Image
from retrieval.errors import DmlError
from trainer.data.images import read_rgb

Image.init()

def peak():
    return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])

for line in sys.stdin:
    if os.fork() == 0:  # the peak of a process begins anew
        before = peak()
        try:
            told = read_rgb(line.rstrip()).shape
        except DmlError as error:
            told = error.why
        print((peak() - before) // 1000, told, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def peak():
    """peak(path): megabytes that reading an image takes, and its shape or why it was refused.

    In a program of its own: a fork of this one could use memory that earlier tests have freed.
    """
    with subprocess.Popen(
        [sys.executable, "-c", READER],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:

        def found(path: Path) -> tuple[int, str]:
            program.stdin.write(f"{path}\n")
            program.stdin.flush()
            used, told = program.stdout.readline().rstrip().split(" ", 1)
            return int(used), told

        yield found


def flat(path: Path, mode: str, size: tuple[int, int], **options) -> Path:
    """A large image in a small file."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    Image.new(mode, size, 9 if bands == 1 else (9,) * bands).save(path, **options)
    return path


QUICK_TO_MAKE = [
    ("a.png", "RGBA", {"compress_level": 1}),
    ("a.png", "RGB", {"compress_level": 1}),
    ("a.png", "L", {"compress_level": 1}),
    ("a.png", "LA", {"compress_level": 1}),
    ("a.png", "P", {"compress_level": 1, "transparency": 9}),
    ("a.png", "I;16", {"compress_level": 1}),
    ("a.gif", "P", {}),
    ("a.jpg", "RGB", {}),
    ("a.jpg", "RGB", {"progressive": True}),
    ("a.tif", "RGB", {"compression": "tiff_deflate"}),
    ("a.tif", "F", {"compression": "tiff_lzw"}),
]
SLOW_TO_MAKE = [("a.webp", "RGB", {}), ("a.jp2", "RGB", {}), ("a.avif", "RGB", {"speed": 10})]


@pytest.mark.parametrize(
    ("name", "mode", "options", "side"),
    [(*image, side) for image in QUICK_TO_MAKE for side in (3000, 6000)]
    + [(*image, 3000) for image in SLOW_TO_MAKE],
)
def test_an_image_takes_bounded_memory_or_is_refused(peak, tmp_path, name, mode, options, side):
    path = flat(tmp_path / name, mode, (side, side), **options)
    used, told = peak(path)
    assert used <= 200 + 10 * path.stat().st_size / 1e6 + 10, told
    assert "MB are allowed" in told or told == f"({side}, {side}, 3)"


def test_large_images_are_converted_in_strips_to_the_same_pixels(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (1500, 900, 4), dtype=np.uint8)
    for mode in ("RGBA", "LA", "L", "P", "RGB"):
        image = Image.fromarray(pixels).convert(mode)
        exif = Image.Exif()
        exif[0x0112] = 6
        path = save(tmp_path / "a.png", image, exif=exif, compress_level=0)
        whole = np.rot90(np.asarray(to_rgb(image)), -1)
        assert (read_rgb(path) == whole).all()


def test_a_scan_of_an_ordinary_page_is_read(tmp_path):
    path = flat(tmp_path / "a.png", "1", (4960, 7016))  # A4 at 600 dots an inch
    assert read_rgb(path).shape == (7016, 4960, 3)


def thin(path: Path, width: int, height: int) -> Path:
    rows = zlib.compressobj(1)
    line = bytes(1 + width)
    blocks = [rows.compress(line * 1000) for _ in range(height // 1000)] + [rows.flush()]
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", b"".join(blocks))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + body + chunk(b"IEND", b""))
    return path


def test_a_line_of_80_million_rows_is_refused_at_once(peak, tmp_path):
    path = thin(tmp_path / "a.png", 1, 80_000_000)
    used, told = peak(path)
    assert "1 x 80,000,000 pixels" in told
    assert used < 30
    assert len(check_images([path])) == 1


def test_a_part_that_claims_gigabytes_is_not_given_room_for_them(tmp_path):
    path = tmp_path / "x.png"
    Image.new("RGB", (8, 8)).save(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"IDAT")
    data[at - 4 : at] = (2**31 - 1).to_bytes(4, "big")
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with suppress(DmlError):  # Pillow may take what is there for the whole part
            read_rgb(path)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
