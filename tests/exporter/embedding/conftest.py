"""Images for the tests of the folder."""

import pytest

from tests.exporter.embedding.toy import draw


@pytest.fixture
def data(tmp_path):
    (tmp_path / "images").mkdir()
    return draw(tmp_path / "images")
