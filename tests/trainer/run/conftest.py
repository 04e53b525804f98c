"""One finished run, which tests of several files read."""

import shutil
from pathlib import Path

import pytest

from tests.trainer.small import small_config
from trainer.run import metrics_log, train
from trainer.run.metrics_log import draw_curves


@pytest.fixture(scope="session")
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
