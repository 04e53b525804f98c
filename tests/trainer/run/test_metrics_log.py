"""The curves of a run: which lines are drawn; and the environment that is recorded."""

import json

import pytest
from matplotlib.axes import Axes
from PIL import Image

from trainer.run.metrics_log import draw_curves, environment, versions

START = {
    "epoch": 0,
    "loss": None,
    "parts": {},
    "monitor": {},
    "scores": {"cos": 0.4, "l2": 0.3},
    "scores_of": "val",
    "pixels": {"cos": 0.5, "l2": 0.45},
}


def records(**changes):
    """Epoch 0 and three epochs; a function of the epoch changes a key."""
    plain = {"parts": {"tightness": 1.0}, "monitor": {}, "scores_of": "val"}
    later = [
        plain
        | {"epoch": n, "loss": 1 / n, "scores": {"cos": n / 4, "l2": n / 5}}
        | {key: change(n) for key, change in changes.items()}
        for n in (1, 2, 3)
    ]
    return [START, *later]


@pytest.mark.parametrize(
    ("drawn", "lines"),
    [
        (records(), {"loss", "tightness", "cos", "l2", "cos, raw pixels", "l2, raw pixels"}),
        (records(monitor=lambda n: {"spce": None if n == 1 else 0.5}), {"spce"}),
        (records(train_scores=lambda n: {"cos": 0.9}), {"cos, training images"}),
        (records(scores=lambda n: {})[1:], {"loss", "tightness"}),
        (records(parts=lambda n: {"ce": 1.0} if n == 1 else {"refined": 1.0}), {"ce", "refined"}),
    ],
    ids=["plain", "monitor", "training images", "no scores", "two phases"],
)
def test_every_number_of_a_run_has_a_curve(drawn, lines, tmp_path, monkeypatch):
    seen = {}
    plot = Axes.plot

    def noted(self, epochs, values, **options):
        seen[options["label"]] = epochs
        return plot(self, epochs, values, **options)

    monkeypatch.setattr(Axes, "plot", noted)
    draw_curves(tmp_path, drawn)
    assert lines <= seen.keys()
    assert seen["tightness" if "tightness" in seen else "refined"][-1] == 3
    assert ("cos" in seen) == any(record["scores"] for record in drawn)
    with Image.open(tmp_path / "curves.png") as image:
        image.load()
        panels = 1 + ("spce" in seen) + ("cos" in seen)
        assert image.width == 460 * panels
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_a_run_without_epochs_has_no_curves(tmp_path):
    draw_curves(tmp_path, [])
    assert not list(tmp_path.iterdir())


def test_versions_name_python_and_torch():
    assert json.loads(json.dumps(versions())).keys() >= {"python", "torch", "dmltool"}


def test_passwords_are_left_out_of_notes_and_of_the_command_that_is_recorded(monkeypatch):
    monkeypatch.setattr("sys.argv", ["dmltool", "--storage", "postgresql://me:s3cret@host/x"])
    found = environment("cpu", 1)["command"]
    assert found == ["dmltool", "--storage", "postgresql://host/x"]
