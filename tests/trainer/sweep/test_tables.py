"""Tables of a sweep on a terminal."""

import io

from rich.console import Console

from tests.trainer.sweep.outcomes import outcome
from trainer.sweep import charts, tables
from trainer.sweep.results import compared, setting


def test_drawn_numbers_are_rounded_where_people_read_them():
    drawn = {"optimizer.lr": "0.0017826497151386949"}
    found = compared([setting(0, drawn, [outcome(0, 0.5)])], ["optimizer.lr"], {})
    found |= {"seeds": [0], "split": "val", "name": "sweep"}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(tables.sweep_table(found, console))
    shown = console.export_text()
    assert "0.001783 " in shown
    assert "1 seed each" in shown
    assert tables.short(drawn) == "lr=0.001783"
    assert [text for _, text in charts.Scale(list(drawn.values()), 0, 1).labels()] == ["0.001783"]


def test_a_mean_and_its_spread_stay_on_one_line():
    values = [{"loss.options.anchors": str(n), "optimizer.lr": "0.001"} for n in range(3)]
    rows = [
        setting(n, value, [outcome(seed, 1 - 0.1 * n - 0.01 * seed) for seed in range(3)])
        for n, value in enumerate(values)
    ]
    found = compared(rows, list(values[0]), {})
    found |= {"seeds": [0, 1, 2], "split": "val", "name": "sweep"}
    spread = tables.texts(found["rows"][0])["scores"][0]
    assert "±" in spread
    shown = {}
    for width in (60, 80, 120):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(tables.sweep_table(found, console))
        shown[width] = console.export_text()
        assert spread in shown[width]
        assert max(map(len, shown[width].splitlines())) <= width
    assert "MAP@R" in shown[120]
    assert "MAP@R" not in shown[60]
    assert "a wider terminal" in shown[60]
