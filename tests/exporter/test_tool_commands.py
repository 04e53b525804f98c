"""The command inspect as a user meets it. test_doctor.py and test_demo.py have the other tools."""

import json

import numpy as np
import pytest

from tests.conftest import X, Y, call


def test_inspect_tells_what_is_inside(files):
    result = call("inspect", files / "a.h5")
    for word in ("60", "float32", "no", "class", "model"):
        assert word in result.stdout
    parsed = json.loads(call("inspect", files / "shop.h5", "--json").stdout)
    assert parsed["splits"]["gallery"]["rows"] == 40
    assert parsed["splits"]["query"]["labels"]["classes"] == 6


def test_inspect_shows_entropies_on_request(files):
    shown = call("inspect", files / "shop.h5", "--entropy")
    assert shown.exit_code == 0, shown.output
    found = json.loads(call("inspect", files / "shop.h5", "--entropy", "--json").stdout)["splits"]
    for split in found.values():
        entropy = split["entropy"]
        assert f"{entropy['labels']:.4f}" in shown.stdout
        assert f"{entropy['l2']['embeddings']:.4f}" in shown.stdout
        assert entropy["cos"]["difference"] == pytest.approx(
            entropy["cos"]["embeddings"] - entropy["cos"]["given_labels"]
        )
    assert "CE of the head" not in shown.stdout
    for rows, value in (([[1, 2], [3, 4], [np.nan, 1]], 2 * np.log(8)), ([[np.nan, 1]], None)):
        np.save(files / "rows.npy", np.array(rows, float))
        done = call("inspect", files / "rows.npy", "--entropy", "--json")
        entropy = json.loads(done.stdout)["splits"]["test"]["entropy"]
        assert entropy["labels"] is None
        assert entropy["l2"]["embeddings"] == (value and pytest.approx(value))


@pytest.mark.parametrize(
    "given", [("a.h5", "--run", "x"), ("a.h5", "--entropy", "--run=x", "--run=y")]
)
def test_inspect_refuses_runs_that_it_has_no_use_for(files, given):
    assert call("inspect", files / given[0], *given[1:]).exit_code == 2


def test_inspect_works_without_labels_and_with_nan(files):
    np.save(files / "nan.npy", np.array([[1.0, np.nan], [3.0, 4.0]]))
    parsed = json.loads(call("inspect", files / "nan.npy", "--json").stdout)
    split = parsed["splits"]["test"]
    assert split["labels"] is None
    assert split["checks"]["nonfinite_rows"] == 1
    assert split["norms"]["max"] == 5.0


def test_metadata_that_json_cannot_hold_is_written_as_text(files):
    import h5py

    with h5py.File(files / "a.h5", "r+") as file:
        file.attrs["loss"] = np.nan
        file.attrs["nothing"] = h5py.Empty("f")
        file.attrs["words"] = np.array([b"a", b"b"])
    attrs = json.loads(call("inspect", files / "a.h5", "--json").stdout)["attrs"]
    assert attrs["loss"] == "nan"
    assert attrs["words"] == ["a", "b"]
    np.save(files / "huge.npy", np.full((4, 2), 1e200))
    assert call("inspect", files / "huge.npy", "--json").exit_code == 0


def test_labels_that_look_like_markup_are_shown_as_text(tmp_path, clustered):
    X, labels = clustered
    np.savez(
        tmp_path / "[red]x.npz", embeddings=X, labels=np.char.add("[bold]", labels.astype(str))
    )
    result = call("inspect", tmp_path / "[red]x.npz")
    assert "[red]x.npz" in result.stdout.replace("\n", "")
    assert result.exit_code == 0


def test_inspect_says_which_arrays_it_took(tmp_path, table):
    np.savez(tmp_path / "x.npz", query_x=X, query_y=Y, gallery_x=X, gallery_y=Y)
    found = call("inspect", tmp_path / "x.npz")
    lines = [line.split() for line in found.stdout.splitlines()]
    assert ["vectors", "from", "query_x", "gallery_x"] in lines
    assert ["labels", "from", "query_y", "gallery_y"] in lines
    result = json.loads(call("inspect", table, "--json").stdout)
    assert result["splits"]["test"]["taken"]["vectors"] == "d0 ... d4, 5 columns"
    assert result["notes"] == [f"{table}: not used: width"]
