"""The commands export and embed as a user meets them."""

import os

from tests.trainer.conftest import SMALL


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
