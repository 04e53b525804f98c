"""Sizes are read with any unit, and refused with the reason."""

import pytest

from retrieval.sizes import parse_size


def test_units_are_powers_of_1024():
    assert parse_size("2GB") == parse_size(" 2gib") == parse_size("2048M") == 2 << 30
    assert parse_size("1.5T") == 3 << 39
    assert parse_size(str(64 << 20)) == 64 << 20


@pytest.mark.parametrize(
    ("text", "told"),
    [("much", "is not a size"), ("", "is not a size"), ("nan", "between"), ("1MB", "between")],
)
def test_what_is_not_a_size_is_refused(text, told):
    with pytest.raises(ValueError, match=told):
        parse_size(text)
