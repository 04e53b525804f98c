"""Runs: what they leave behind, how they end, and that they go on as if never interrupted."""

import errno
import hashlib
import json
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from retrieval import files
from retrieval.errors import DmlError
from tests.forks import Forked
from tests.ranks import together
from tests.trainer.conftest import RUN_FILES, draw_pictures, small_config
from trainer.config import Batches, Loss, Optimizer, Phase, Schedule
from trainer.data.datasets import load
from trainer.data.datasets.splitting import with_validation
from trainer.data.loading import Loader
from trainer.resolve import resolve
from trainer.run import checkpoint, device, metrics_log, optimizers, train
from trainer.run import folder as run_folder
from trainer.run.metrics_log import draw_curves, read_metrics
from trainer.run.scoring import recall, verdict
from trainer.run.setup import build_embedder, load_embedder
from trainer.run.validation import sampled_classes
from trainer.run.watch import Watch

LOSSES = {
    "ce": Loss("ce"),  # dropout draws
    "group": Loss("group"),  # anchors are drawn
    "proxy_nca": Loss("proxy_nca"),  # parameters of its own
    "margin": Loss("margin", miner="distance_weighted"),  # negatives are drawn
}


def weights(folder, name=checkpoint.LAST):
    state = checkpoint.load(folder / name)
    return {
        f"{part}.{key}": value
        for part in ("embedder", "loss")
        for key, value in state[part].items()
    }


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    different = [key for key in a if not torch.equal(a[key], b[key])]
    assert not different


def assert_same_files(a, b):
    """An exported model names its checkpoint by the hash of the file."""
    for name in (checkpoint.BEST, checkpoint.LAST):
        digests = {hashlib.sha256((run / name).read_bytes()).hexdigest() for run in (a, b)}
        assert len(digests) == 1, name


def fit(config, folder, watch=None, resume=False):
    """Train without scores of the test set, which take as long as two epochs."""
    return train.train(config, folder, watch, resume=resume, test=False)


class Interruption(BaseException):
    pass


class Interrupting(Watch):
    """Ends a run after so many steps."""

    def __init__(self, steps):
        self.left = steps

    def step(self, *_):
        self.left -= 1
        if self.left < 0:
            raise Interruption


@pytest.fixture(scope="module")
def trained(pictures, tmp_path_factory):
    """A run that nothing has interrupted, with its curves: its folder and its result."""
    folder = tmp_path_factory.mktemp("whole") / "new" / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_log, "draw_curves", draw_curves)
        return folder, train.train(small_config(pictures), folder)


@pytest.fixture
def whole(trained):
    """Its folder, to read only."""
    return trained[0]


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of it that a test may change."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_a_run_leaves_a_complete_folder(trained):
    folder, result = trained
    names = {path.name for path in folder.iterdir()}
    assert names == RUN_FILES
    start, *records = read_metrics(folder)
    assert start["epoch"] == 0
    assert [record["epoch"] for record in records] == [1, 2, 3]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[0]["parts"].keys() == {"tightness", "contrastive"}
    assert records[0]["scores"].keys() == {"cos", "l2"}
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(result))
    assert 0 < result["test"]["distances"]["cos"]["nmi"]["mean"] <= 1
    assert result["test"]["settings"]["recall_at"] == [1, 2]  # as the settings say
    assert result["test"]["distances"]["cos"]["recall"]["1"] > 0.5
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"]
    assert environment["device"] == "cpu"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_is_all_that_an_export_needs(config, finished):
    state = checkpoint.load(finished / "best.pt")
    assert state["config"] == config.to_dict()
    assert len(state["label_names"]) == 6  # 10 classes, 2 for test, 2 for validation
    assert state["preprocessing"].keys() >= {"mean", "std", "resize", "crop", "interpolation"}
    assert state["preprocessing"]["draft"] == 2
    assert state["preprocessing"]["background"] == [255, 255, 255]
    embedder = load_embedder(state)
    assert not embedder.training
    assert embedder(torch.zeros(1, 3, 16, 16)).shape == (1, 16)
    del state["config"]["input"]["draft"], state["version"], state["format"]
    checkpoint.save(finished, state, best=True)  # as before there was this setting
    assert checkpoint.load_config(finished).input.draft == 1


def test_the_best_epoch_is_that_of_the_highest_validation_recall(change, tmp_path):
    result = fit(change(schedule={"epochs": 6}), tmp_path / "run")
    scores = [record["scores"]["cos"] for record in read_metrics(tmp_path / "run")[1:]]
    assert len(set(scores)) > 2  # the pictures are not so easy that nothing is to be picked
    best = max(epoch for epoch, score in enumerate(scores, 1) if score == max(scores))
    assert result["best_epoch"] == best  # of equals the later one
    assert checkpoint.load(tmp_path / "run" / "best.pt")["epoch"] == best
    assert checkpoint.load(tmp_path / "run" / "last.pt")["epoch"] == 6


