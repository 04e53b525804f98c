"""What is said of an embedding file."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from cli import main
from tests.commands import call


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


def test_lines_do_not_end_in_spaces_in_a_pipe(files):
    lines = call("inspect", files / "shop.h5").stdout.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert max(map(len, lines)) < 100


def test_inspect_works_without_labels_and_with_nan(files):
    np.save(files / "nan.npy", np.array([[1.0, np.nan], [3.0, 4.0]]))
    parsed = json.loads(call("inspect", files / "nan.npy", "--json").stdout)
    split = parsed["splits"]["test"]
    assert split["labels"] is None
    assert split["checks"]["nonfinite_rows"] == 1
    assert split["norms"]["max"] == 5.0


def test_entropy_of_equal_rows_says_why_there_is_none(tmp_path):
    file = tmp_path / "same.npz"
    np.savez(file, embeddings=np.ones((4, 3), np.float32), labels=[0, 0, 1, 1])
    result = CliRunner().invoke(main, ["inspect", str(file), "--entropy"])
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "H(Z) (l2, cos) cannot be estimated: it needs two rows that differ" in text
