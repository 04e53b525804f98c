"""The commands train and list as a user meets them."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from tests.forks import Forked
from tests.ranks import together
from tests.trainer.small import SMALL
from trainer.commands import KINDS, listing


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


def test_an_interrupt_before_the_first_epoch_tells_what_is_there(dmltool, photos, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    command = ("train", "--data", photos, *SMALL, "--out", "run")
    with monkeypatch.context() as patched:
        patched.setattr("trainer.run.train.fit", interrupted)
        done = dmltool(*command)
    assert (done.exit_code, "`dmltool train --resume run` continues" in done.stderr) == (130, True)
    monkeypatch.setattr("trainer.run.train.train_job", interrupted)  # the run there is another one
    assert "nothing was written" in dmltool(*command).stderr


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--dataset", "folder", "--data", "nowhere"], "nowhere"),
        (["--dataset", "folder"], "--dataset folder --data FOLDER"),
        (["--dataset", "foldr"], "Did you mean 'folder'? --dataset folder"),
        (["--loss", "grup"], "Did you mean 'group'? --loss group"),
        (["--loss", "pml:TripletMarginLos"], "--loss pml:TripletMarginLoss"),
        (["--backbone", "resnet5"], "Did you mean 'resnet50'? --backbone resnet50"),
        (["--set", "loss.options.smoothin=1"], "--set loss.options.smoothing="),
        (["--set", "data.options.sizee=1"], "--set data.options.size="),
        (["--set", "data.options.size=abc", "--dry-run"], "size is a whole number."),
        (["--lr", "-1"], "Error: --lr cannot be used.\n  --lr -1.0 is not a number from 0 to"),
        (
            ["--epochs", "2000000"],
            "--epochs cannot be used.\n  --epochs 2000000 is not a number from 1 to",
        ),
        (
            ["--set", "run.seed=x"],
            "Error: --set run.seed cannot be used.\n  --set run.seed = 'x' is not a",
        ),
        (["--set", "optimiser.lr=1"], "Error: --set optimiser.lr cannot be used."),
        (["--preset", "cub-group", "--epochs", "3"], "10 is more than --epochs 3"),
        (["--batch", "1"], "Error: --batch cannot be used.\n  --batch 1 is not a number from 2 to"),
        (["--preset", "cub"], "--preset cub-ce"),
        (["--config", "none.toml"], "There is no configuration none.toml"),
        (["--set", "lr=1"], "Did you mean optimizer.lr?"),
        (["--resume", "nowhere"], "There is no checkpoint nowhere"),
        (["--out", "file"], "file exists already"),
        (["--device", "gpu"], "For an NVIDIA GPU: --device cuda"),
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


@pytest.mark.parametrize(
    "args",
    [
        ["--loss", "grup"],
        ["--loss", "pml:TripletLos"],
        ["--backbone", "resnet5"],
        ["--dataset", "foldr"],
        ["--set", "loss.options.smoothin=1"],
        ["--set", "loss.options.smoothing=7"],
        ["--set", "data.options.sizee=1"],
        ["--backbone", "vit_b_16", "--set", "input.crop=40"],
    ],
)
def test_a_dry_run_finds_names_and_options_that_do_not_exist(args, dmltool):
    done = dmltool("train", *args, "--dry-run")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "Error: " in done.stderr


def test_a_dry_run_prints_the_same_settings_as_toml_and_as_json(dmltool):
    command = ("train", "--preset", "glyphs-ce", "--lr", "0.5", "--dry-run")
    shown = tomllib.loads(dmltool(*command).stdout)
    assert shown["optimizer"]["lr"] == 0.5
    assert json.loads(dmltool(*command, "--json").stdout) == shown


def test_a_finished_run_can_be_given_more_epochs(dmltool, photos, tmp_path):
    args = ("train", "--data", photos, *SMALL)
    assert dmltool(*args, "--out", "run").exit_code == 0
    before = (tmp_path / "run" / "last.pt").read_bytes()
    again = dmltool("train", "--resume", "run")
    assert again.exit_code == 0
    assert "is finished" in again.stderr
    assert "epoch 3" not in again.stderr
    assert (tmp_path / "run" / "last.pt").read_bytes() == before
    done = dmltool("train", "--resume", "run", "--epochs", "4", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["epochs"] == 4
    assert "from epoch 3 on the learning rate is that of a run of 4 epochs" in done.stderr
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["schedule"]["epochs"] == 4
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["lr"] for line in lines if json.loads(line)["epoch"]]
    assert len(rates) == 4
    assert 0 < rates[3] < rates[2] < rates[0]  # the cosine of four epochs, its second half
    assert "run is finished" in dmltool("train", "--resume", "run").stderr  # the four are kept
    done = dmltool("train", "--resume", "run", "--epochs", "3")
    assert done.exit_code == 1
    assert "--epochs 3 is fewer than the 4 of the run" in done.stderr
    assert "--lr cannot be changed" in dmltool("train", "--resume", "run", "--lr", "1").stderr
    assert again.stderr.endswith("Next: dmltool export run\n")
    (tmp_path / "run" / "model.onnx").write_text("of the first two epochs")
    done = dmltool("train", "--resume", "run", "--batch", "16")  # as it was
    assert done.exit_code == 0, done.output
    assert done.stderr.endswith("Next: dmltool export run --force\n")


def test_a_run_that_is_being_trained_is_not_resumed(dmltool, photos, tmp_path):
    words = ("train", "--data", photos, *SMALL, "--epochs=1", "--out", "run")
    assert dmltool(*words).exit_code == 0
    from trainer.run.folder import locked

    with locked(tmp_path / "run"):
        done = dmltool("train", "--resume", "run")
    assert done.exit_code == 1
    assert "run is being trained by another process" in done.stderr
    assert "bug" not in done.stderr


def test_a_broken_image_is_named_before_the_first_epoch(dmltool, photos, tmp_path):
    Image.new("RGB", (16, 16), "red").save(photos / "class3" / "red.jpg")
    whole = (photos / "class3" / "red.jpg").read_bytes()
    (photos / "class3" / "red.jpg").write_bytes(whole[: len(whole) // 2])
    args = ("train", "--dataset", "folder", "--data", photos, *SMALL, "--epochs=1")
    done = dmltool(*args)
    assert done.exit_code == 1
    assert "class3/red.jpg" in done.stderr
    assert "--skip-bad" in done.stderr
    assert "1 of 81 images cannot be read" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = dmltool(*args, "--skip-bad")
    assert done.exit_code == 0, done.output
    assert "1 unreadable image left out" in done.stderr


def test_a_class_with_one_image_cannot_fill_balanced_batches(dmltool, photos):
    for picture in list((photos / "class5").iterdir())[1:]:
        picture.unlink()
    done = dmltool(
        "train",
        "--dataset",
        "folder",
        "--data",
        photos,
        *SMALL,
        "--batch",
        "4x4",
        "--select",
        "last",
        "--set",
        "data.options.test_fraction=0",
    )
    assert done.exit_code == 1
    assert "class5 (1)" in done.stderr
    assert "at most 1 images" in done.stderr
    assert "--min-images 4: 9 classes" in done.stderr


def test_group_and_spce_choose_batches_that_own_photos_can_fill(dmltool, photos, tmp_path):
    for picture in list((photos / "class5").iterdir())[1:]:
        picture.unlink()
    small = [option for option in SMALL if not option.startswith("--batch")]
    args = (
        "train",
        "--data",
        photos,
        *small,
        "--epochs=1",
        "--select",
        "last",
        "--set",
        "data.options.test_fraction=0",
        "--loss",
    )
    done = dmltool(*args, "group", "--out", "group")
    assert done.exit_code == 0, done.output
    batches = tomllib.loads((tmp_path / "group" / "config.toml").read_text())["batches"]
    assert (batches["classes"], batches["images"]) == (8, 4)
    assert "group compares images of a batch: 8 classes x 4" in done.stderr
    assert "1 class has fewer than 4 images: some are repeated" in done.stderr
    done = dmltool(*args, "spce", "--min-images", "4", "--out", "spce")
    assert done.exit_code == 0, done.output
    assert "72 train images of 9 classes" in done.stderr
    batches = tomllib.loads((tmp_path / "spce" / "config.toml").read_text())["batches"]
    assert (batches["classes"], batches["images"]) == (8, 4)
    assert "repeated" not in done.stderr
    again = dmltool("train", "--resume", "spce", "--epochs", "2")
    assert again.exit_code == 0, again.output


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
    words = ("train", "--dataset", "folder", "--data", photos, *SMALL, "--epochs", 5000)
    process = Forked("-m", "cli", *words, "--workers", 1, "--out", tmp_path / "run")
    deadline = time.monotonic() + 240
    while not (tmp_path / "run" / "best.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send(signal.SIGINT)
    code, out, told = process.end(timeout=60)
    assert code == 130
    assert f"dmltool train --resume {tmp_path / 'run'}" in told
    assert "Traceback" not in told
    assert out == ""


def test_the_help_of_list_names_all_tables(dmltool):
    told = " ".join(dmltool("list", "--help").stdout.split())
    *names, last = KINDS
    assert f"KIND is {', '.join(names)} or {last} (of files)." in told


@pytest.mark.parametrize("kind", KINDS)
def test_list_shows_every_entry_of_its_table(kind, dmltool):
    done = dmltool("list", kind)
    assert done.exit_code == 0
    found = listing(kind)
    assert kind != "formats" or found["npy"].startswith(".npy: ")
    assert len(done.stdout.splitlines()) == len(found)
    assert all(name in done.stdout and summary in done.stdout for name, summary in found.items())
    assert json.loads(dmltool("list", kind, "--json").stdout) == found


def test_listing_and_dry_runs_never_load_torch():
    code = (
        "import sys\nfrom cli import main\n"
        "lists = [['list', name] for name in ('losses', 'miners', 'backbones')]\n"
        "for args in (*lists, ['train', '--dry-run']):\n"
        "    main.main(args, standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True).returncode == 0
    )


@pytest.mark.parametrize("columns", [60, 80])
def test_list_fits_the_terminal(columns, tmp_path):
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", "list", "presets"],
        cwd=Path(__file__).parents[2],
        stdout=writer,
        env=os.environ | {"COLUMNS": str(columns), "NO_COLOR": "1"},
    )
    os.close(writer)
    shown = b""
    with suppress(OSError):  # the end of a terminal
        while part := os.read(reader, 4096):
            shown += part
    os.close(reader)
    assert process.wait() == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()
    assert max(map(len, lines)) <= columns
    names = [line for line in lines if not line.startswith(" ")]
    assert [name.split()[0] for name in names] == list(listing("presets"))
    assert len(lines) > len(names)  # some are folded, and stand under their beginning


INTERRUPTED = """
import os, signal
from cli import main
from retrieval import signals
from trainer.run import epoch

step = epoch.train_step

def interrupted(training, images, targets, number):
    found = step(training, images, targets, number)
    if number == 1 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGINT)
    return found

epoch.train_step = interrupted
signals.end_on_interrupt("__main__")
main()
"""


def test_ctrl_c_during_training_in_two_processes_is_told_once(photos, tmp_path):
    command = ["train", "--data", photos, *SMALL, "--out", tmp_path / "run"]
    ranks = together(2, "-c", INTERRUPTED, *command)
    told = "".join(rank.stderr for rank in ranks)
    assert [rank.code for rank in ranks] == [130, 130], told
    assert told.count("Interrupted") == 1
    assert told.count("Settings of the preset") == 1
    assert f"Interrupted: `dmltool train --resume {tmp_path}/run` continues." in ranks[0].stderr