def told_by(texts):
    watch = Watch()
    watch.note = texts.append
    return watch


def test_epoch_0_scores_raw_pixels_and_the_network_before_training(config, trained):
    folder, result = trained
    start = read_metrics(folder)[0]
    assert result["baselines"] == {"pixels": start["pixels"], "untrained": start["scores"]}
    data = with_validation(load("folder", config.data.root), 0.2, 0)
    rows = data.rows("val")
    images = np.stack([data.image(row) for row in rows.tolist()]) / 255
    eight = images.reshape(len(rows), 8, 2, 8, 2, 3).mean((2, 4))  # 16 pixels halved
    assert recall(eight.reshape(len(rows), -1), data.labels[rows]) == start["pixels"]
    torch.manual_seed(0)
    network = build_embedder(config, pretrained=True).eval()
    with torch.no_grad():
        vectors = network(torch.from_numpy(images).permute(0, 3, 1, 2).float()).numpy()
    assert recall(vectors, data.labels[rows]) == start["scores"]


def test_a_run_that_learns_nothing_says_so(change, tmp_path):
    texts = []
    config = change(optimizer={"lr": 1e-7}, schedule={"epochs": 1})
    result = fit(config, tmp_path / "run", told_by(texts))
    assert result["scores"]["cos"] < result["baselines"]["pixels"]["cos"]
    assert any(text.startswith("No epoch is better than raw images of 8 x 8") for text in texts)


def test_a_best_epoch_that_is_the_first_is_told():
    scores = {"cos": 0.5, "l2": 0.5}
    best = {"epoch": 1, "scores": scores}
    assert "is the first" in verdict(best, {"pixels": scores, "untrained": scores}, 3)
    assert verdict(best, {"pixels": scores, "untrained": scores}, 1) == ""
    assert verdict(best | {"epoch": 2}, {"pixels": scores, "untrained": scores}, 3) == ""
    better = {"cos": 0.6, "l2": 0.4}
    told = verdict(best | {"epoch": 2}, {"pixels": scores, "untrained": better}, 3)
    assert "No epoch is better than the network before training: Recall@1 50.00" in told


def test_the_same_seed_gives_the_same_weights_with_any_number_of_workers(whole, change, tmp_path):
    fit(change(data={"workers": 2, "cache": "none"}), tmp_path / "run")
    assert_same_bits(weights(whole), weights(tmp_path / "run"))


def test_another_seed_gives_other_weights(whole, change, tmp_path):
    fit(change(run={"seed": 1}), tmp_path / "run")
    key = "embedder.projection.weight"
    assert not torch.equal(weights(whole)[key], weights(tmp_path / "run")[key])


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_interrupted_anywhere_goes_on_bit_for_bit(loss, change, tmp_path):
    config = change(loss=LOSSES[loss], optimizer={"momentum": 0.9, "name": "sgd", "clip": 1.0})
    if loss == "group":
        config = change(loss=LOSSES[loss], phase=Phase(1), batches=Batches(classes=4, images=4))
    fit(config, tmp_path / "whole")
    step = random.Random(loss).randrange(3)  # 48 images, 16 a batch
    for after in (3 + step, 6 + step):  # of the second epoch, and of the third
        folder = tmp_path / f"cut{after}"
        with pytest.raises(Interruption):
            fit(config, folder, Interrupting(after))
        fit(config, folder, resume=True)
        assert_same_bits(weights(tmp_path / "whole"), weights(folder))
        assert_same_bits(weights(tmp_path / "whole", "best.pt"), weights(folder, "best.pt"))
        assert_same_files(tmp_path / "whole", folder)
        names = {path.name for path in folder.iterdir()}
        assert names == {path.name for path in (tmp_path / "whole").iterdir()}
        kept = ("epoch", "loss", "parts", "scores", "best", "lr")
        for one, other in zip(read_metrics(tmp_path / "whole"), read_metrics(folder), strict=True):
            assert [one[key] for key in kept] == [other[key] for key in kept]


def wait_for_checkpoint(folder, process):
    while not (folder / "last.pt").exists() and process.running():
        time.sleep(0.02)


def test_a_run_killed_at_random_moments_ends_with_the_same_weights(change, tmp_path):
    config = change(schedule={"epochs": 5}, data={"workers": 1})
    (tmp_path / "config.toml").write_text(config.to_toml())
    began = time.monotonic()
    fit(config, tmp_path / "whole")
    seconds = time.monotonic() - began
    folder, moments = tmp_path / "killed", random.Random(1)
    args = ["--config", tmp_path / "config.toml", "--out", folder]
    for _ in range(2):
        process = Forked("-m", "cli", "train", *args)
        wait_for_checkpoint(folder, process)
        time.sleep(moments.uniform(0, seconds))
        process.kill()
        assert checkpoint.load(folder)["epoch"] >= 0  # whole at any moment
        args = ["--resume", folder]
    done = Forked("-m", "cli", "train", *args).end()
    assert done[0] == 0, done
    assert_same_bits(weights(tmp_path / "whole"), weights(folder))
    assert_same_bits(weights(tmp_path / "whole", "best.pt"), weights(folder, "best.pt"))
    assert_same_files(tmp_path / "whole", folder)
    assert [r["epoch"] for r in read_metrics(folder)] == list(range(6))
    left = {path.name for path in folder.iterdir()}
    assert left == {path.name for path in (tmp_path / "whole").iterdir()}


