"""Settings of a sweep: their order, tests of their differences, and their lines in a table."""

import csv
import statistics

import pytest

from tests.trainer.sweep.outcomes import outcome
from trainer.sweep.results import compared, difference, setting, to_csv


def runs(share, seeds=(0, 1, 2), classes=12):
    return [outcome(seed, share, classes) for seed in seeds]


def recalls(row):
    return [run["validation"]["scores"]["cos"]["recall@1"] for run in row["runs"]]


@pytest.fixture
def found():
    """A sweep of three settings: one has failed, the others differ clearly."""
    rows = [
        setting(0, {"optimizer.lr": "1e9"}, [], "The loss is nan."),
        setting(1, {"optimizer.lr": "1"}, runs(0.3)),
        setting(2, {"optimizer.lr": "0.1"}, runs(0.8)),
    ]
    return compared(rows, ["optimizer.lr"], {})


def test_settings_come_best_first_and_failed_ones_last(found):
    assert [row["trial"] for row in found["rows"]] == [2, 1, 0]
    assert (found["seeds"], found["split"]) == ([0, 1, 2], "val")
    assert found["rows"][2]["validation"] is None


def test_a_setting_is_tested_against_the_best(found):
    best, other, failed = found["rows"]
    assert best["difference"] is failed["difference"] is None
    tested = other["difference"]
    expected = statistics.fmean(recalls(other)) - statistics.fmean(recalls(best))
    assert tested["difference"] == pytest.approx(expected)
    assert tested["ci"][0] <= tested["difference"] <= tested["ci"][1] < 0
    assert tested["p"] < 0.05


def test_settings_of_other_seeds_or_classes_are_not_tested_against_each_other():
    assert difference(runs(0.8), runs(0.8))["difference"] == 0
    assert difference(runs(0.8), runs(0.3, seeds=(0, 1, 3))) is None
    assert difference(runs(0.8), runs(0.3, classes=11)) is None


def test_a_line_of_the_table_has_values_means_spread_and_the_difference(found):
    best, other, failed = csv.DictReader(to_csv(found).splitlines())
    name = "validation cos recall@1"
    for line, row in ((best, found["rows"][0]), (other, found["rows"][1])):
        assert line["optimizer.lr"] == row["values"]["optimizer.lr"]
        assert float(line[f"{name} mean"]) == pytest.approx(statistics.fmean(recalls(row)))
        assert float(line[f"{name} std"]) == pytest.approx(statistics.stdev(recalls(row)))
    assert best["p"] == ""
    assert float(other["difference"]) == found["rows"][1]["difference"]["difference"]
    assert (failed["seeds"], failed["error"]) == ("0", "The loss is nan.")
