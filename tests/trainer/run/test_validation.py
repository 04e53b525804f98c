"""Scores before, during and after training: the splits that they are of, and broken networks."""

from operator import attrgetter

import numpy as np
import pytest
import torch

from retrieval.errors import DmlError
from tests.trainer.run.runs import assert_same_bits, fit, weights
from tests.trainer.small import draw_pictures
from trainer.data.datasets import load
from trainer.data.datasets.splitting import with_validation
from trainer.run import train, validation
from trainer.run.metrics_log import read_metrics
from trainer.run.scoring import recall
from trainer.run.setup import build_embedder
from trainer.run.validation import sampled_classes


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


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("embedder.projection", torch.inf),
        ("embedder.projection", 3e38),  # finite, and too large for embeddings that are
        ("loss.head", torch.nan),  # which no embedding shows
    ],
)
def test_weights_ruined_by_the_last_step_of_an_epoch_are_not_kept(
    part, value, change, tmp_path, monkeypatch
):
    honest = train.train_epoch

    def ruined(training, epoch):
        record = honest(training, epoch)
        if epoch == 1:
            attrgetter(part)(training).weight.data[0] = value
        return record

    monkeypatch.setattr(train, "train_epoch", ruined)
    with pytest.raises(DmlError, match="after epoch 2") as caught:
        train.train(change(run={"select": "last"}), tmp_path / "run")
    assert "end of epoch 1" in str(caught.value)
    kept = weights(tmp_path / "run")[f"{part}.weight"]
    assert kept.abs().max() < 100


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


def test_the_final_scores_are_of_embeddings_in_float32(change, tmp_path, monkeypatch):
    half, embed = [], validation.embed

    def noted(*args):
        half.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu", enabled=False):  # not every processor computes in bf16
            return embed(*args)

    monkeypatch.setattr(validation, "embed", noted)
    monkeypatch.setattr(validation, "precision", lambda *_: torch.bfloat16)
    train.train(change(schedule={"epochs": 1}), tmp_path / "run")
    assert half == [True, True, True, False, False]  # the last: test set and validation set
