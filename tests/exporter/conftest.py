"""A small network and its model file, exported once for all tests of the folder."""

import pytest
import torch

from exporter.networks import Together
from exporter.onnx.trace import write_model
from tests.exporter.networks import properties, settled


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
