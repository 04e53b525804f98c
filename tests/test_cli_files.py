"""What commands say of files from elsewhere: what was taken, and names with control characters."""

import json

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from cli import main
from retrieval.embeddings import Split
from retrieval.formats.hdf5.file import write

X = np.random.default_rng(0).standard_normal((12, 5))
Y = np.arange(12) // 3


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def table(tmp_path):
    frame = pd.DataFrame(X, columns=[f"d{n}" for n in range(5)]).assign(label=Y, width=0.5)
    frame.to_csv(tmp_path / "x.csv", index=False)
    return tmp_path / "x.csv"


def test_eval_says_which_columns_it_took(table):
    found = run("eval", table, "--no-nmi")
    assert "vectors from d0 ... d4, 5 columns; labels from label." in found.stderr
    assert "not used: width" in found.stderr
    source = json.loads(run("eval", table, "--no-nmi", "--json").stdout)["source"]
    assert source["taken"] == {"test": {"vectors": "d0 ... d4, 5 columns", "labels": "label"}}
    assert source["notes"] == [f"{table}: not used: width"]


def test_eval_says_where_the_labels_came_from(tmp_path):
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    found = run("eval", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", "--no-nmi")
    assert f"labels from {tmp_path / 'y.npy'}." in found.stderr


def test_inspect_says_which_arrays_it_took(tmp_path, table):
    np.savez(tmp_path / "x.npz", query_x=X, query_y=Y, gallery_x=X, gallery_y=Y)
    found = run("inspect", tmp_path / "x.npz")
    lines = [line.split() for line in found.stdout.splitlines()]
    assert ["vectors", "from", "query_x", "gallery_x"] in lines
    assert ["labels", "from", "query_y", "gallery_y"] in lines
    result = json.loads(run("inspect", table, "--json").stdout)
    assert result["splits"]["test"]["taken"]["vectors"] == "d0 ... d4, 5 columns"
    assert result["notes"] == [f"{table}: not used: width"]


def test_control_characters_of_names_do_not_reach_the_terminal(tmp_path):
    evil = "\x1b[31mred\x07\x9b\u202e"
    names = [f"{evil}{n}" for n in range(5)]
    pd.DataFrame(X, columns=names).assign(label=Y, **{f"{evil}x": 0.5}).to_csv(
        tmp_path / "x.csv", index=False
    )
    np.savez(tmp_path / "x.npz", **{f"a{evil}": X, f"b{evil}": X})
    for args in (("eval", "x.csv", "--no-nmi"), ("inspect", "x.csv"), ("inspect", "x.npz")):
        found = run(args[0], tmp_path / args[1], *args[2:])
        assert "\\x1b[31mred" in found.output
        assert not set("\x1b\x07\x9b\u202e") & set(found.output)
    assert found.exit_code == 1


def test_a_run_folder_stands_for_its_embeddings(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "embeddings.h5", {"test": Split(X, Y)})
    inside = str(tmp_path / "a" / "embeddings.h5")
    assert (
        json.loads(run("eval", tmp_path / "a", "--no-nmi", "--json").stdout)["source"]["file"]
        == inside
    )
    assert json.loads(run("inspect", f"{tmp_path / 'a'}::test", "--json").stdout)["file"] == inside
    result = json.loads(run("compare", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert result["a"] == inside
    found = run("report", tmp_path / "a", "--no-nmi", "--map", "none", "--out", tmp_path / "r.html")
    assert found.exit_code == 0, found.output
    assert run("merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "ab.h5").exit_code == 0


def test_a_missing_file_is_told_in_sentences_and_an_unfinished_one_names_resume(tmp_path):
    done = CliRunner().invoke(main, ["eval", str(tmp_path / "x.h5")])
    assert "x.h5 does not exist.\n" in done.stderr
    assert f"Fix: Look there: ls {tmp_path}" in done.stderr
    (tmp_path / "x.h5.partial").touch()
    done = CliRunner().invoke(main, ["eval", str(tmp_path / "x.h5")])
    assert "Only x.h5.partial is there: its writer has not finished.\n" in done.stderr
    assert "--resume." in done.stderr
