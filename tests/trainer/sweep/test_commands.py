"""The command sweep: which options go together."""

import shutil

from tests.commands import call
from tests.trainer.small import SMALL
from tests.trainer.sweep.killed import LR


def test_a_sweep_names_what_varies():
    assert call("sweep").exit_code == 2
    assert call("sweep", "--grid", "optimizer.lr=1", "--space", "x.toml").exit_code == 2


def test_a_sweep_names_its_winner_also_where_a_run_is_expected(pictures, tmp_path):
    folder, moved = tmp_path / "sw", tmp_path / "elsewhere"
    words = (w for w in SMALL if "workers" not in w)
    words = (*words, "--data", pictures, "--epochs", 1, "--seeds", 1, "--out", folder)
    done = call("sweep", "--grid", LR, *words)
    assert done.exit_code == 0, done.output
    best, step = done.stderr.splitlines()[-2:]
    value = best.removeprefix("Best setting: optimizer.lr=")
    run = folder / f"trial-{('0.0001', '0.003').index(value):03d}" / "seed-0"
    assert step == f"Next: dmltool export {run}"
    shutil.move(folder, moved)
    run = moved / run.relative_to(folder)
    for args in (("eval", moved), ("export", moved), ("train", "--resume", moved)):
        done = call(*args)
        assert done.exit_code == 1
        assert str(run) in done.stderr, done.stderr
    assert call("export", run, "--no-onnx", "--backend", "torch").exit_code == 0
    assert f"Name its embeddings: {run / 'embeddings.h5'}" in call("eval", moved).stderr
    done = call("report", run, "--run", moved, "--out", tmp_path / "r.html")
    assert f"--run {run}" in done.stderr
    assert f"Name a run in it: {run}" in call("export", run.parent).stderr