def test_resuming_a_finished_run_changes_nothing(config, trained, finished):
    before = (finished / "last.pt").read_bytes()
    assert train.train(config, finished, resume=True) == trained[1] | {"run": str(finished)}
    assert (finished / "last.pt").read_bytes() == before


def test_resuming_with_other_data_is_refused(change, finished):
    other = change(data={"options": {"seed": 3}})
    with pytest.raises(DmlError, match="not the one"):
        train.train(other, finished, resume=True)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    config, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        optimizers, "rate", lambda _, step, steps, __: 1.0 if step < steps else 1e30
    )
    with pytest.raises(
        DmlError, match=r"The loss is (nan|inf|-inf) at step 2 of 3 in epoch 2\."
    ) as caught:
        train.train(config, tmp_path / "run")
    assert "end of epoch 1" in str(caught.value)
    state = checkpoint.load(tmp_path / "run")
    assert state["epoch"] == 1
    assert all(v.isfinite().all() for v in state["embedder"].values() if v.is_floating_point())


def test_a_full_disk_is_told_and_earlier_checkpoints_stay(config, whole, tmp_path, monkeypatch):
    save, calls = torch.save, []

    def full(state, file):
        calls.append(state["epoch"])
        if state["epoch"] == 2:
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DmlError) as caught:
        train.train(config, tmp_path / "run")
    assert "No space left on device" in str(caught.value)
    assert "--resume" in caught.value.fix
    assert calls == [0, 1, 2]
    assert checkpoint.load(tmp_path / "run")["epoch"] == 1
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
    monkeypatch.undo()
    fit(config, tmp_path / "run", resume=True)
    assert_same_bits(weights(whole), weights(tmp_path / "run"))


def test_a_disk_that_really_fills_up_leaves_no_half_checkpoint(tmp_path):
    code = """
import resource, signal, sys, torch
from pathlib import Path
from trainer.run import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
empty = {key: kind() for key, kind in checkpoint.KEYS.items()}
folder = Path(sys.argv[1])
checkpoint.save(folder, empty, best=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save(folder, empty | {"epoch": 7, "loss": {"a": torch.zeros(10**6)}}, best=True)
except Exception as error:
    print(error)
"""
    ended, told, errors = Forked("-c", code, tmp_path).end()
    assert ended == 0, errors
    assert "checkpoint of epoch 7 cannot be written" in told
    assert "File too large. Earlier checkpoints are intact." in told
    assert {path.name for path in tmp_path.iterdir()} == {"best.pt", "last.pt"}
    assert checkpoint.load(tmp_path)["epoch"] == 0


def test_weights_ruined_by_the_last_step_of_an_epoch_are_not_kept(change, tmp_path, monkeypatch):
    honest = train.train_epoch

    def ruined(training, epoch):
        record = honest(training, epoch)
        if epoch == 1:
            training.embedder.projection.weight.data[0, 0] = torch.inf
        return record

    monkeypatch.setattr(train, "train_epoch", ruined)
    with pytest.raises(DmlError, match="after epoch 2") as caught:
        train.train(change(run={"select": "last"}), tmp_path / "run")
    assert "end of epoch 1" in str(caught.value)
    assert weights(tmp_path / "run")["embedder.projection.weight"].isfinite().all()


