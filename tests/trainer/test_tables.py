"""What a run shows: readable on narrow terminals, every column under its own title."""

import io
import re
import shlex

import pytest
from rich.console import Console

from retrieval.distances import DISTANCES
from trainer.tables import Display, how_to_continue, result_table

SCORES = {"cos": 0.25, "l2": 0.75}
SHOWN = [f"{100 * SCORES[d]:.2f}" for d in DISTANCES]


def numbers(line: str) -> list[str]:
    return [word for word in line.split() if word in SHOWN]


def test_scores_of_epochs_stand_under_their_distance():
    console = Console(file=io.StringIO(), width=100)
    display = Display(console)
    record = {"loss": 1.0, "parts": {}, "images_per_second": 9, "seconds": 1, "best": True}
    display.epoch(record | {"epoch": 0, "scores": SCORES, "pixels": SCORES})
    display.epoch(record | {"epoch": 1, "scores": SCORES})
    head, *rows = console.file.getvalue().splitlines()
    titles = [f"R@1 {d}" for d in DISTANCES]
    assert sorted(titles, key=head.index) == titles
    assert [numbers(row) for row in rows] == [SHOWN] * 3


def test_the_result_has_its_scores_under_their_distance():
    found = {d: {"recall": {"1": s}, "map_at_r": s, "r_precision": s} for d, s in SCORES.items()}
    result = {
        "run": "runs/x",
        "best_epoch": 1,
        "epochs": 1,
        "select": "val",
        "scores": SCORES,
        "baselines": {"pixels": SCORES, "untrained": SCORES},
        "test": {"distances": found},
    }
    console = Console(file=io.StringIO(), width=100)
    console.print(result_table(result))
    lines = [line for line in console.file.getvalue().splitlines() if line.strip()]
    assert [d for d in lines[1].replace(",", " ").split() if d in DISTANCES] == list(DISTANCES)
    rows = [numbers(line) for line in lines if "Recall@" in line or "MAP" in line]
    assert rows == [SHOWN] * 5


PARTS = {
    "ce": {"ce": 1.5},
    "spce": {"tightness": -12.3456, "contrastive": 17.8912},
    "center": {"tightness": 12.3456, "contrastive": 17.8912, "center": 3.25},
}


def record(epoch, parts):
    return {
        "epoch": epoch,
        "loss": 123.4567,
        "parts": parts,
        "scores": SCORES,
        "best": True,
        "images_per_second": 12345.6,
        "seconds": 321.5,
    }


def shown(width, parts, terminal=True, quiet=10.0):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None)
    with Display(console, quiet) as display:
        display.begin("runs/mine", 30, 1, 0)
        display.epoch({"epoch": 0, "scores": SCORES, "pixels": SCORES})
        values = {"loss": 1.23456, **parts, "images_per_second": 1234.5}
        for epoch in range(1, 3):
            display.step(epoch, 1, 1, values)
            display.bar.bar.refresh()
            display.epoch(record(epoch, parts))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_rows_and_bar_fit_the_terminal(width, name):
    lines = shown(width, PARTS[name])
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines if re.match(r" +[12] +123.4567", line)]
    assert len(rows) == 2
    assert all(row[-1] == "best" and "75.00" in row for row in rows)
    assert 1 <= sum("R@1 l2 %" in line for line in lines) <= 2  # again where parts begin
    bars = [line for line in lines if "epoch 2/30" in line]
    assert bars
    assert all("left" in line and "loss 1.235" in line for line in bars)


def test_parts_of_the_loss_have_columns_of_their_own_where_they_fit():
    assert any("contrastive" in line for line in shown(80, PARTS["spce"]))
    assert any("images/s" in line and "epoch  " in line for line in shown(120, PARTS["spce"]))


def test_titles_come_again_where_the_parts_change():
    file = io.StringIO()
    display = Display(Console(file=file, width=80))
    for epoch, parts in enumerate(({"ce": 1.0}, {"refined": 1.0, "ce": 2.0}), 1):
        display.epoch(record(epoch, parts))
    assert file.getvalue().count("R@1 cos %") == 2


def test_the_baselines_are_named():
    lines = shown(60, PARTS["spce"])
    assert any(re.match(r" +0 .*75.00 +25.00 .*untrained network$", line) for line in lines)
    assert any(line.endswith("raw pixels") for line in lines)


def test_a_log_says_how_long_it_will_take():
    lines = shown(80, PARTS["spce"], terminal=False, quiet=-1.0)
    assert any(re.match(r"epoch 2/30: 6%, about \d+ s left, loss 1.235 · ", line) for line in lines)


def test_the_result_says_of_how_many_classes_its_scores_are():
    found = {d: {"recall": {"1": 0.5}, "map_at_r": 0.1, "r_precision": 0.2} for d in SCORES}
    result = {
        "run": "runs/mine",
        "best_epoch": 2,
        "epochs": 3,
        "select": "val",
        "scores": SCORES,
        "baselines": {"pixels": SCORES},
        "test": {"distances": found},
        "counts": {"train": [9, 3], "val": [6, 2], "test": [5, 1]},
    }
    file = io.StringIO()
    Console(file=file, width=80).print(result_table(result))
    assert "val: 6 images of 2 classes" in file.getvalue()
    assert "test: 5 images of 1 class\n" in file.getvalue()
    assert re.search(r"raw pixels\) +75.00 +25.00", file.getvalue())


def test_a_result_without_scores_has_no_table():
    result = {"run": "runs/mine", "best_epoch": 3, "epochs": 3, "select": "last", "test": None}
    file = io.StringIO()
    Console(file=file).print(result_table(result | {"scores": {}, "baselines": {}}))
    assert file.getvalue() == "runs/mine: epoch 3 of 3\n"


def test_notes_are_broken_between_words_on_a_terminal_and_whole_elsewhere():
    text = "folder: 69 train images of 10 classes, 11 val images of 2 classes, 30 test images of 4"
    shown = {}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=60, force_terminal=terminal, color_system=None)
        Display(console).note(text)
        shown[terminal] = console.file.getvalue().splitlines()
    assert shown[False] == [text]
    assert len(shown[True]) == 2
    assert [word for line in shown[True] for word in line.split()] == text.split()


def test_the_command_that_goes_on_can_be_copied_whatever_the_folder_is_called(tmp_path):
    folder = tmp_path / "my runs [a]" / ("long" * 20)
    folder.mkdir(parents=True)
    (folder / "last.pt").touch()
    command = how_to_continue(folder).split("`")[1]
    assert shlex.split(command) == ["dmltool", "train", "--resume", str(folder)]
