"""Trials of a sweep: what is drawn for them, and sweeps that a folder already holds."""

import pytest

from retrieval.errors import DmlError
from tests.kills import Killed
from tests.trainer.sweep.killed import LR, KilledAt
from trainer.sweep.space import Range
from trainer.sweep.study import Trials
from trainer.sweep.sweep import sweep


def test_random_settings_are_drawn_by_number_and_stay_in_their_ranges(plan, tmp_path):
    space = {"optimizer.lr": Range(1e-4, 1e-2, log=True), "network.dim": Range(4, 8)}
    random = plan(space=space, method="random", trials=2, seeds=1)
    with pytest.raises(Killed):
        sweep(random, tmp_path / "killed", watch=KilledAt(3))  # of the second setting
    found = [sweep(random, tmp_path / name) for name in ("killed", "whole")]
    values = [{row["trial"]: row["values"] for row in one["rows"]} for one in found]
    assert values[0] == values[1]
    assert len({tuple(each.values()) for each in values[0].values()}) == 2
    for each in values[0].values():
        assert 1e-4 <= float(each["optimizer.lr"]) <= 1e-2
        assert each["network.dim"] in "45678"


def test_tpe_trains_as_many_settings_as_asked(plan, tmp_path):
    space = {"optimizer.lr": Range(1e-4, 1e-2, log=True)}
    tpe = plan(space=space, method="tpe", trials=2, seeds=1)
    assert len(sweep(tpe, tmp_path / "sweep")["rows"]) == 2


def test_a_sweep_of_other_settings_is_another_sweep(plan, tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    Trials(plan(LR), folder, None)
    Trials(plan(LR), folder, None)
    with pytest.raises(DmlError, match="another sweep") as error:
        Trials(plan(LR, settings=(*plan(LR).settings, "run.train_recall=9")), folder, None)
    assert "run.train_recall" in error.value.why
    with pytest.raises(DmlError, match="another sweep") as error:
        Trials(plan("optimizer.lr=0.1"), folder, None)
    assert error.value.why == "It differs in: the parameters that vary."


def test_a_grid_that_is_continued_in_another_order_trains_every_cell_once(plan, tmp_path):
    grid = (LR, "loss.options.smoothing=0.0,0.1")
    began = Trials(plan(*grid), tmp_path, None)
    again = Trials(plan(*reversed(grid)), tmp_path, None)
    assert again.cells == began.cells


@pytest.mark.parametrize(
    ("storage", "fix"), [(None, "Choose another --out"), ("foo://x", "install its driver")]
)
def test_a_storage_that_cannot_be_opened_is_told(storage, fix, plan, tmp_path):
    (tmp_path / "study.db").write_bytes(b"no database" * 100)
    with pytest.raises(DmlError, match="cannot be opened") as error:
        Trials(plan(LR), tmp_path, storage)
    assert fix in error.value.fix
