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
    console.print(tables.sweep_table(found))
    shown = console.export_text()
    assert "0.001783 " in shown
    assert "1 seed each" in shown
    assert tables.short(drawn) == "lr=0.001783"
    assert [text for _, text in charts.Scale(list(drawn.values()), 0, 1).labels()] == ["0.001783"]
