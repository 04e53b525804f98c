"""The chart of a sweep: which it is, and what it shows."""

import re
from xml.etree import ElementTree

import pytest

from tests.trainer.sweep.outcomes import outcome, result
from trainer.sweep import charts
from trainer.sweep.results import compared, setting


@pytest.mark.parametrize(
    ("keys", "marks"),
    [
        (["optimizer.lr"], {'class="band cos"': 1, 'class="cos" cx': 9}),
        (["optimizer.lr", "network.dim"], {'class="cell"': 9}),
        (["optimizer.lr", "network.dim", "optimizer.clip"], {'class="setting"': 27}),
    ],
)
def test_the_chart_fits_the_number_of_parameters(keys, marks):
    drawn = charts.chart(result(*keys))
    ElementTree.fromstring(drawn)  # well formed
    assert {mark: drawn.count(mark) for mark in marks} == marks


def test_settings_drawn_at_random_have_parallel_coordinates():
    drawn = charts.chart(result("optimizer.lr", "network.dim", method="random"))
    assert drawn.count('class="setting"') == 9


def test_the_best_cell_of_a_heat_map_is_the_darkest():
    found = result("optimizer.lr", "network.dim")
    shares = re.findall(r'style="--share:(\d+)%"', charts.chart(found))
    assert shares[0] == "75"  # the rows are best first
    assert shares[-1] == "12"


def test_the_band_of_a_curve_ends_at_100_percent():
    runs = [outcome(0, 0.5), outcome(1, 2.0), outcome(2, 2.0)]  # mean 83 %, spread 29 points
    found = compared([setting(0, {"optimizer.lr": "1"}, runs)], ["optimizer.lr"], {})
    drawn = charts.curve(found["rows"], "optimizer.lr")
    band = re.search(r'class="band cos" d="M([^"]*)Z"', drawn)[1]
    top = min(float(point.split()[1]) for point in band.split("L"))
    assert top == pytest.approx(min(float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)))
