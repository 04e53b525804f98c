"""The command sweep: which options go together."""

from tests.conftest import call


def test_a_sweep_names_what_varies():
    assert call("sweep").exit_code == 2
    assert call("sweep", "--grid", "optimizer.lr=1", "--space", "x.toml").exit_code == 2
