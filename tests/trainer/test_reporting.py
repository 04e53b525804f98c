"""What a report shows of a run: its curves and settings, and its images."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from retrieval.errors import DmlError
from tests.retrieval.made import file
from tests.retrieval.shards import X, Y
from trainer.data import datasets
from trainer.reporting import note_on_run, pictures_of, run_view


@pytest.fixture
def run(tmp_path):
    """A run folder as `dmltool train` leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(
        '[data]\ndataset = "glyphs"\nroot = ""\noptions = {seed = 5, size = 16}\n'
    )
    records = [
        {
            "epoch": n,
            "loss": 3 / n,
            "parts": {"ce": 2 / n},
            "monitor": {"spce": None},
            "scores_of": "val",
            "scores": {"cos": 0.1 * n, "l2": 0.09 * n},
            "best": True,
        }
        for n in (1, 2)
    ]
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"epoch": 3, "lo']))
    return folder


def test_embeddings_of_another_run_get_a_note(run, tmp_path):
    (run / "best.pt").write_bytes(b"weights")
    own = hashlib.sha256(b"weights").hexdigest()
    attrs = [{"checkpoint_sha256": text} for text in (own, f"other,{own}", "other")]
    notes = [note_on_run(file(X, Y, attrs=each), run) for each in (*attrs, {})]
    assert notes[:2] == ["", ""]
    assert notes[2].endswith(f"another checkpoint than {run / 'best.pt'}")
    assert notes[3] == note_on_run(file(X, Y, attrs=attrs[2]), None) == ""


def test_a_run_brings_its_curves(run):
    view = run_view(run)
    assert view["epochs"] == [1, 2]
    assert view["lines"] == {
        "loss": [3.0, 1.5],
        "parts": {"ce": [2.0, 1.0]},
        "monitor": {"spce": [None, None]},
        "recall_cos": [0.1, 0.2],
        "recall_l2": [0.09, 0.18],
    }
    assert (view["name"], view["scores_of"]) == ("run", "val")
    assert "seed = 5" in view["settings"]
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(DmlError, match="no epochs"):
        run_view(run)


def test_a_run_written_by_others_shows_what_can_be_shown(run):
    strange = [{"epoch": "x", "loss": 1}, {"epoch": None, "loss": 2, "parts": [1], "scores": 3}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, strange)))
    view = run_view(run)
    assert view["epochs"] == [1, 2]
    assert (view["lines"]["loss"], view["lines"]["parts"]) == ([1, 2], {})
    numbers = '{"epoch": 1, "loss": 1%s}\n{"epoch": 2, "loss": NaN}' % ("0" * 400)
    (run / "metrics.jsonl").write_text(numbers)
    assert run_view(run)["lines"]["loss"] == [None, None]
    for text in ("data = 3", '[data]\ndataset = "nothing"\noptions = 3'):
        (run / "config.toml").write_text(text)
        read, note = pictures_of(file(np.eye(2), [0, 1]), None, run)
        assert read is None
        assert "images are not shown" in note


@pytest.mark.parametrize("option", ["root", "name", "no_such"])
def test_options_that_a_data_set_does_not_have_are_told(option):
    said = {"dataset": "glyphs", "images": json.dumps({"options": {option: "x"}})}
    read, note = pictures_of(file(X, Y, np.arange(len(X)).astype(str), attrs=said), None, None)
    assert read is None
    assert f"has no option '{option}'" in note


@pytest.mark.parametrize("variant", ["test", "query"])
def test_letters_are_drawn_again(variant, tmp_path, run):
    data = datasets.load("glyphs", variant=variant)
    split = "test" if variant == "test" else "gallery"
    paths = [data.paths[n] for n in data.rows(split)[:30]]
    letters = file(np.eye(30), np.arange(30), np.array(paths), attrs={"dataset": "glyphs"})
    read, note = pictures_of(letters, None, None)
    assert note == ""
    large = datasets.load("glyphs", size=64)
    np.testing.assert_array_equal(read(paths[3]), large.reader(paths[3], None))
    again, _ = pictures_of(letters, None, run)
    seeded = datasets.load("glyphs", size=64, seed=5)
    np.testing.assert_array_equal(again(paths[3]), seeded.reader(paths[3], None))
    assert (again(paths[3]) != read(paths[3])).any()
    read(paths[3].replace("/0", "/12"))
    for path in ("U+0416/../../secret/0", "../0", "U+0416/DejaVuSans/x", "0", "\x00/0"):
        with pytest.raises(DmlError, match="not an image"):
            read(path)


def test_images_are_where_the_run_has_them(tmp_path, run):
    root = tmp_path / "birds"
    for split, label in (("train", "a"), ("train", "b"), ("test", "c")):
        (root / split / label).mkdir(parents=True)
        for n in range(2):
            Image.new("RGB", (9, 9), (n, 0, 0)).save(root / split / label / f"{n}.png")
    (run / "config.toml").write_text(f'[data]\ndataset = "folder"\nroot = "{root}"\n')
    data = file(np.eye(2), [0, 0], np.array(["test/c/0.png", "../x"]), attrs={"dataset": "folder"})
    read, _ = pictures_of(data, None, run)
    assert read("test/c/1.png").shape == (9, 9, 3)
    with pytest.raises(DmlError, match="leads out"):
        read("../run/config.toml")
    other = replace(data, attrs={"dataset": "cub"})
    read, note = pictures_of(other, None, run)
    assert read is None
    assert "folder" in note
    (run / "config.toml").write_text('[data]\ndataset = "folder"\nroot = "gone"\n')
    read, note = pictures_of(data, None, run)
    assert read is None
    assert "--images" in note


def test_readers_of_reports_need_no_torch():
    code = "import sys, trainer.reporting; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
    )
