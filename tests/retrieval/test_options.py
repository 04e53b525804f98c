"""Values of the command line."""

import click
import pytest

from retrieval.options import Numbers, Size


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 << 30), ("512mb", 512 << 20), ("1.5G", 3 << 29), ("1GiB", 1 << 30)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "x", "1,,2", "1.5", "1,2", "1,2,3,4", "-1,0,0", "0,0,256"])
def test_lists_of_numbers_are_checked(text):
    colour = Numbers("R,G,B", "three whole numbers from 0 to 255", int, 3, low=0, high=255)
    assert colour.convert("0, 128,255", None, None) == (0, 128, 255)
    with pytest.raises(click.BadParameter, match="is not three whole numbers from 0 to 255"):
        colour.convert(text, None, None)
