"""The page of a sweep: which chart it has, and that it needs nothing from elsewhere."""

import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from trainer.config import Config
from trainer.sweep import charts, page, tables
from trainer.sweep.results import compared, setting


def outcome(seed, share, classes=12):
    """A run that gets a share of 10 queries of each class right, more or less."""
    rng = np.random.default_rng(seed)
    hits = np.clip(np.rint(10 * share + rng.normal(0, 1, classes)), 0, 10).astype(int).tolist()
    recall = sum(hits) / (10 * classes)
    scores = {d: {"recall@1": recall, "map_at_r": recall / 2} for d in ("l2", "cos")}
    validation = {"split": "val", "scores": scores, "classes": [str(c) for c in range(classes)]}
    validation |= {"queries": [10] * classes, "hits": {"cos": hits, "l2": hits}}
    return {"seed": seed, "run": "x", "best_epoch": 1, "validation": validation, "test": None}


def result(*keys, method="grid"):
    """A sweep over three values of each key."""
    cells = np.stack(np.meshgrid(*[np.arange(1, 4)] * len(keys)), -1).reshape(-1, len(keys))
    rows = [
        setting(
            n,
            dict(zip(keys, map(str, cell), strict=True)),
            [outcome(seed, 0.3 + 0.05 * cell.sum()) for seed in range(3)],
        )
        for n, cell in enumerate(cells)
    ]
    about = {"name": "<b>sweep</b>", "method": method, "settings": Config().to_dict()}
    return compared(rows, list(keys), about)


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


def test_the_page_escapes_names_and_loads_nothing():
    text = page.render(result("optimizer.lr", "network.dim"))
    assert "<b>sweep</b>" not in text
    assert "&lt;b&gt;sweep" in text
    assert not re.search(r"https?://|<script|<link|src=", text)


def test_drawn_numbers_are_rounded_where_people_read_them():
    drawn = {"optimizer.lr": "0.0017826497151386949"}
    found = compared([setting(0, drawn, [outcome(0, 0.5)])], ["optimizer.lr"], {})
    found |= {"seeds": [0], "split": "val", "name": "sweep"}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(tables.sweep_table(found))
    shown = console.export_text()
    assert "0.001783 " in shown
    assert "1 seed each" in shown
    assert tables.short(drawn) == "lr=0.001783"
    assert [text for _, text in charts.Scale(list(drawn.values()), 0, 1).labels()] == ["0.001783"]


def test_a_failed_setting_is_on_the_page():
    found = result("optimizer.lr")
    found["rows"].append(setting(9, {"optimizer.lr": "1e9"}, [], "The loss is nan."))
    assert "The loss is nan." in page.render(found)


def test_the_band_of_a_curve_ends_at_100_percent():
    runs = [outcome(0, 0.5), outcome(1, 2.0), outcome(2, 2.0)]  # mean 83 %, spread 29 points
    found = compared([setting(0, {"optimizer.lr": "1"}, runs)], ["optimizer.lr"], {})
    drawn = charts.curve(found["rows"], "optimizer.lr")
    band = re.search(r'class="band cos" d="M([^"]*)Z"', drawn)[1]
    top = min(float(point.split()[1]) for point in band.split("L"))
    assert top == pytest.approx(min(float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)))
