"""Numbers as people read them, and sizes as people write them."""

import pytest

from retrieval import number_format
from retrieval.number_format import parse_size


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (999_600, "1 MB"),
        (3_140_000, "3.14 MB"),
        (2.5e9, "2.5 GB"),
        (4e12, "4 TB"),
        (4e18, "4,000 PB"),
    ],
)
def test_sizes_are_in_decimal_units(count, shown):
    assert number_format.size(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (59.6, "60 s"), (600, "10 min"), (7200, "2.0 h")]
)
def test_durations_have_a_unit_that_fits(seconds, shown):
    assert number_format.duration(seconds) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0.0017826497151386949", "0.001783"),
        ("2.5926231827891335e-05", "2.593e-05"),
        ("0.12345", "0.12345"),
        ("-1000000001", "-1000000001"),
        ('"multi_similarity"', '"multi_similarity"'),
    ],
)
def test_only_numbers_that_were_drawn_are_rounded(text, shown):
    assert number_format.four_digits(text) == shown


def test_scores_are_percent_and_differences_are_signed_points():
    assert number_format.percent(0.93124) == "93.12"
    assert number_format.interval((0.9, 1.0)) == "90.00 to 100.00"
    assert number_format.points(0.012) == "+1.20"
    assert number_format.points_interval((-0.01, 0.02)) == "-1.00 to +2.00"
    assert [number_format.p_value(p) for p in (0.5, 0.0123, 0.0009)] == [
        "0.500",
        "0.012",
        "< 0.001",
    ]
    assert number_format.level_name(0.95) == "95% interval"


@pytest.mark.parametrize("form", ["percent", "interval", "points_interval", "p_value"])
def test_a_number_that_is_missing_is_shown_as_nothing(form):
    assert getattr(number_format, form)(None) == ""


def test_numbers_and_nouns_agree():
    assert number_format.counted(1, "epoch") == "1 epoch"
    assert number_format.counted(2000, "class", "classes") == "2,000 classes"


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


@pytest.mark.parametrize(
    ("value", "text"), [("é", "é"), (None, "null"), (True, "true"), ([1, "é"], '[1, "é"]')]
)
def test_values_are_text_or_json(value, text):
    assert number_format.as_text(value) == text
