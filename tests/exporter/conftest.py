"""A small network and its model file, exported once for all tests of the folder."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exporter.networks import Together
from exporter.onnx.trace import write_model
from tests.exporter.networks import properties, settled
from tests.trainer.small import draw_pictures, small_config
from trainer.run import train


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Networks this small gain nothing from more, and wait for each other on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def embedder():
    return settled()


@pytest.fixture(scope="session")
def exported(embedder, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    write_model(embedder, path, size=16, properties=properties(embedder))
    return path


@pytest.fixture(scope="session")
def unit(embedder, tmp_path_factory):
    """The same with embeddings of length 1, for float input."""
    path = tmp_path_factory.mktemp("unit") / "model.onnx"
    said = properties(embedder, input="float-nchw", normalize=True)
    network = Together([embedder], normalize=True)
    write_model(network, path, size=16, properties=said, input="float-nchw")
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Two runs of a few seconds on the same pictures, and the pictures."""
    folder = tmp_path_factory.mktemp("trained")
    pictures = draw_pictures(folder / "pictures", classes=12)
    for seed in (0, 1):
        config = small_config(pictures)
        config = replace(config, run=replace(config.run, seed=seed))
        train.train(config, folder / f"run{seed}")
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(trained / "run0", tmp_path / "run"))
