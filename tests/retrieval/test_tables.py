"""Tables: what the result says, whole on any width."""

import io
import json
import re

import click
import numpy as np
import pytest
from rich.console import Console

from retrieval import Split, save
from retrieval.tables import evaluation_table, nmi_table
from tests.commands import call

QUICK = ("--no-nmi", "--no-map")


def test_a_narrow_terminal_gets_the_scores_without_intervals(files):
    result = json.loads(call("eval", files / "a.h5", "--json", *QUICK).stdout)
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(evaluation_table(result, 40))
    line = next(line for line in console.export_text().splitlines() if "Recall@1" in line)
    assert line.split() == [
        "Recall@1",
        *(f"{100 * result['distances'][d]['recall']['1']:.2f}" for d in ("l2", "cos")),
    ]


def test_the_table_shows_what_the_json_says(files):
    scores = json.loads(call("eval", files / "a.h5", "--json", "--no-nmi").stdout)["distances"]
    table = call("eval", files / "a.h5", "--no-nmi").stdout
    for name, key in (("MRR", "mrr"), ("MAP@R", "map_at_r"), ("R-precision", "r_precision")):
        cells = next(line for line in table.splitlines() if name in line).split()
        values = [f"{100 * scores[d][key]:.2f}" for d in ("l2", "cos")]
        assert [cells[1], cells[5]] == values
    assert f"{100 * scores['cos']['recall']['2']:.2f}" in table


def test_one_query_is_not_called_queries(tmp_path):
    labels = np.array([0, 0, 1, 1])
    save(tmp_path / "a.h5", Split(np.array([[2.5], [2.6], [1.0], [2.0]]), labels))  # the last fails
    save(tmp_path / "b.h5", Split(np.array([[2.5], [2.6], [1.0], [1.1]]), labels))
    given = (tmp_path / "a.h5", tmp_path / "b.h5")
    done = call("compare", *given, "--distance", "l2", "--recall-at", "1")
    assert "At rank 1, B gains 1 query and loses 0." in done.stdout
    page = tmp_path / "page.html"
    call("report", given[1], "--compare", given[0], "--out", page, "--distance", "l2", *QUICK[:1])
    assert "gains <b>1</b> query and loses <b>0</b>" in page.read_text()


@pytest.mark.parametrize("width", [40, 60, 80])
def test_comparisons_show_whole_numbers_in_narrow_terminals(files, width, monkeypatch):
    args = ("compare", files / "a.h5", files / "b.h5", "--recall-at", "1,1000")
    wide = call(*args).stdout
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    lines = [line.rstrip() for line in click.unstyle(call(*args).stdout).splitlines()]
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines if line.startswith((" Recall@1 ", " MAP@R"))]
    assert len(rows) == 4
    whole = wide.split()
    assert all(cell in whole for row in rows for cell in row)
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("std", [0.0159, 0.1234])
def test_the_rows_of_nmi_stand_in_the_columns_of_the_scores(files, std):
    result = json.loads(call("eval", files / "a.h5", "--json", "--seeds", 3).stdout)
    for scores in result["distances"].values():
        scores["nmi"]["std"] = scores["ami"]["std"] = std
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(evaluation_table(result, 80))
    console.print(nmi_table(result, 80))
    lines = console.export_text().splitlines()
    found = [next(x for x in lines if title in x).rstrip() for title in ("Recall@1", "NMI", "AMI")]
    assert len(set(map(len, found))) == 1


def test_tables_name_percent_and_show_l2_before_cos(files):
    table = call("eval", files / "a.h5", *QUICK).stdout
    assert table.index("l2, %") < table.index("cos, %")
    both = call("compare", files / "a.h5", files / "b.h5", *QUICK).stdout
    assert both.index(" l2 ") < both.index(" cos ")
    assert "A, %" in both
    found = json.loads(call("eval", files / "a.h5", "--json", *QUICK).stdout)
    assert list(found["distances"]) == found["settings"]["distances"] == ["l2", "cos"]


def test_terminal_and_report_show_the_same_p(files):
    told = call("compare", files / "a.h5", files / "b.h5", *QUICK).stdout
    page = files / "page.html"
    done = call("report", files / "b.h5", "--compare", files / "a.h5", "--out", page, *QUICK[:1])
    assert done.exit_code == 0, done.stderr
    rows = re.findall(r"<tr.*?>(.*?)</tr>", page.read_text(), re.S)
    shown = [
        [re.sub("<.*?>", "", cell) for cell in re.findall("<t[hd].*?</t[hd]>", r)] for r in rows
    ]
    for title in ("Recall@1", "Recall@8", "MRR"):
        p = [line.split()[-1] for line in told.splitlines() if line.split()[:1] == [title]]
        assert len(p) == 2
        assert [row[-1].split()[-1] for row in shown if row[0] == title and len(row) == 6] == p
