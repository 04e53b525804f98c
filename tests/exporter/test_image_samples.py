"""Images that a model is compared and calibrated with: which they are, and bad ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from exporter import image_samples
from exporter.image_samples import calibration_images, comparison_images, readable
from exporter.networks import load_member
from tests.commands import call
from tests.exporter.embedding.toy import PREPARED, draw
from trainer.data.datasets.records import SPLITS
from trainer.run.setup import load_data


def test_images_that_cannot_be_read_are_left_out_of_the_comparison_too(trained, run, tmp_path):
    pictures = Path(shutil.copytree(trained / "pictures", tmp_path / "pictures"))
    for split in ("train", "test"):
        data = load_data(load_member(run).config)
        (pictures / data.paths[data.rows(split)[0]]).write_bytes(b"no image")
    args = ("export", run, "--data", pictures, "--precision", "int8", "--max-recall-drop", 50)
    done = call(*args)
    assert done.exit_code == 1
    assert "--skip-bad" in done.stderr
    done = call(*args, "--skip-bad", "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["model"]["parity"]["images"] == 23
    assert result["embeddings"]["splits"] == {"test": 23}


def test_a_comparison_has_two_images_of_as_many_classes_as_fit(tmp_path, monkeypatch):
    data = draw(tmp_path, count=60, classes=12)  # queries and a gallery
    images, labels = comparison_images(data, PREPARED, "fp32")
    assert images.shape == (60, 8, 8, 3)
    assert np.bincount(labels).tolist() == [5] * 12
    monkeypatch.setattr(image_samples, "COMPARED", {"fp32": 20})
    images, labels = comparison_images(data, PREPARED, "fp32")
    assert len(images) == 20
    assert np.bincount(labels).tolist() == [2] * 10


def test_without_training_images_none_are_for_calibration(tmp_path):
    assert len(calibration_images(draw(tmp_path, count=10), PREPARED)) == 0


def test_images_for_calibration_are_training_images(tmp_path):
    data = draw(tmp_path, count=10)
    splits = np.where(np.arange(10) < 4, SPLITS.index("train"), SPLITS.index("test"))
    found = calibration_images(replace(data, splits=splits), PREPARED)
    assert np.array_equal(found, readable(data, np.arange(4), PREPARED)[0])
