"""The commands eval, compare and merge as a user meets them."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from cli import main
from retrieval import DmlError, evaluate
from retrieval.embeddings import Split
from retrieval.formats.hdf5.writing import write
from tests.commands import X, Y, call

DMLTOOL = Path(sys.executable).parent / "dmltool"

QUICK = ("--no-nmi", "--no-map")


def test_eval_prints_a_table_with_both_distances(files):
    result = call("eval", files / "a.h5", "--seeds", 1)
    assert result.exit_code == 0
    for word in ("60 queries", "l2", "cos", "Recall@1", "Recall@8", "MRR", "MAP@R", "NMI"):
        assert word in result.stdout


def test_eval_json_is_the_only_thing_on_stdout(files):
    result = call("eval", files / "x.npy", "--labels", files / "y.npy", "--json", *QUICK)
    parsed = json.loads(result.stdout)
    assert parsed["distances"].keys() == {"cos", "l2"}
    assert parsed["source"]["format"] == "npy"


def test_eval_asks_the_gallery_of_a_file_that_has_one(files):
    result = json.loads(call("eval", files / "shop.h5", "--json", *QUICK).stdout)
    assert (result["protocol"], result["queries"]) == ("query-gallery", 20)


def test_eval_takes_the_gallery_from_another_file(files):
    args = ("eval", files / "a.h5", "--gallery", files / "b.h5", "--json", *QUICK)
    result = json.loads(call(*args, "--distance", "l2", "--recall-at", "1,7").stdout)
    assert (result["protocol"], result["gallery"]) == ("query-gallery", 60)
    assert list(result["distances"]["l2"]["recall"]) == ["1", "7"]


def test_warnings_go_to_stderr(files):
    np.save(files / "equal.npy", np.ones((60, 3)))
    result = call("eval", files / "equal.npy", "--labels", files / "y.npy", *QUICK)
    assert "counted against them: 60 of 60" in result.stderr
    assert "exactly as near" not in result.stdout
    assert " 0.00" in result.stdout


def test_out_and_per_class_files_are_written_and_not_overwritten(files):
    out, classes = files / "r.json", files / "c.csv"
    args = ("eval", files / "a.h5", "--out", out, "--per-class", classes, *QUICK)
    assert call(*args).exit_code == 0
    recall = json.loads(out.read_text())["distances"]["cos"]["recall"]["1"]
    rows = list(csv.DictReader(classes.read_text().splitlines()))
    assert [row["name"] for row in rows] == [f"class {c}" for c in range(6)]
    mean = sum(int(r["queries"]) * float(r["recall@1_cos"]) for r in rows) / 60
    assert mean == pytest.approx(recall)
    again = call(*args)
    assert again.exit_code == 1
    assert "exists already" in again.stderr
    assert call(*args, "--force").exit_code == 0


def test_inputs_and_devices_are_not_overwritten(files):
    before = (files / "a.h5").read_bytes()
    (files / "link.h5").symlink_to(files / "a.h5")
    for out in ("a.h5", "link.h5"):
        result = call("eval", files / "a.h5", *QUICK, "--out", files / out, "--force")
        assert result.exit_code == 1
        assert "both an input and the output" in result.stderr
    assert (files / "a.h5").read_bytes() == before
    os.mkfifo(files / "pipe")
    result = call("eval", files / "a.h5", *QUICK, "--out", files / "pipe", "--force")
    assert "not a regular file" in result.stderr


def test_a_file_that_changes_while_it_is_read_gives_no_score(files, monkeypatch):
    from retrieval import evaluation

    def slow(*args):
        os.utime(files / "x.npy", ns=(1, 1))
        return score(*args)

    score = evaluation.score
    monkeypatch.setattr(evaluation, "score", slow)
    result = call("eval", files / "x.npy", "--labels", files / "y.npy", *QUICK)
    assert result.exit_code == 1
    assert "changed while it was read" in result.stderr
    assert result.stdout == ""


def test_kernels_compile_where_no_folder_can_be_written(files):
    code = (
        "import numba.core.caching as c\n"
        "c.CompileResultCacheImpl._locator_classes = []\n"
        "from cli import main\n"
        f"main(['eval', {str(files / 'a.h5')!r}, '--no-nmi', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["queries"] == 60


def test_rows_with_nan_are_refused_or_dropped(files, clustered):
    X, labels = clustered
    X[5] = np.nan
    np.savez(files / "nan.npz", embeddings=X, labels=labels)
    file, page = files / "nan.npz", files / "page.html"
    np.save(files / "labels.npy", labels)
    beside = ("--labels", files / "labels.npy")
    for command, rows in (
        (("eval", file, *beside, *QUICK), "rows with NaN or Inf"),
        (("compare", files / "x.npy", file, *beside, *QUICK), "NaN or Inf in A or B"),
        (
            ("report", file, *beside, "--no-nmi", "--map", "none", "--out", page),
            "rows with NaN or Inf",
        ),
    ):
        refused = call(*command)
        assert refused.exit_code == 1
        words = shlex.split(refused.stderr.split(" leave them out: ")[1])
        name, *rest = map(str, command)
        assert words == ["dmltool", name, "--drop-nonfinite", *rest]
        dropped = call(*words[1:])
        assert dropped.exit_code == 0
        assert f"{rows}, left out: 1" in dropped.stderr
    refused = call("eval", *QUICK, "--", file)
    assert f"eval --drop-nonfinite {' '.join(QUICK)} -- {file}" in refused.stderr
    # A program of its own with click gets the argument for Python.
    with click.Context(main.commands["eval"]), pytest.raises(DmlError) as error:
        evaluate(X, labels)
    assert error.value.fix.endswith(": drop_nonfinite=True")


def test_labels_of_queries_and_gallery_come_from_files_of_their_own(files):
    sides = ("eval", files / "x.npy", "--gallery", files / "x.npy", "--labels", files / "y.npy")
    missing = call(*sides)
    assert missing.exit_code == 1
    assert "--gallery-labels" in missing.stderr
    result = call(*sides, "--gallery-labels", files / "y.npy", "--json", *QUICK)
    assert json.loads(result.stdout)["source"]["taken"] == {
        "query": {"labels": str(files / "y.npy")},
        "gallery": {"vectors": str(files / "x.npy"), "labels": str(files / "y.npy")},
    }
    parsed = json.loads(result.stdout)
    assert parsed["distances"]["l2"]["recall"]["1"] == 1.0  # every query is in the gallery
    assert parsed["checks"]["queries_in_gallery"] == 60


def test_compare_shows_differences_and_flips(files):
    result = call("compare", files / "a.h5", files / "b.h5", "--distance", "cos", "--no-map")
    assert "B - A" in result.stdout
    assert "B gains" in result.stdout
    out = files / "compare.json"
    parsed = json.loads(
        call("compare", files / "a.h5", files / "b.h5", "--json", "--out", out).stdout
    )
    assert json.loads(out.read_text()) == parsed
    assert parsed["version"] == 1
    assert set(parsed["distances"]["l2"]["mrr"]) == {"a", "b", "difference", "ci", "p"}


def test_eval_shows_the_scores_before_k_means_and_keeps_them_when_that_is_interrupted(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2000, 64), dtype=np.float32)
    np.savez(tmp_path / "x.npz", embeddings=X, labels=np.arange(2000) % 500)
    endless = ("--nmi", "--seeds", "100000", "--no-map", "--out", "out.json")
    process = subprocess.Popen(
        [DMLTOOL, "eval", "x.npz", *endless, "--per-class", "classes.csv"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    shown = [process.stdout.readline() for _ in range(8)]
    assert any("Recall@8" in line for line in shown), shown
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "NMI" not in rest
    assert "takes about" in told
    assert "NMI was left out: k-means was interrupted" in told
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["settings"]["nmi"] is False
    assert "nmi" not in result["distances"]["cos"]
    assert result["notes"] == ["NMI was left out: k-means was interrupted"]
    assert (tmp_path / "classes.csv").exists()


def test_an_interrupted_k_means_still_prints_the_json(files, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("retrieval.clustering.cluster_scores", interrupted)
    result = call("eval", files / "a.h5", "--json", "--no-map")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["distances"]["l2"]["recall"]["1"] > 0


def test_long_k_means_is_left_out_unless_it_is_wanted(files, monkeypatch):
    monkeypatch.setattr("retrieval.clustering.SPEED", 1000)
    result = call("eval", files / "a.h5", "--no-map")
    assert "NMI" not in result.stdout
    assert "would take about" in result.stderr
    assert "--nmi computes it" in result.stderr
    found = json.loads(call("eval", files / "a.h5", "--no-map", "--json").stdout)
    assert "NMI was left out" in found["notes"][0]
    forced = call("eval", files / "a.h5", "--no-map", "--nmi", "--seeds", 1)
    assert "NMI" in forced.stdout
    assert "k-means for NMI takes about" in forced.stderr


def test_a_k_beyond_the_candidates_is_said(files):
    result = call("eval", files / "a.h5", "--recall-at", "1,59,500", *QUICK)
    assert "Recall@59, Recall@500: a query has only 59 candidates" in result.stderr
    shop = call("eval", files / "shop.h5", "--recall-at", "1,40", "--json", *QUICK)
    assert "Recall@40: a query has only 40 candidates" in json.loads(shop.stdout)["notes"][0]
    assert "Recall@40" in shop.stderr
    assert json.loads(call("eval", files / "a.h5", "--json", *QUICK).stdout)["notes"] == []


@pytest.mark.parametrize("command", ["eval", "compare"])
def test_any_number_of_threads_works(files, command):
    names = [files / "a.h5"] if command == "eval" else [files / "a.h5", files / "b.h5"]
    options = ("--threads", 100_000, "--nmi", "--seeds", 1, "--json")
    few, many = (
        json.loads(call(command, *names, *options, *more).stdout)["distances"]
        for more in (("--threads", 1), ())
    )
    assert few == many


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.parquet", "x.csv", "x", "x.h5.gz"])
def test_merge_writes_only_to_names_of_hdf5_files(files, tmp_path, name):
    """HDF5 under another name would be refused, or misread, by whoever opens it."""
    before = sorted(tmp_path.iterdir())
    done = call("merge", files / "a.h5", files / "a.h5", "--out", tmp_path / name)
    assert done.exit_code == 1
    assert f"{name} is not the name of an embedding file" in done.stderr
    assert ".h5 or .hdf5 or .he5" in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_eval_says_which_columns_it_took(table):
    found = call("eval", table, "--no-nmi")
    assert "vectors from d0 ... d4, 5 columns; labels from label." in found.stderr
    assert "not used: width" in found.stderr
    source = json.loads(call("eval", table, "--no-nmi", "--json").stdout)["source"]
    assert source["taken"] == {"test": {"vectors": "d0 ... d4, 5 columns", "labels": "label"}}
    assert source["notes"] == [f"{table}: not used: width"]


def test_eval_says_where_the_labels_came_from(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    found = call("eval", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", "--no-nmi")
    assert f"labels from {tmp_path / 'y.npy'}." in found.stderr


def test_a_run_folder_stands_for_its_embeddings(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "embeddings.h5", {"test": Split(X, Y)})
    inside = str(tmp_path / "a" / "embeddings.h5")
    assert (
        json.loads(call("eval", tmp_path / "a", "--no-nmi", "--json").stdout)["source"]["file"]
        == inside
    )
    assert json.loads(call("inspect", f"{tmp_path / 'a'}::test", "--json").stdout)["file"] == inside
    result = json.loads(call("compare", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert result["a"] == inside
    found = call(
        "report", tmp_path / "a", "--no-nmi", "--map", "none", "--out", tmp_path / "r.html"
    )
    assert found.exit_code == 0, found.output
    assert call("merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "ab.h5").exit_code == 0


def test_a_missing_file_is_told_in_sentences_and_an_unfinished_one_names_resume(tmp_path):
    done = CliRunner().invoke(main, ["eval", str(tmp_path / "x.h5")])
    assert "x.h5 does not exist.\n" in done.stderr
    assert f"Fix: Look there: ls {tmp_path}" in done.stderr
    (tmp_path / "x.h5.partial").touch()
    done = CliRunner().invoke(main, ["eval", str(tmp_path / "x.h5")])
    assert "Only x.h5.partial is there: its writer has not finished.\n" in done.stderr
    assert "--resume." in done.stderr


@pytest.mark.parametrize("option", ["--out", "--per-class"])
def test_an_empty_name_of_an_output_is_an_error(files, option):
    refused = call("eval", files / "a.h5", *QUICK, option, "")
    assert refused.exit_code == 1
    assert "empty" in refused.stderr


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_merge_refuses_what_is_no_name(files, name):
    refused = call("merge", files / "a.h5", files / "a.h5", "--out", name)
    assert refused.exit_code == 1
    assert ("empty" if not name else "is a folder") in refused.stderr
