"""Options of the commands that train, and the settings that they make."""

import tomllib
from pathlib import Path

import pytest


def test_a_miner_and_its_options_are_settings(dmltool, tmp_path):
    given = ("--loss", "triplet", "--miner", "semihard", "--batch", "6x4", "--dry-run")
    squared = 'loss.miner_options.distance={name="LpDistance",power=2}'
    done = dmltool("train", *given, "--set", squared)
    assert done.exit_code == 0, done.output
    loss = tomllib.loads(done.stdout)["loss"]
    assert loss["miner"] == "semihard"
    assert loss["miner_options"] == {"distance": {"name": "LpDistance", "power": 2}}
    (tmp_path / "my.toml").write_text(done.stdout)
    assert dmltool("train", "--config", "my.toml", "--dry-run").stdout == done.stdout
    wrong = dmltool("train", "--loss", "triplet", "--miner", "semi_hard", "--dry-run")
    assert wrong.exit_code == 1
    assert "--miner semihard" in wrong.stderr
    watched = dmltool("train", "--monitor", "spec", "--dry-run")
    assert watched.exit_code == 1
    assert "spce" in watched.stderr


def test_a_dry_run_prints_settings_that_can_be_used_again(dmltool, tmp_path):
    done = dmltool(
        "train",
        "--dataset",
        "cub",
        "--loss",
        "group",
        "--batch",
        "6x4",
        "--lr",
        "0.5",
        "--monitor",
        "spce,pce",
        "--seed",
        "0",
        "--set",
        "loss.options.temperature=7",
        "--allow-incomplete",
        "--dry-run",
    )
    assert done.exit_code == 0, done.output
    tables = tomllib.loads(done.stdout)
    assert tables["loss"]["options"]["temperature"] == 7
    assert tables["loss"]["monitor"] == ["spce", "pce"]
    assert (tables["batches"]["classes"], tables["batches"]["images"]) == (6, 4)
    assert tables["data"]["options"] == {"allow_incomplete": True}
    (tmp_path / "my.toml").write_text(done.stdout)
    again = dmltool("train", "--config", "my.toml", "--dry-run")
    assert again.stdout == done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("batch", ["x", "0", "4x", "4x0", "4x4x4"])
def test_odd_batches_are_usage_errors(batch, dmltool):
    assert dmltool("train", "--batch", batch).exit_code == 2


def test_data_alone_is_a_folder_or_a_table(dmltool, photos, tmp_path):
    found = dmltool("train", "--data", photos, "--dry-run")
    assert (
        found.stdout
        == dmltool("train", "--dataset", "folder", "--data", photos, "--dry-run").stdout
    )
    assert "preset photos-ce" in found.stderr
    (tmp_path / "mine.csv").write_text("path,label\n")
    done = dmltool("train", "--data", "mine.csv", "--dry-run")
    assert tomllib.loads(done.stdout)["data"]["dataset"] == "csv"
    done = dmltool("train", "--data", "mine.csv", "--set", "data.dataset=cub", "--dry-run")
    assert tomllib.loads(done.stdout)["data"]["dataset"] == "cub"


def test_without_weights_the_settings_that_learn_from_nothing_are_named(dmltool):
    done = dmltool("train", "--dataset", "folder", "--weights", "none", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "Settings of the preset photos-scratch-ce" in done.stderr
    assert tomllib.loads(done.stdout)["network"]["backbone"] == "smallcnn"
    done = dmltool("train", "--preset", "photos-ce", "--weights", "none", "--dry-run")
    assert "--preset photos-scratch-ce" in done.stderr
    done = dmltool("train", "--preset", "photos-ce", "--dry-run")
    assert "photos-scratch-ce" not in done.stderr
    Path("own.toml").write_text(done.stdout)
    for args in (["--config", "own.toml"], ["--dataset", "cub"]):
        done = dmltool("train", *args, "--set", "network.weights=none", "--dry-run")
        assert "--preset photos-scratch-ce" in done.stderr
    done = dmltool("train", "--preset", "glyphs-ce", "--weights", "none", "--dry-run")
    assert "photos-scratch-ce" not in done.stderr
