"""Charts: scales, and the numbers in their SVG."""

import re

import pytest

from retrieval.reporting import charts


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.66, 1, [0.6, 0.7, 0.8, 0.9, 1]),
        (0, 47, [0, 10, 20, 30, 40, 50]),
    ],
)
def test_ticks_are_round_and_cover_the_values(low, high, wanted):
    assert charts.ticks(low, high) == pytest.approx(wanted)


def test_ticks_of_a_single_value_surround_it():
    for value in (0, 1, -3):
        marks = charts.ticks(value, value)
        assert marks[0] < value < marks[-1]


def test_classes_of_no_width_leave_the_scale_inside_its_frame():
    drawn = charts.scatter([0.0, 0.0], [0.0, 0.0])
    places = [float(x) for x in re.findall('class="middle" x="(.*?)"', drawn)]
    assert min(places) == charts.LEFT


def test_axis_maps_ends_and_logarithms():
    axis = charts.Axis(1, 100, 0, 200, log=True)
    assert [axis(1), axis(10), axis(100)] == pytest.approx([0, 100, 200])
    assert charts.Axis(3, 3, 0, 10)(3) == 5


def test_every_class_is_counted_once_by_its_recall():
    titles = re.findall("<title>(.*?)</title>", charts.recall_of_classes([0, 0.5, 0.51, 1, None]))
    counted = {t.split(":")[0]: int(t.split(":")[1]) for t in titles}
    assert {k: n for k, n in counted.items() if n} == {
        "0 to 5%": 1,
        "50 to 55%": 2,
        "95 to 100%": 1,
    }


def test_whisker_of_a_gain_lies_right_of_zero():
    drawn = charts.whisker(0.2, [0.1, 0.3], (-0.1, 0.3))
    zero, low, high = map(float, re.search(r"M([\d.]+) 0V.*M([\d.]+) 10H([\d.]+)", drawn).groups())
    assert zero < low < float(re.search(r'cx="([\d.]+)"', drawn)[1]) < high
