"""The commands export and embed as a user meets them."""

import os

import numpy as np

from exporter.exporting import EMBEDDINGS, MODEL
from retrieval.loading.load import load
from tests.commands import call
from tests.trainer.small import SMALL


def test_names_that_are_not_utf8_come_through_to_the_scores(dmltool, photos):
    for name in list(photos.iterdir()):
        (name / "0.png").rename(name / os.fsdecode(b"\xe9.png"))
        name.rename(photos / (name.name + os.fsdecode(b"\xe9")))
    assert (
        dmltool("train", "--data", photos, *SMALL, "--epochs", "1", "--out", "run").exit_code == 0
    )
    done = dmltool("export", "run", "--no-onnx", "--backend", "torch")
    assert done.exit_code == 0, done.output
    done = dmltool("eval", "run/embeddings.h5", "--no-nmi", "--per-class", "classes.csv")
    assert done.exit_code == 0, done.output
    assert "Recall@1" in done.stdout


def test_threads_beyond_the_processors_are_said_and_not_started(dmltool, photos, tmp_path):
    many = ("--threads", "100000")
    done = dmltool("train", "--data", photos, "--dataset", "folder", *SMALL, *many, "--out", "run")
    assert done.exit_code == 0, done.output
    assert "--threads 100000:" in done.stderr
    done = dmltool("export", "run", *many)
    assert done.exit_code == 0, done.output
    assert "--threads 100000:" in done.stderr
    done = dmltool("embed", "run/model.onnx", photos, "--out", "x.h5", *many)
    assert done.exit_code == 0, done.output
    assert "--threads 100000:" in done.stderr


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_an_interrupted_export_says_how_to_go_on(run, monkeypatch):
    monkeypatch.setattr("exporter.exporting.embed", interrupt)
    done = call("export", run)
    assert done.exit_code == 130
    assert "nothing was written" not in done.stderr
    assert "--resume" in done.stderr
    monkeypatch.undo()
    assert call("export", run, "--resume").exit_code == 0


def test_an_export_stopped_before_anything_was_written_does_not_name_resume(run, monkeypatch):
    monkeypatch.setattr("exporter.networks.load_member", interrupt)
    done = call("export", run)
    assert done.exit_code == 130
    assert "nothing was written" in done.stderr
    assert "--resume" not in done.stderr
    (run / MODEL).write_bytes(b"of an earlier export")
    assert "--resume" not in call("export", run, "--force").stderr


def test_shards_of_an_export_have_names_of_their_own_and_are_read_as_one_set(run, tmp_path):
    export = ("export", run, "--no-onnx", "--backend", "torch", "--batch-size", 8)
    call(*export, "--out", tmp_path)
    for k in (1, 2):
        done = call(*export, "--shard", f"{k}/2")
        assert done.exit_code == 0, done.output
        assert "Collect all 2 shards in one folder, such as shards." in done.stderr
    assert sorted(path.name for path in run.glob("*.h5")) == [
        "embeddings-1-of-2.h5",
        "embeddings-2-of-2.h5",
    ]
    found, whole = (load(folder).splits["test"].vectors for folder in (run, tmp_path))
    np.testing.assert_array_equal(found, whole)
    assert "embeddings-1-of-2.h5 exists already" in call(*export, "--shard", "1/2").stderr


def test_an_export_ends_with_the_next_step(run):
    done = call("export", run)
    assert done.stderr.splitlines()[-1] == f"Next: dmltool eval {run / EMBEDDINGS}"
    done = call("export", run, "--no-embeddings", "--force")
    assert f"Next: dmltool embed {run / MODEL}" in done.stderr
    embedded = ("embed", run / MODEL, "glyphs", "--out", run / "g.h5")
    assert call(*embedded).stderr.splitlines()[-1] == f"Next: dmltool eval {run / 'g.h5'}"
    assert "Next:" not in call(*embedded, "--force", "--json").stderr
