"""What a run shows: every column under its own title."""

import io

from rich.console import Console

from retrieval.metrics import DISTANCES
from trainer.display import Display, result_table

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
        "run": "runs/x", "best_epoch": 1, "epochs": 1, "select": "val", "scores": SCORES,
        "baselines": {"pixels": SCORES, "untrained": SCORES}, "test": {"distances": found},
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    console.print(result_table(result))
    lines = [line for line in console.file.getvalue().splitlines() if line.strip()]
    assert [d for d in lines[1].replace(",", " ").split() if d in DISTANCES] == list(DISTANCES)
    rows = [numbers(line) for line in lines if "Recall@" in line or "MAP" in line]
    assert rows == [SHOWN] * 5