def test_a_disk_too_small_for_checkpoints_is_told_before_the_first_epoch(
    config, tmp_path, monkeypatch
):
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DmlError, match="too little room"):
        train.train(config, tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


def test_a_first_checkpoint_that_cannot_be_written_leaves_no_folder(config, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DmlError) as caught:
        train.train(config, tmp_path / "new" / "run")
    assert "intact" not in str(caught.value)
    assert "--resume" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_checkpoints_need_no_hard_links(change, tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(files.os, "link", refused)
    fit(change(schedule={"epochs": 1}), tmp_path / "run")
    assert checkpoint.load(tmp_path / "run" / "best.pt")["epoch"] >= 1
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]


def test_of_two_runs_that_want_a_folder_one_gets_it(config, tmp_path):
    with run_folder.claimed(tmp_path / "run", config):
        with pytest.raises(run_folder.FolderTaken), run_folder.claimed(tmp_path / "run", config):
            pass
        (tmp_path / "run" / "last.pt").touch()
    with (
        pytest.raises(run_folder.FolderTaken, match="exists already"),
        run_folder.claimed(tmp_path / "run", config),
    ):
        pass


def killed_before_its_first_checkpoint(config, folder, moment):
    """A process that ends at once when `moment` is called, before or after it has done it."""
    (folder.parent / "config.toml").write_text(config.to_toml())
    code = f"""
import os, sys
from pathlib import Path
from trainer.run import checkpoint, metrics_log, setup, folder as run_folder, train
from trainer import toml
from trainer.validate import from_dict
honest = {moment}
def killed(*args, **options):
    if {moment!r} != "checkpoint.torch.save":
        honest(*args, **options)
    os._exit(9)
{moment} = killed
train.train(from_dict(toml.read(Path(sys.argv[1])), "it"), Path(sys.argv[2]))
"""
    done = Forked("-c", code, folder.parent / "config.toml", folder).end()
    assert done[0] == 9, done


@pytest.mark.parametrize(
    "moment",
    [
        "setup.open_data",
        "run_folder.write_environment",
        "metrics_log.write_metrics",
        "checkpoint.torch.save",
    ],
)
def test_a_run_killed_before_its_first_checkpoint_starts_anew(moment, change, tmp_path):
    config, killed = change(schedule={"epochs": 1}), tmp_path / "killed"
    killed_before_its_first_checkpoint(config, killed, moment)
    assert any(killed.iterdir())
    for resume in (False, True):
        folder = shutil.copytree(killed, tmp_path / f"resumed {resume}")
        with run_folder.locked(folder), pytest.raises(run_folder.FolderTaken):
            train.train(config, folder, resume=resume)
        begun = checkpoint.load_config(folder)
        assert begun == config
        fit(begun, folder, resume=resume)
        names = {path.name for path in folder.iterdir()}
        assert names == RUN_FILES


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[1, 2]", b'{"epoch": "x"}', b"[" * 100_000])
def test_a_run_whose_metrics_are_damaged_goes_on(line, config, trained, finished):
    metrics = finished / "metrics.jsonl"
    sound = metrics.read_bytes()
    metrics.write_bytes(sound + line + b"\n")
    found = fit(config, finished, resume=True)
    assert found == trained[1] | {"run": str(finished), "test": None}
    assert metrics.read_bytes() == sound


@pytest.mark.parametrize("name", run_folder.BEFORE)
def test_a_start_killed_while_it_writes_does_not_block_the_folder(name, config, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    if name != run_folder.STARTING:
        (folder / run_folder.STARTING).write_text(config.to_toml())
    file, left = files.create_temporary(folder / name)
    file.close()
    with run_folder.claimed(folder, config):
        assert not left.exists()


def test_starting_anew_takes_nobodys_files(config, tmp_path):
    folder = tmp_path / "run"
    killed_before_its_first_checkpoint(config, folder, "setup.open_data")
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(run_folder.FolderTaken, match="exists already"):
        train.train(config, folder)
    assert (folder / "thesis.tex").read_text() == "x"
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.toml").write_text("mine")
    with pytest.raises(run_folder.FolderTaken, match="exists already"):
        train.train(config, other)
    assert (other / "config.toml").read_text() == "mine"


def test_a_run_is_trained_by_one_process_at_a_time(config, finished):
    with run_folder.locked(finished), pytest.raises(DmlError, match="by another process"):
        train.train(config, finished, resume=True)


def test_ctrl_c_while_a_checkpoint_is_written_is_no_disk_error(config, tmp_path, monkeypatch):
    save = torch.save

    def interrupted(state, file):
        class Interrupting:
            def write(self, data):
                raise KeyboardInterrupt

        save(state, Interrupting() if state["epoch"] == 1 else file)

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.train(config, tmp_path / "run")
    assert checkpoint.load(tmp_path / "run")["epoch"] == 0


def test_a_run_inside_its_data_is_refused(config, pictures):
    with pytest.raises(DmlError, match="inside its data set"):
        train.train(config, pictures / "run")
    assert not (pictures / "run").exists()


def test_what_a_kill_left_behind_is_removed(change, tmp_path):
    config = change(schedule={"epochs": 1})
    with pytest.raises(Interruption):
        fit(config, tmp_path / "run", Interrupting(1))
    names = ("curves.png", "metrics.jsonl", "config.toml", "environment.json", "result.json")
    for name in (*names, "last.pt", "best.pt"):
        (tmp_path / "run" / f".{name}.ab3d0f7e.tmp").write_bytes(b"half")
    fit(config, tmp_path / "run", resume=True)
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]


def test_a_monitored_value_that_is_not_a_number_does_no_harm(change, tmp_path, monkeypatch):
    from trainer.losses.monitor import Monitors

    monkeypatch.setattr(Monitors, "measure", lambda *_: {"spce": float("nan")})
    config = change(
        loss={"monitor": ("spce",)}, run={"log": ("tensorboard",)}, schedule={"epochs": 1}
    )
    fit(config, tmp_path / "run")
    assert read_metrics(tmp_path / "run")[1]["monitor"] == {"spce": None}


def test_names_that_are_not_utf8_are_trained_on(change, tmp_path):
    odd = os.fsdecode(b"caf\xe9")
    draw_pictures(tmp_path / "data").joinpath("class3").rename(tmp_path / "data" / odd)
    config = change(data={"root": str(tmp_path / "data")}, schedule={"epochs": 1})
    train.train(config, tmp_path / "run")
    assert odd in checkpoint.load(tmp_path / "run")["label_names"]


@pytest.fixture
def two_threads(monkeypatch):
    """Those of torch before a run; the other tests go on with one."""
    monkeypatch.setattr("retrieval.resources.processors", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_a_resumed_run_keeps_its_number_of_threads(change, tmp_path, two_threads):
    texts, config = [], change(schedule={"epochs": 1})
    with pytest.raises(Interruption):
        fit(replace(config, run=replace(config.run, threads=1)), tmp_path / "run", Interrupting(1))
    fit(config, tmp_path / "run", told_by(texts), resume=True)
    assert checkpoint.load(tmp_path / "run")["threads"] == 1
    assert not any("threads" in text for text in texts)
    assert torch.get_num_threads() == 2  # as before


def test_another_number_of_threads_is_told(change, tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.resources.processors", lambda: 2)
    texts, config = [], change(schedule={"epochs": 1})
    with pytest.raises(Interruption):
        fit(config, tmp_path / "run", Interrupting(1))
    two = replace(config, run=replace(config.run, threads=2))
    fit(two, tmp_path / "run", told_by(texts), resume=True)
    assert any(text.startswith("1 thread before, 2 now") for text in texts)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["resumed"][0]["threads"] == 2


def test_a_trial_chooses_the_threads_of_a_new_run(change, tmp_path, monkeypatch, two_threads):
    """Busy neighbours: what torch does with two threads takes five times as long."""
    for name in device.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    now = [0.0]

    def work(*_):
        now[0] += 5.0 if torch.get_num_threads() == 2 else 1.0

    monkeypatch.setattr(device, "embed", work)
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    texts = []
    fit(change(schedule={"epochs": 1}), tmp_path / "run", told_by(texts))
    assert checkpoint.load(tmp_path / "run")["threads"] == 1
    [told] = [text for text in texts if "trial" in text]
    assert told.startswith("1 thread: ")
    assert "5.0 times as fast as 2" in told


def test_a_deterministic_run_leaves_the_threads_to_no_trial(
    change, tmp_path, monkeypatch, two_threads
):
    """Which number wins depends on what else the machine does, and with it the last bits."""
    for name in device.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "faster_threads", lambda *_: pytest.fail("it was tried"))
    fit(change(run={"deterministic": True}, schedule={"epochs": 1}), tmp_path / "run")
    assert checkpoint.load(tmp_path / "run")["threads"] == 2


def test_a_trial_takes_a_moment_and_changes_neither_weights_nor_random_numbers(
    config, monkeypatch, two_threads
):
    for name in device.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    embedder = build_embedder(config, pretrained=True)
    before = {key: value.clone() for key, value in embedder.state_dict().items()}
    state = torch.get_rng_state()
    began = time.process_time()  # others may keep the machine busy
    assert device.use_threads(embedder, 16)
    assert time.process_time() - began < 10  # 0.1 where nothing else runs
    assert_same_bits(before, embedder.state_dict())
    assert torch.equal(torch.get_rng_state(), state)
    assert embedder.training


def test_monitored_losses_are_recorded_beside_the_loss(change, tmp_path):
    loss = Loss("ce", {"dropout": 0.0, "smoothing": 0.0}, monitor=("spce", "pce"))
    fit(change(loss=loss, schedule={"epochs": 1}), tmp_path / "run")
    monitor = read_metrics(tmp_path / "run")[1]["monitor"]
    assert monitor.keys() >= {"spce", "spce/tightness", "spce/contrastive", "pce"}
    assert all(np.isfinite(value) for value in monitor.values())


@pytest.mark.parametrize("phase", [0, 1])
def test_a_length_scales_the_embeddings_of_loss_head_and_monitors(
    phase, change, tmp_path, monkeypatch
):
    seen = {"loss": set(), "head": set(), "monitor": set()}

    def noted(name, method):
        def call(self, embeddings, *rest):
            lengths = torch.linalg.vector_norm(embeddings, dim=1)
            seen[name] |= {round(length, 3) for length in lengths.tolist()}
            return method(self, embeddings, *rest)

        return call

    from trainer.losses.ce import CrossEntropy
    from trainer.losses.monitor import Monitors

    monkeypatch.setattr(CrossEntropy, "split", noted("loss", CrossEntropy.split))
    monkeypatch.setattr(Monitors, "measure", noted("monitor", Monitors.measure))
    monkeypatch.setattr(torch.nn.Linear, "forward", noted("head", torch.nn.Linear.forward))
    config = change(
        loss=Loss("ce", {"dropout": 0.0}, length=4.0, monitor=("spce",)),
        phase=Phase(phase),
        schedule={"epochs": 1},
    )
    fit(config, tmp_path / "run")
    assert seen["monitor"] == {4.0}
    assert 4.0 in seen["head"]
    assert seen["loss"] == ({4.0} if phase == 0 else set())


def test_monitoring_does_not_change_the_result(whole, change, tmp_path):
    fit(change(loss={"monitor": ("spce", "pce")}), tmp_path / "run")
    assert_same_bits(weights(whole), weights(tmp_path / "run"))


def of_two_phases(config):
    """The path of *-group-code: a phase with settings of its own, then another optimiser."""
    own = {"lr": 3e-4, "eps": 1e-2, "weight_decay": 0.0}
    decay = {"weight_decay": 1e-3, "decay_all": True, "decoupled": True}
    return replace(
        config,
        loss=Loss("group", {"diagonal": 1.0, "anchors": 1}),
        phase=Phase(2, batch=8, augment=False, optimizer=own),
        batches=Batches(classes=4, images=4, sampling="classes"),
        optimizer=Optimizer(name="radam", lr=2e-3, **decay),
        schedule=Schedule(name="step", milestones=(3,), epochs=4),
    )


@pytest.fixture(scope="module")
def phases(pictures, tmp_path_factory):
    """The folder of a run of two phases, and the shape of each epoch and if it is unchanged."""
    folder, seen, whole = tmp_path_factory.mktemp("phases") / "run", [], Loader.epoch

    def noted(self, plan, keys):
        seen.append((plan.shape, keys is None))
        return whole(self, plan, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "epoch", noted)
        fit(of_two_phases(small_config(pictures)), folder)
    return folder, seen


def test_the_first_epochs_of_a_two_phase_run_are_classification(phases, change, tmp_path):
    records = read_metrics(phases[0])[1:]
    parts = [set(record["parts"]) for record in records]
    assert parts == [{"ce"}, {"ce"}, {"refined", "ce"}, {"refined", "ce"}]
    assert [record["lr"] for record in records] == pytest.approx([3e-4, 3e-4, 2e-3, 2e-4])
    state = checkpoint.load(phases[0] / "last.pt")["optimizer"]
    steps = {int(each["step"]) for each in state["state"].values()}
    assert steps == {2 * (48 // 16)}  # those since the phase ended: a new optimiser
    assert {group["eps"] for group in state["param_groups"]} == {1e-8}
    with pytest.raises(DmlError, match="no head to classify with"):
        train.train(change(loss=Loss("spce"), phase=Phase(1)), tmp_path / "other")


def test_a_phase_sees_its_own_batches_and_unchanged_images(phases):
    assert phases[1] == [((6, 8), True)] * 2 + [((3, 16), False)] * 2  # 48 images of 6 classes


@pytest.mark.parametrize("steps", [5, 9, 12, 16])  # within the phase, at its end, after it
def test_a_run_of_two_phases_goes_on_as_if_never_interrupted(steps, config, phases, tmp_path):
    config, folder = of_two_phases(config), tmp_path / "cut"
    with pytest.raises(Interruption):
        fit(config, folder, Interrupting(steps))
    fit(config, folder, resume=True)
    assert_same_bits(weights(phases[0]), weights(folder))
    assert_same_files(phases[0], folder)


# The presets of Cars, and sop-group, differ from these in numbers only.
GROUP_PRESETS = ("cub-group", "cub-group-code", "sop-group-code")


@pytest.mark.parametrize("name", GROUP_PRESETS)
def test_group_presets_train_on_small_pictures(name, pictures, tmp_path):
    """With all of their settings but the data set, sizes, network and the number of epochs."""
    flags = {"data.dataset": "folder", "data.root": str(pictures), "data.workers": 0}
    flags |= {"network.backbone": "smallcnn", "network.weights": "none"}
    flags |= {"input.resize": 18, "input.crop": 16}
    flags |= {"batches.classes": 3, "batches.images": 4, "schedule.epochs": 2, "phase.epochs": 1}
    flags |= {"run.device": "cpu", "run.select": "last"}
    config, _ = resolve(name, None, flags)
    result = fit(config, tmp_path / "run")
    assert result["epochs"] == 2
    parts = [set(record["parts"]) for record in read_metrics(tmp_path / "run")]
    last = {"refined", "ce"} if name.endswith("code") else {"refined"}
    assert parts == [{"ce"}, last]
    head = checkpoint.load(tmp_path / "run")["loss"]
    assert ("head.bias" in head) == name.endswith("code")
    assert head["head.weight"].shape == (8, 1024 if name.endswith("code") else 512)


def test_a_checkpoint_of_classification_epochs_is_resumed(change, tmp_path):
    config = change(
        loss=Loss("group"),
        phase=Phase(1),
        batches=Batches(classes=4, images=4),
        schedule={"epochs": 2},
    )
    fit(config, tmp_path / "whole")
    with pytest.raises(Interruption):
        fit(config, tmp_path / "run", Interrupting(4))
    state = checkpoint.load(tmp_path / "run")
    del state["config"]["phase"], state["version"], state["format"]
    state["config"]["loss"]["classification_epochs"] = 1
    checkpoint.save(tmp_path / "run", state, best=True)  # as before there was a phase
    fit(checkpoint.load_config(tmp_path / "run"), tmp_path / "run", resume=True)
    assert_same_bits(weights(tmp_path / "whole"), weights(tmp_path / "run"))


@pytest.mark.parametrize("select", ["test", "last"])
def test_without_validation_all_training_classes_are_learnt(select, change, tmp_path):
    result = train.train(change(run={"select": select}), tmp_path / "run", test=select == "test")
    state = checkpoint.load(tmp_path / "run" / "best.pt")
    assert len(state["label_names"]) == 8
    assert result["select"] == select
    if select == "last":
        assert (result["best_epoch"], result["scores"], result["baselines"]) == (3, {}, {})
        assert [record["epoch"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3]
    else:
        chosen = read_metrics(tmp_path / "run")[result["best_epoch"]]["scores"]["cos"]
        assert result["test"]["distances"]["cos"]["recall"]["1"] == chosen


def test_queries_are_scored_against_the_gallery(change, tmp_path):
    images = draw_pictures(tmp_path / "data" / "train")
    for name in ("class8", "class9"):
        for split, numbers in (("query", range(5)), ("gallery", range(5, 8))):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for n in numbers:
                (images / name / f"{n}.png").rename(folder / f"{n}.png")
        (images / name).rmdir()
    config = change(
        data={"root": str(tmp_path / "data")}, schedule={"epochs": 1}, run={"select": "test"}
    )
    result = train.train(config, tmp_path / "run")
    assert (result["test"]["queries"], result["test"]["gallery"]) == (10, 6)
    assert result["scores"]["cos"] == result["test"]["distances"]["cos"]["recall"]["1"]


def test_half_precision_trains_and_the_loss_is_float32(change, tmp_path, bf16):
    fit(change(run={"precision": "bf16"}, schedule={"epochs": 2}), tmp_path / "run")
    records = read_metrics(tmp_path / "run")[1:]
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(v.dtype == torch.float32 for v in weights(tmp_path / "run").values() if v.ndim)


TORCHRUN = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from cli import main
def dmltool(*words):
    main(words, prog_name="dmltool", standalone_mode=False)
start = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
elastic_launch(LaunchConfig(1, 1, 2, **start), dmltool)(*sys.argv[1:])
"""
"""What torchrun does for two processes, but that they are forked and do not start anew."""


def test_two_processes_train_as_one(change, tmp_path):
    """Frozen BatchNorm: torch has no synchronised one for the CPU."""
    log = {"log": ("tensorboard",)}
    config = change(
        network={"freeze_batchnorm": True}, loss=Loss("spce"), run=log, schedule={"epochs": 2}
    )
    (tmp_path / "config.toml").write_text(config.to_toml())
    fit(config, tmp_path / "one")
    words = ("--config", tmp_path / "config.toml", "--out", tmp_path / "two", "--json")
    code, told, errors = Forked("-c", TORCHRUN, "train", *words).end()
    assert code == 0, errors
    result = json.loads(told)  # one process tells it
    chosen = read_metrics(tmp_path / "two")[result["best_epoch"]]
    assert result["scores"] == chosen["scores"]
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-4)
    assert len(list((tmp_path / "two" / "tensorboard").iterdir())) == 1  # of the first process


RANK = """
import os, sys
from trainer.run import train
honest, moment = train.train_epoch, sys.argv.pop(1)
def ended(training, epoch):
    if os.environ["RANK"] == "1" and epoch == 1:
        os._exit(9)
    return honest(training, epoch)
if moment == "training":
    train.train_epoch = ended
from cli import main
main(prog_name="dmltool")
"""


@pytest.mark.parametrize("moment", ["training", "data"])
def test_a_rank_that_ends_ends_the_others_and_its_reason_is_told_once(moment, config, tmp_path):
    """Without torchrun, which would end them by itself."""
    (tmp_path / "config.toml").write_text(config.to_toml())
    more = ["--data", str(tmp_path / "nowhere")] if moment == "data" else []
    out = ["--config", tmp_path / "config.toml", "--out", tmp_path / "run", *more]
    ranks = together(2, "-c", RANK, moment, "train", *out)
    told = [rank.stderr for rank in ranks]
    lost, survivor = (1, 0) if moment == "training" else (0, 1)
    assert ranks[survivor].code == 1, told
    assert f"Error: Rank {survivor} stops, because rank {lost} on " in told[survivor]
    assert "bug in dmltool" not in "".join(told)
    assert "Traceback" not in "".join(told)
    if moment == "data":
        assert ranks[lost].code == 1
        assert "".join(told).count("There is no folder") == 1


def test_a_batch_that_processes_cannot_share_is_refused(change):
    from retrieval.world import World
    from trainer.run.epoch import check_shares

    targets = np.repeat(np.arange(8), 20)
    config = change(
        batches={"size": 16, "classes": 0}, phase={"epochs": 1, "batch": 15}, schedule={"epochs": 2}
    )
    with pytest.raises(DmlError, match="batch of 15 images cannot be shared by 2") as caught:
        check_shares(config, targets, 0, World(0, 2, 0))
    assert caught.value.fix.endswith("2 divides: --set phase.batch=N.")
    check_shares(config, targets, 1, World(0, 2, 0))
    with pytest.raises(DmlError, match="batch of 16 images cannot be shared by 3") as caught:
        check_shares(config, targets, 1, World(0, 3, 0))
    assert caught.value.fix.endswith("--batch N|CxM.")
    check_shares(config, targets, 0, World(0, 3, 0))


def test_processes_take_all_columns_of_a_batch():
    from retrieval.world import World
    from trainer.run.epoch import own_columns

    plan = np.arange(30).reshape(2, 15)
    shares = [own_columns(plan, World(rank, 3, rank)) for rank in range(3)]
    assert np.array_equal(np.concatenate(shares, axis=1), plan)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"data": {"root": "nowhere"}}, "nowhere"),
        ({"data": {"val_fraction": 0.0}}, "no images to pick the best epoch by"),
        ({"batches": {"classes": 20, "images": 4}}, "a batch needs 20 classes"),
        ({"batches": {"classes": 4, "images": 40}}, "fewer than 40 images"),
        ({"run": {"device": "cuda:7"}}, "'cuda:7' cannot be used"),
        ({"loss": {"monitor": ("pce",), "name": "spce"}}, "pce needs a loss with a linear head"),
        ({"loss": {"options": {"smoothin": 0.2}}}, "'smoothing'"),
        ({"network": {"backbone": "resnet19"}}, "resnet1"),
    ],
)
def test_what_cannot_be_trained_is_said_before_anything_is_written(tables, told, change, tmp_path):
    with pytest.raises(DmlError) as caught:
        train.train(change(**tables), tmp_path / "run")
    assert told in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_with_something_in_it_is_not_used(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("x")
    with pytest.raises(DmlError, match="exists already"):
        train.train(config, tmp_path / "run")


def test_recall_of_training_images_is_logged_and_changes_nothing(whole, change, tmp_path):
    fit(change(run={"train_recall": 24}), tmp_path / "asked")
    assert_same_bits(weights(whole), weights(tmp_path / "asked"))
    records = read_metrics(tmp_path / "asked")
    assert "train_scores" not in records[0]
    assert all(0 <= record["train_scores"]["cos"] <= 1 for record in records[1:])


@pytest.mark.parametrize(("count", "classes", "images"), [(24, 3, 24), (1000, 10, 80), (6, 2, 6)])
def test_training_images_are_sampled_as_whole_classes(count, classes, images):
    labels = np.repeat(np.arange(10), 8)
    rows = sampled_classes(np.arange(80), labels, count, 0)
    assert len(np.unique(labels[rows])) == classes
    assert len(rows) == len(set(rows)) == images


def test_ranks_compare_settings_and_what_is_to_be_done_but_not_where_files_are(
    tmp_path, monkeypatch
):
    seen = []

    def refuse(options, world, may_differ):
        seen.append(options)
        assert may_differ == "run.device, run.threads"
        raise DmlError("Compared.", "", "")

    monkeypatch.setattr("retrieval.processes.require_same_options", refuse)
    config = small_config(tmp_path)
    for n, more in enumerate(({}, {"resume": True}, {"test": False})):
        here = replace(
            config,
            data=replace(config.data, root=f"{n}", options={"images": f"{n}", "seed": 3}),
            network=replace(config.network, weights=f"{n}.pt"),
        )
        with pytest.raises(DmlError, match="Compared"):
            train.train(here, tmp_path / f"{n}", **more)
    assert [(given.pop("resume"), given.pop("test")) for given in seen] == [
        (False, True),
        (True, True),
        (False, False),
    ]
    assert seen[0] == seen[1] == seen[2]
    assert seen[0]["data.options"] == {"seed": 3}
