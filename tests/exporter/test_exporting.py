"""From a trained run to model.onnx and embeddings.h5, and what happens when something is wrong."""

import json
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from exporter import parity
from exporter.exporting import EMBEDDINGS, MODEL, Settings, export
from exporter.image_samples import comparison_images
from exporter.networks import load_member
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from retrieval.errors import DmlError
from retrieval.loading.load import load
from tests.commands import call
from tests.forks import Forked
from tests.ranks import run_commands, together
from tests.trainer.small import draw_pictures, small_config
from trainer.data import datasets
from trainer.run import train
from trainer.run.device import CHOSEN
from trainer.run.setup import load_data


def test_an_export_from_python_leaves_the_threads_of_torch_as_they_were(run, monkeypatch):
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    export([run], settings=Settings(threads=2 if before == 1 else 1, embeddings=False))
    assert torch.get_num_threads() == before


def test_train_export_eval_is_one_chain(run):
    done = call("export", run, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["model"]["parity"]["agreement"] == 1.0
    assert result["embeddings"]["splits"] == {"test": 24}
    scored = call("eval", run / EMBEDDINGS, "--distance", "cos", "--no-nmi", "--json")
    assert scored.exit_code == 0, scored.output
    at_export = json.loads((run / "result.json").read_text())["test"]["distances"]["cos"]
    recall = json.loads(scored.stdout)["distances"]["cos"]["recall"]
    assert recall["1"] == at_export["recall"]["1"]


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_export_the_rows_of_one(size, run, tmp_path):
    export(run, tmp_path / "one", threads=1)
    folder = tmp_path / "Größe"
    command = ["export", run, "--out", folder, "--batch-size", 32, "--json"]
    [[first, *others]] = run_commands(size, [command], tmp_path)
    assert first.code == 0, first.stderr
    assert all((rank.code, rank.stdout) == (0, "") for rank in others), others
    text = (folder / "export.json").read_text(encoding="utf-8")
    assert str(folder) in text  # not as escapes
    told = json.loads(text)
    assert json.loads(first.stdout) == told
    one, two = (load(each / EMBEDDINGS) for each in (tmp_path / "one", folder))
    assert told["embeddings"]["computed"] == len(two.splits["test"].vectors)
    assert np.array_equal(one.splits["test"].vectors, two.splits["test"].vectors)
    assert {path.name for path in folder.iterdir()} == {
        MODEL,
        EMBEDDINGS,
        "export.json",
    }


KILLED = """
import os, signal
from cli import main
from exporter.embedding.writing import Work

add, done = Work.add, []

def killed(*given):
    add(*given)
    done.append(given)
    if os.environ["RANK"] == "1" and len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

Work.add = killed
main()
"""


def test_an_export_of_two_processes_that_is_killed_is_continued_by_three(run, tmp_path):
    options = ("--split", "train", "--split", "test", "--batch-size", 2, "--threads", 1, "--json")
    command = ("export", run, "--out", tmp_path / "killed", *options)
    first, second = together(2, "-c", KILLED, *command)
    assert (first.code, second.code) == (1, -signal.SIGKILL)
    assert "stops, because rank 1" in first.stderr
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert left >= {f"{EMBEDDINGS}.part-1", f"{EMBEDDINGS}.partial", MODEL}
    [ranks] = run_commands(3, [[*command, "--resume"]], tmp_path)
    assert [rank.code for rank in ranks] == [0, 0, 0], ranks
    settings = Settings(splits=("train", "test"), batch_size=2, threads=1)
    one = export([run], tmp_path / "one", settings)
    written, total = (found["embeddings"] for found in (json.loads(ranks[0].stdout), one))
    assert 0 < written["computed"] <= total["computed"] - 3 * 2
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert left == {EMBEDDINGS, MODEL, "export.json"}
    a, b = (load(tmp_path / name / EMBEDDINGS) for name in ("killed", "one"))
    for split in ("train", "test"):
        for name in ("vectors", "labels", "paths"):
            assert np.array_equal(*(getattr(x.splits[split], name) for x in (a, b)))


def test_the_embedding_file_says_where_it_came_from(run):
    export([run])
    data = load(run / EMBEDDINGS)
    assert data.attrs["model_sha256"] == describe(run / MODEL).sha256
    assert data.attrs["checkpoint_sha256"] == load_member(run).sha256
    assert data.attrs["dataset"] == "folder"
    assert json.loads(data.attrs["preprocessing"])["crop"] == 16
    assert str(data.splits["test"].paths[0]).endswith(".png")


def test_torch_and_onnx_give_the_same_embeddings(run, tmp_path):
    export([run])
    export([run], tmp_path / "torch", Settings(onnx=False, backend="torch"))
    ours, theirs = (
        load(folder / EMBEDDINGS).splits["test"].vectors for folder in (run, tmp_path / "torch")
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert not (tmp_path / "torch" / MODEL).exists()


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_lower_precision_is_shown_beside_fp32(precision, run):
    settings = Settings(precision=precision, embeddings=False, max_recall_drop=20)
    model = export([run], settings=settings)["model"]
    rows = {row["precision"]: row for row in model["precisions"]}
    assert list(rows) == ["fp32", "fp16", "int8"]
    assert rows["int8"]["bytes"] < rows["fp16"]["bytes"] < rows["fp32"]["bytes"]
    assert describe(run / MODEL).metadata.precision == precision


def test_a_model_that_retrieves_worse_is_not_left_behind(run, monkeypatch):
    honest = parity.torch_runner

    def other_network(network):
        found = honest(network)
        return lambda batch: found(batch[:, ::-1])  # upside down

    monkeypatch.setattr(parity, "torch_runner", other_network)
    with pytest.raises(DmlError, match=r"does not compute|loses"):
        export([run])
    assert not (run / MODEL).exists()
    assert not (run / EMBEDDINGS).exists()
    assert not [path for path in run.iterdir() if path.name.startswith(".export")]


def test_normalised_embeddings_have_length_one(run):
    export([run], settings=Settings(normalize=True))
    lengths = np.linalg.norm(load(run / EMBEDDINGS).splits["test"].vectors, axis=1)
    np.testing.assert_allclose(lengths, 1, atol=1e-5)


def test_several_runs_become_one_model(trained, tmp_path):
    runs = [trained / "run0", trained / "run1"]
    result = export(runs, tmp_path / "both")
    assert result["model"]["dim"] == 32
    assert result["model"]["parity"]["min_cosine"] > 0.9999
    joined = load(tmp_path / "both" / EMBEDDINGS).splits["test"].vectors
    for place, run in enumerate(runs):
        export([run], tmp_path / f"{place}", Settings(onnx=False, backend="torch"))
        alone = load(tmp_path / f"{place}" / EMBEDDINGS).splits["test"].vectors
        alone = alone / np.linalg.norm(alone, axis=1, keepdims=True)
        np.testing.assert_allclose(joined[:, 16 * place : 16 * place + 16], alone, atol=1e-4)
    files = [tmp_path / "0" / EMBEDDINGS, tmp_path / "1" / EMBEDDINGS]
    done = call("merge", *files, "--out", tmp_path / "merged.h5")
    assert done.exit_code == 0, done.output
    merged = load(tmp_path / "merged.h5").splits["test"].vectors
    np.testing.assert_allclose(merged, joined, atol=1e-4)
    with pytest.raises(DmlError, match="no folder of its own"):
        export(runs)


def test_existing_files_are_kept_without_force(run):
    export([run])
    before = (run / MODEL).read_bytes(), (run / EMBEDDINGS).read_bytes()
    done = call("export", run)
    assert done.exit_code == 1
    assert "exists already" in done.stderr
    assert ((run / MODEL).read_bytes(), (run / EMBEDDINGS).read_bytes()) == before
    assert call("export", run, "--force").exit_code == 0


def test_an_image_that_vanished_is_named_or_left_out(trained, run, tmp_path):
    pictures = Path(shutil.copytree(trained / "pictures", tmp_path / "pictures"))
    data = load_member(run).config.data
    row = datasets.load("folder", pictures, **data.options)
    lost = pictures / row.paths[row.rows("test")[-1]]
    export([run], settings=Settings(embeddings=False))
    lost.write_bytes(b"no image")
    args = ("export", run, "--no-onnx", "--data", pictures)
    done = call(*args)
    assert done.exit_code == 1
    assert lost.name in done.stderr
    done = call(*args, "--skip-bad", "--json", "--force")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["embeddings"]["splits"] == {"test": 23}
    assert lost.name in done.stderr


def test_what_is_said_of_lengths_is_true(trained, run, tmp_path):
    runs = [trained / "run0", trained / "run1"]
    for normalize, precision in ((False, "fp32"), (True, "fp32"), (True, "int8")):
        settings = Settings(
            normalize=normalize, precision=precision, force=True, max_recall_drop=50
        )
        result = export(runs, tmp_path, settings)
        data = load(tmp_path / EMBEDDINGS)
        said = {result["model"]["normalized"], describe(tmp_path / MODEL).metadata.normalized}
        assert {bool(data.attrs["normalized"]), *said} == {normalize}
        lengths = np.linalg.norm(data.splits["test"].vectors, axis=1)
        np.testing.assert_allclose(lengths, 1 if normalize else 2**0.5, atol=1e-5)


@pytest.mark.parametrize(
    "asked", [{"normalize": True}, {"precision": "int8"}, {"input": "float-nchw"}]
)
def test_an_earlier_model_of_another_form_is_refused(run, asked):
    export([run], settings=Settings(embeddings=False))
    with pytest.raises(DmlError, match="not the model of this export") as caught:
        export([run], settings=Settings(onnx=False, **asked))
    assert f"--{next(iter(asked))}" in caught.value.why


def test_a_file_written_with_an_earlier_model_says_how_that_took_its_images(run):
    export([run], settings=Settings(embeddings=False, input="float-nchw", normalize=True))
    export([run], settings=Settings(onnx=False))
    attrs = load(run / EMBEDDINGS).attrs
    assert json.loads(attrs["preprocessing"])["layout"] == "nchw"
    assert attrs["normalized"]


def test_wrong_settings_are_refused_together():
    wrong = {"provider": "foo", "threads": -3, "batch_size": 0, "precision": "fp8", "input": "rgb"}
    with pytest.raises(DmlError) as caught:
        Settings(**wrong)
    assert [line.split(" = ")[0] for line in caught.value.why.splitlines()] == list(wrong)


def test_an_export_of_nothing_is_an_error(run):
    done = call("export", run, "--no-onnx", "--no-embeddings")
    assert done.exit_code == 1
    assert "nothing to export" in done.stderr


def test_an_export_that_cannot_begin_leaves_no_folder(run, tmp_path):
    done = call("export", run, "--out", tmp_path / "new" / "er", "--data", tmp_path / "nowhere")
    assert done.exit_code == 1
    assert not (tmp_path / "new").exists()
    done = call("export", run, "--out", run / "best.pt")
    assert done.exit_code == 1
    assert "is a file" in done.stderr


def test_an_export_that_fails_leaves_no_folder(run, tmp_path, monkeypatch):
    monkeypatch.setattr("exporter.exporting.write_plain", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(run, tmp_path / "new" / "er")
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(ZeroDivisionError):
        export(run, tmp_path / "there")
    assert (tmp_path / "there").exists()


def test_the_export_of_a_run_that_has_not_ended_says_so(run):
    state = torch.load(run / "last.pt", weights_only=True)
    assert export(run)["notes"] == []
    state["config"]["schedule"]["epochs"] = 40
    torch.save(state, run / "last.pt")
    epoch = load_member(run).state["epoch"]
    done = call("export", run, "--force")
    assert f"the network of epoch {epoch} of 40: its training has not ended" in done.stderr
    assert f"dmltool train --resume {run}" in done.stderr
    (run / "last.pt").write_bytes(b"damaged")
    assert export(run, force=True)["notes"] == []


def test_a_file_reproduces_the_embeddings_of_its_images(run):
    """What docs/onnx.md promises: the model in another process gives the rows of the file."""
    export([run])
    member = load_member(run)
    data = load_data(member.config)
    images, labels = comparison_images(data, describe(run / MODEL).preprocessing, "fp16")
    found = Session(describe(run / MODEL)).run(images)
    stored = load(run / EMBEDDINGS).splits["test"].vectors
    assert len(labels) == len(stored)
    distances = np.abs(found[:, None] - stored[None]).max(2).min(1)
    assert distances.max() < 1e-4


def test_an_export_killed_at_random_moments_ends_with_the_same_file(run, tmp_path):
    words = ("-m", "cli", "export", run, "--out", tmp_path / "killed", "--resume")
    words += ("--split", "train", "--split", "test", "--batch-size", "1")
    export([run], tmp_path / "whole", Settings(splits=("train", "test"), batch_size=1))
    moments = random.Random(3)
    for _ in range(3):
        process = Forked(*words)
        time.sleep(moments.uniform(0.5, 4))
        process.kill()
    done = Forked(*words).end()
    assert done[0] == 0, done
    whole, killed = (load(tmp_path / name / EMBEDDINGS) for name in ("whole", "killed"))
    for split in ("train", "test"):
        np.testing.assert_array_equal(whole.splits[split].vectors, killed.splits[split].vectors)
        np.testing.assert_array_equal(whole.splits[split].labels, killed.splits[split].labels)
    same = {"model_sha256", "paths_sha256", "preprocessing", "normalized", "dataset"}
    assert {k: whole.attrs[k] for k in same} == {k: killed.attrs[k] for k in same}


def test_a_run_that_left_out_bad_images_is_exported_without_them(tmp_path):
    pictures = draw_pictures(tmp_path / "pictures", classes=12)
    config = small_config(pictures)
    config = replace(config, data=replace(config.data, skip_bad=True))
    data = load_data(config)
    for split in ("train", "test"):
        (pictures / data.paths[data.rows(split)[0]]).write_bytes(b"no image")
    train.train(config, tmp_path / "run")
    found = export([tmp_path / "run"], settings=Settings(precision="int8", max_recall_drop=100.0))
    assert found["embeddings"]["splits"] == {"test": len(data.rows("test")) - 1}
    assert [name for name, _ in found["embeddings"]["skipped"]] == [
        str(data.paths[data.rows("test")[0]])
    ]


def test_without_an_earlier_model_no_folder_is_left(run, tmp_path):
    with pytest.raises(DmlError, match="to embed with"):
        export([run], tmp_path / "new", Settings(onnx=False))
    assert not (tmp_path / "new").exists()
