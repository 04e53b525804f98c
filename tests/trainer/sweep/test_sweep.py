"""Sweeps of runs that take a second: what is trained, compared and written, also after kills."""

import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from retrieval.errors import DmlError
from tests.commands import call
from tests.forks import Forked
from tests.kills import Killed
from tests.trainer.small import SMALL
from tests.trainer.sweep.killed import LR, KilledAt
from trainer.run.checkpoint import load
from trainer.run.folder import locked
from trainer.sweep.space import Range
from trainer.sweep.study import GRACE, Trials
from trainer.sweep.sweep import sweep


def table(folder):
    return (folder / "sweep.csv").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Holds the result of a sweep that was trained once, by its plan."""
    return {}


def result_of(plan, tmp_path, undisturbed):
    if "found" not in undisturbed:
        folder = undisturbed["folder"] = tmp_path / "undisturbed"
        undisturbed["found"] = sweep(plan(LR), folder)
        undisturbed["table"] = table(folder)
    return undisturbed


def test_settings_are_ordered_by_their_mean_over_seeds(plan, tmp_path, undisturbed):
    found = result_of(plan, tmp_path, undisturbed)["found"]
    folder = undisturbed["folder"]
    means = []
    for row in found["rows"]:
        runs = [folder / f"trial-{row['trial']:03d}" / f"seed-{seed}" for seed in (0, 1)]
        best = [load(run / "best.pt")["best"]["scores"]["cos"] for run in runs]
        mean, std = (row["validation"]["cos"]["recall@1"][key] for key in ("mean", "std"))
        assert mean == pytest.approx(np.mean(best), abs=1e-12)
        assert std == pytest.approx(np.std(best, ddof=1), abs=1e-12)
        means.append(mean)
    assert means == sorted(means, reverse=True)
    assert {row["values"]["optimizer.lr"] for row in found["rows"]} == {"0.003", "0.0001"}


def test_only_the_best_setting_is_scored_on_the_test_set(plan, tmp_path, undisturbed):
    found = result_of(plan, tmp_path, undisturbed)["found"]
    first, second = found["rows"]
    assert first["test"]["cos"]["recall@1"]["mean"] > 0
    assert second["test"] is None
    for row, scored in ((first, True), (second, False)):
        for run in row["runs"]:
            result = json.loads((Path(run["run"]) / "result.json").read_text())
            assert (result["test"] is not None) == scored


def test_csv_and_json_have_the_same_rows(plan, tmp_path, undisturbed):
    found = result_of(plan, tmp_path, undisturbed)
    assert json.loads((found["folder"] / "sweep.json").read_text()) == found["found"]
    rows = list(csv.DictReader(found["table"].splitlines()))
    for row, line in zip(found["found"]["rows"], rows, strict=True):
        assert line["optimizer.lr"] == row["values"]["optimizer.lr"]
        mean = row["validation"]["cos"]["recall@1"]["mean"]
        assert float(line["validation cos recall@1 mean"]) == mean


def test_all_settings_are_scored_on_the_test_set_if_asked_also_later(plan, tmp_path, undisturbed):
    """The runs are finished: a copy of the sweep only scores them, and keeps their order."""
    before = result_of(plan, tmp_path, undisturbed)
    folder = tmp_path / "copy" / before["folder"].name
    shutil.copytree(before["folder"], folder)
    found = sweep(plan(LR, test_all=True), folder, watch=KilledAt(1))
    for row, old in zip(found["rows"], before["found"]["rows"], strict=True):
        assert row["validation"] == old["validation"]
        scores = [run["test"]["cos"]["recall"]["1"] for run in row["runs"]]
        assert row["test"]["cos"]["recall@1"]["mean"] == pytest.approx(np.mean(scores))
    lines = list(csv.DictReader(table(folder).splitlines()))
    assert all(float(line["test cos recall@1 mean"]) > 0 for line in lines)
    assert found["rows"][0]["test"] == before["found"]["rows"][0]["test"]


def test_machines_share_a_storage_and_take_over_what_falls_silent(plan, tmp_path, undisturbed):
    """Two folders of one name stand for two machines; the first is killed in its first trial."""
    expected = result_of(plan, tmp_path, undisturbed)["table"]
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    one, two = (tmp_path / name / "sweep" for name in ("one", "two"))
    with pytest.raises(Killed):
        sweep(plan(LR), one, url, watch=KilledAt(1))
    assert not (one / "study.db").exists()
    two.mkdir(parents=True)
    trials = Trials(plan(LR), two, url)
    with trials.claimed() as claim:
        assert claim.number == 1  # the first is left to the other machine as long as it may live
    frozen = trials.all()[0]
    trials.study._storage.set_trial_user_attr(frozen._trial_id, "alive", time.time() - GRACE - 1)
    with trials.claimed() as claim:
        assert claim.number == 0
    sweep(plan(LR), two, url)
    assert table(two) == expected
    assert not list(one.glob("*/seed-1"))


def test_a_sweep_that_is_interrupted_ends_with_the_same_table(plan, tmp_path, undisturbed):
    expected = result_of(plan, tmp_path, undisturbed)["table"]
    for count in (1, 2, 3):
        with pytest.raises(Killed):
            sweep(plan(LR), tmp_path / "sweep", watch=KilledAt(count))
    sweep(plan(LR), tmp_path / "sweep")
    assert table(tmp_path / "sweep") == expected


def test_a_finished_sweep_trains_nothing_again(plan, tmp_path, undisturbed):
    expected = result_of(plan, tmp_path, undisturbed)
    sweep(plan(LR), expected["folder"], watch=KilledAt(1))
    assert table(expected["folder"]) == expected["table"]


def test_another_sweep_does_not_go_into_the_same_folder(plan, tmp_path, undisturbed):
    folder = result_of(plan, tmp_path, undisturbed)["folder"]
    with pytest.raises(DmlError, match="another sweep"):
        sweep(plan("optimizer.lr=0.1"), folder)
    with pytest.raises(DmlError, match="another sweep") as error:
        sweep(plan(LR, settings=(*plan(LR).settings, "optimizer.clip=1")), folder)
    assert "optimizer.clip" in error.value.why


def test_a_setting_that_diverges_is_the_last_of_the_table(plan, tmp_path):
    settings = (*plan(LR).settings, "schedule.epochs=2")
    found = sweep(plan("optimizer.lr=1e6,0.003", seeds=1, settings=settings), tmp_path / "sweep")
    good, bad = found["rows"]
    assert good["values"]["optimizer.lr"] == "0.003"
    assert bad["error"]
    assert bad["runs"] == []


def test_a_setting_without_room_or_whose_run_another_process_trains_is_left_for_later(
    plan, tmp_path, monkeypatch
):
    made, folder = plan(LR, seeds=1), tmp_path / "sweep"
    with monkeypatch.context() as patched:
        usage = shutil.disk_usage("/")._replace(free=1000)
        patched.setattr("trainer.run.folder.shutil.disk_usage", lambda _: usage)
        with pytest.raises(DmlError, match="too little room"):
            sweep(made, folder)
    (folder / "trial-000" / "seed-0").mkdir(exist_ok=True)
    with (
        locked(folder / "trial-000" / "seed-0"),
        pytest.raises(DmlError, match="being trained by another process"),
    ):
        sweep(made, folder)
    assert [row["error"] for row in sweep(made, folder)["rows"]] == [None, None]


def test_a_sweep_whose_settings_all_fail_ends_with_the_reason(plan, tmp_path):
    space = {"batches.images": Range(2, 3)}  # without a number of classes in a batch
    with pytest.raises(DmlError, match="No setting") as caught:
        sweep(plan(space=space, method="random", trials=2, seeds=1), tmp_path / "sweep")
    assert "classes" in caught.value.why
    assert table(tmp_path / "sweep").count("batches.images") > 2  # both, with the reason


def command(pictures, out, *more):
    small = (word for word in SMALL if "--workers" not in word)  # here those that train
    words = (
        *small,
        "--epochs=1",
        "--set=data.workers=0",
        "--data",
        pictures,
        "--grid",
        LR,
        "--seeds",
        2,
        "--threads",
        1,
        "--out",
        out,
    )
    return ["sweep", *map(str, words), *more]


FORKING = """
import multiprocessing
fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda _: fork
from cli import main
main(prog_name="dmltool")
"""
"""The command, but that its workers are forked and do not start anew."""


def both_begun(pictures, folder, *program):
    """The first process of a sweep of two workers that have both begun."""
    process = Forked(*program, *command(pictures, folder, "--workers=2"))
    until(lambda: len(list(folder.glob("trial-*/seed-0/metrics.jsonl"))) == 2, process)
    return process


def test_a_first_worker_that_is_killed_leaves_a_sweep_that_goes_on(
    plan, pictures, tmp_path, undisturbed
):
    """The second process ends by itself."""
    expected, folder = result_of(plan, tmp_path, undisturbed)["table"], tmp_path / "sweep"
    process = both_begun(pictures, folder, "-c", FORKING)
    os.kill(process.process.pid, signal.SIGKILL)
    process.process.join()
    assert not (folder / "sweep.csv").exists()
    assert call(*command(pictures, folder)).exit_code == 0
    process.kill()
    assert table(folder) == expected


def test_the_run_of_a_killed_worker_is_taken_over_by_the_other(
    plan, pictures, tmp_path, undisturbed
):
    expected, folder = result_of(plan, tmp_path, undisturbed)["table"], tmp_path / "sweep"
    process = both_begun(pictures, folder, "-m", "cli")
    pid = process.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (worker,) = (
        int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(worker, signal.SIGKILL)
    assert process.end(timeout=120)[0] == 0
    assert table(folder) == expected


def until(happened, process, polls=15_000):
    """Wait for what a process does; counted in polls, as both may be stopped for a while."""
    for _ in range(polls):
        if happened():
            return
        assert process.running()
        time.sleep(0.02)
    raise AssertionError("it has not happened")


def test_a_sweep_inside_its_data_set_is_refused_before_its_folder_is_made(plan, pictures):
    with pytest.raises(DmlError, match="would lie inside its data set"):
        sweep(plan(LR), pictures / "sweep")
    assert not (pictures / "sweep").exists()
