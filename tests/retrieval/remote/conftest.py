"""A cache for each test, and fsspec's memory as a server."""

import fsspec
import pytest

from retrieval.formats.arrays import copies
from retrieval.remote import cache_limit
from retrieval.remote.store import Store
from tests.retrieval.remote.copies import forget_use


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache_limit.FOLDER, str(tmp_path / "cache"))
    yield tmp_path / "cache"
    forget_use()
    copies.clear()


@pytest.fixture
def server():
    found = fsspec.filesystem("memory")
    yield found
    found.rm("/", recursive=True)


@pytest.fixture
def downloads(monkeypatch):
    """The files that were downloaded."""
    found, real = [], Store.download

    def download(self, file, *args):
        found.append(file.name)
        return real(self, file, *args)

    monkeypatch.setattr(Store, "download", download)
    return found
