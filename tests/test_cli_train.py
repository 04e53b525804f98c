"""`dmltool train` and `dmltool list` as a user meets them."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from cli import main
from tests.trainer.conftest import draw_pictures
from trainer.tables import listing

SMALL = (
    "--set", "input.resize=0", "--set", "input.crop=16", "--set", "input.train_crop=center",
    "--backbone", "smallcnn", "--weights", "none", "--batch", "16", "--epochs", "2",
    "--set", "data.val_fraction=0.2", "--device", "cpu", "--workers", "0",
)  # fmt: skip


@pytest.fixture
def photos(tmp_path):
    return draw_pictures(tmp_path / "photos")


@pytest.fixture
def dmltool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda *args: CliRunner().invoke(main, [str(arg) for arg in args])


def test_training_own_photos_prints_only_the_result_on_stdout(dmltool, photos, tmp_path):
    done = dmltool("train", "--dataset", "folder", "--data", photos, *SMALL, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["run"] == "runs/folder-ce"
    assert result["test"]["distances"]["cos"]["recall"]["1"] > 0.2
    assert (tmp_path / "runs" / "folder-ce" / "best.pt").exists()
    assert "48 train images of 6 classes" in done.stderr
    again = dmltool("train", "--dataset", "folder", "--data", photos, *SMALL)
    assert again.exit_code == 0, again.output
    assert "runs/folder-ce-2: epoch" in again.stdout
    assert "Recall@1 (test)" in again.stdout


def test_a_dry_run_prints_settings_that_can_be_used_again(dmltool, tmp_path):
    done = dmltool(
        "train", "--loss", "group", "--batch", "6x4", "--lr", "0.5", "--monitor", "spce,pce",
        "--seed", "0", "--set", "loss.options.temperature=7", "--allow-incomplete", "--dry-run",
    )  # fmt: skip
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


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--dataset", "folder", "--data", "nowhere"], "nowhere"),
        (["--dataset", "folder"], "--dataset folder --data FOLDER"),
        (["--dataset", "foldr"], "Did you mean folder?"),
        (["--loss", "grup"], "did you mean 'group'?"),
        (["--backbone", "resnet5"], "resnet50"),
        (["--preset", "cub"], "--preset cub-ce?"),
        (["--config", "none.toml"], "There is no configuration none.toml"),
        (["--set", "lr=1"], "did you mean optimizer.lr?"),
        (["--resume", "nowhere"], "There is no checkpoint nowhere"),
        (["--out", "file"], "file exists already"),
        (["--device", "tpu9"], "'tpu9' cannot be used"),
    ],
)
def test_a_mistake_is_explained(args, told, dmltool, tmp_path):
    (tmp_path / "file").write_text("x")
    done = dmltool("train", *args)
    assert done.exit_code == 1, done.output
    assert told in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("batch", ["x", "0", "4x", "4x0", "4x4x4"])
def test_odd_batches_are_usage_errors(batch, dmltool):
    assert dmltool("train", "--batch", batch).exit_code == 2


def test_a_broken_image_is_named_before_the_first_epoch(dmltool, photos, tmp_path):
    Image.new("RGB", (16, 16), "red").save(photos / "class3" / "red.jpg")
    whole = (photos / "class3" / "red.jpg").read_bytes()
    (photos / "class3" / "red.jpg").write_bytes(whole[: len(whole) // 2])
    args = ("train", "--dataset", "folder", "--data", photos, *SMALL)
    done = dmltool(*args)
    assert done.exit_code == 1
    assert "class3/red.jpg" in done.stderr
    assert "--skip-bad" in done.stderr
    assert "1 of 81 images cannot be read" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = dmltool(*args, "--skip-bad")
    assert done.exit_code == 0, done.output
    assert "1 image that cannot be read is left out" in done.stderr


def test_a_class_with_one_image_cannot_fill_balanced_batches(dmltool, photos):
    for picture in list((photos / "class5").iterdir())[1:]:
        picture.unlink()
    done = dmltool("train", "--dataset", "folder", "--data", photos, *SMALL, "--batch", "4x4",
                   "--select", "last", "--set", "data.options.test_fraction=0")  # fmt: skip
    assert done.exit_code == 1
    assert "class5 (1)" in done.stderr
    assert "at most 1 images" in done.stderr


def test_without_a_network_the_weights_to_fetch_are_named(dmltool, photos, monkeypatch, tmp_path):
    import urllib.request

    def offline(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    done = dmltool("train", "--dataset", "folder", "--data", photos)
    assert done.exit_code == 1
    assert "resnet18-" in done.stderr
    assert "network.weights" in done.stderr or "--weights" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_says_how_to_go_on(photos, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "train", "--dataset", "folder", "--data", str(photos), *SMALL,
         "--epochs", "5000", "--workers", "1", "--out", str(tmp_path / "run")],
        cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "best.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"dmltool train --resume {tmp_path / 'run'}" in told
    assert "Traceback" not in told
    assert out == ""


@pytest.mark.parametrize("kind", ["presets", "losses", "datasets", "backbones"])
def test_list_shows_every_entry_of_its_table(kind, dmltool):
    done = dmltool("list", kind)
    assert done.exit_code == 0
    found = listing(kind)
    assert len(done.stdout.splitlines()) == len(found)
    assert all(name in done.stdout and summary in done.stdout for name, summary in found.items())
    assert json.loads(dmltool("list", kind, "--json").stdout) == found


def test_listing_and_dry_runs_never_load_torch():
    code = (
        "import sys\nfrom cli import main\n"
        "for args in (['list', 'losses'], ['list', 'backbones'], ['train', '--dry-run']):\n"
        "    main.main(args, standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parent.parent
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True).returncode == 0
    )


def test_without_weights_the_settings_that_learn_from_nothing_are_named(dmltool):
    done = dmltool("train", "--dataset", "folder", "--weights", "none", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "Settings of the preset photos-scratch-ce" in done.stderr
    assert tomllib.loads(done.stdout)["network"]["backbone"] == "smallcnn"
    done = dmltool("train", "--preset", "photos-ce", "--weights", "none", "--dry-run")
    assert "--preset photos-scratch-ce" in done.stderr
    done = dmltool("train", "--preset", "glyphs-ce", "--weights", "none", "--dry-run")
    assert "photos-scratch-ce" not in done.stderr
