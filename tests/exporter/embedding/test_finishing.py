"""Embedding files are rewritten at their end: without bad images, and as float16."""

import json
from pathlib import Path

import numpy as np
import pytest

from exporter.embedding import finishing
from retrieval.errors import DmlError
from retrieval.evaluation import evaluate
from retrieval.loading.load import load
from tests.exporter.embedding.toy import N, call, contents, quarters, stop_after
from tests.kills import Killed


@pytest.mark.parametrize("half", [False, True])
def test_resuming_what_is_finished_does_nothing(data, tmp_path, half):
    call(data, tmp_path / "x.h5", half=half)
    before = (tmp_path / "x.h5").read_bytes()
    done = call(data, tmp_path / "x.h5", stop_after(0)[0], resume=True, half=half)
    assert (done.computed, done.splits) == (0, {"test": N})
    assert (tmp_path / "x.h5").read_bytes() == before
    with pytest.raises(DmlError, match="exists"):
        call(data, tmp_path / "x.h5", resume=True, half=not half)


def test_skipped_images_are_left_out_and_recorded(data, tmp_path):
    root, paths = Path(data.root), data.paths
    (root / paths[3]).write_bytes(b"not an image")
    for place in (30, 31):
        (root / paths[place]).unlink()
    heard = []
    done = call(data, tmp_path / "x.h5", skip_bad=True, progress=lambda *told: heard.append(told))
    assert [path for path, _ in done.skipped] == [paths[3], paths[30], paths[31]]
    assert ("embedding", N, N) in heard
    assert (done.splits, done.computed) == ({"test": N - 3}, N - 3)
    left = np.delete(np.arange(N), [3, 30, 31])
    call(data, tmp_path / "left.h5", splits={"test": left})
    found, wanted = contents(tmp_path / "x.h5"), contents(tmp_path / "left.h5")
    assert found.pop("@skipped") == 3
    assert json.loads(found.pop("@skipped_paths"))[1] == [paths[30], "There is no such file."]
    assert len(found.pop("@listed_sha256")) == 64
    assert found == wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images", "left.h5", "x.h5"]
    again = call(data, tmp_path / "x.h5", skip_bad=True, resume=True)
    assert (again.computed, again.splits, again.skipped) == (0, {"test": N - 3}, done.skipped)


def test_more_bad_images_than_an_attribute_holds(data, tmp_path, monkeypatch):
    monkeypatch.setattr(finishing, "MOST_TEXT", 100)
    for place in range(8, 16):
        (Path(data.root) / data.paths[place]).unlink()
    call(data, tmp_path / "x.h5", skip_bad=True)
    attrs = load(tmp_path / "x.h5").attrs
    assert attrs["skipped"] == 8
    assert 1 <= len(json.loads(attrs["skipped_paths"])) < 8


@pytest.mark.parametrize("names", [("test",), ("query", "gallery")])
def test_half_stores_float16_and_tells_recall_of_both(data, tmp_path, names):
    splits = {s: data.rows(s) for s in names} if len(names) == 2 else None
    call(data, tmp_path / "x.h5", splits=splits)
    done = call(data, tmp_path / "y.h5", splits=splits, half=True)
    full, half = load(tmp_path / "x.h5").splits, load(tmp_path / "y.h5").splits
    assert done.dtype == "float16"
    for split in names:
        np.testing.assert_array_equal(half[split].vectors, full[split].vectors.astype("f2"))
    for n, found in enumerate((full, half)):
        sides = [array for s in names for array in (found[s].vectors, found[s].labels)]
        scores = evaluate(*sides, nmi=False, recall_at=1)["distances"]
        for distance in ("cos", "l2"):
            assert done.recall[distance][n] == scores[distance]["recall"]["1"]
    assert 0.2 < done.recall["cos"][0] < 1


def test_half_tells_what_is_lost(data, tmp_path):
    """Vectors that float16 cannot tell apart."""

    def near(images):
        return 1 + quarters(images) / 2**20

    def skipped(_):
        raise AssertionError("nothing is computed twice")

    done = call(data, tmp_path / "y.h5", near, half=True)
    assert done.recall["l2"][1] < done.recall["l2"][0]
    with pytest.raises(DmlError, match="does not fit float16"):
        call(data, tmp_path / "z.h5", lambda x: quarters(x) * 1e6, half=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images", "y.h5", "z.h5.partial"]
    assert call(data, tmp_path / "z.h5", skipped, resume=True).dtype == "float32"


def test_a_disk_that_fills_up_at_the_last_step_keeps_what_was_computed(data, tmp_path):
    given = finishing.Writer

    def full(path, *args, **options):
        writer = given(path, *args, **options)
        writer._reserve = lambda raw: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        return writer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finishing, "Writer", full)
        with pytest.raises(DmlError, match="the disk is full"):
            call(data, tmp_path / "x.h5", half=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images", "x.h5.partial"]
    done = call(data, tmp_path / "x.h5", stop_after(0)[0], resume=True, half=True)
    assert (done.computed, done.dtype) == (0, "float16")


def test_nobody_else_writes_the_file_while_it_becomes_float16(data, tmp_path):
    refused = []

    def begin_another(stage, done, total):
        if stage == "writing":
            with pytest.raises(DmlError, match="in use"):
                call(data, tmp_path / "x.h5", force=True)
            refused.append(done)

    call(data, tmp_path / "x.h5", half=True, progress=begin_another)
    assert refused
    assert load(tmp_path / "x.h5").splits["test"].vectors.dtype == np.float16


def test_what_a_killed_conversion_left_is_removed_by_the_next_start(data, tmp_path):
    left = tmp_path / ".x.h5-abc"
    left.mkdir()
    for name in ("lock", "x.h5.partial"):
        (left / name).write_bytes(b"half")
    call(data, tmp_path / "x.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "x.h5"]


def test_files_are_rewritten_where_no_open_file_can_be_renamed(data, tmp_path, as_on_windows):
    (Path(data.root) / data.paths[3]).write_bytes(b"not an image")
    run = stop_after(20)[0]
    with pytest.raises(Killed):
        call(data, tmp_path / "x.h5", run, half=True, skip_bad=True)
    for options in ({"resume": True}, {"force": True}, {"resume": True}):
        done = call(data, tmp_path / "x.h5", half=True, skip_bad=True, **options)
        assert (done.dtype, len(done.skipped)) == ("float16", 1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "x.h5"]
