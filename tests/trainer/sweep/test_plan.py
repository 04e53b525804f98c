"""The plan of a sweep: the settings of its runs, what is checked, and what it is known by."""

from dataclasses import replace

import pytest

from retrieval.errors import DmlError
from tests.trainer.sweep.killed import LR
from trainer.sweep.space import Range


def test_the_runs_of_a_setting_differ_in_their_seed_alone(plan):
    made = plan(LR, seeds=3)
    found = replace(made, settings=(*made.settings, "run.seed=5")).runs({"optimizer.lr": "0.003"})
    assert list(found) == [5, 6, 7]
    first = found[5]
    assert (first.optimizer.lr, first.run.threads) == (0.003, 1)
    for seed, config in found.items():
        assert config == replace(first, run=replace(first.run, seed=seed))


def test_every_cell_of_a_grid_is_checked_before_anything_is_trained(plan):
    plan("loss.options.smoothing=0.1,0.2").check()
    with pytest.raises(DmlError, match="smoothing"):
        plan("loss.options.smoothing=0.1,7").check()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("optimizer.lrr", ("0.1", "0.2")),
        ("optimizer.name", ("'adam'", "'adamm'")),
        ("schedule.epochs", Range(1.0, 3.0)),
        ("optimizer.momentum", Range(0.5, 1.5)),
    ],
)
def test_parameters_that_are_drawn_are_checked_before_anything_is_trained(plan, key, values):
    with pytest.raises(DmlError, match=key):
        plan(space={key: values}, method="random").check()


def test_parameters_that_fit_only_together_may_be_drawn(plan):
    plan(space={"batches.classes": ("2",), "batches.images": ("2", "4")}, method="random").check()


def test_a_sweep_that_holds_out_no_classes_is_refused(plan):
    made = plan(LR)
    with pytest.raises(DmlError, match="--select last"):
        replace(made, settings=(*made.settings, "run.select=last")).check()


def test_a_sweep_is_known_by_what_its_result_depends_on(plan):
    made = plan(LR)
    elsewhere = replace(made, settings=(*made.settings, "data.root=/elsewhere", "run.threads=3"))
    assert elsewhere.definition() == made.definition()
    for other in (plan(LR, seeds=3), plan("optimizer.lr=0.1"), plan(LR, method="random")):
        assert other.definition() != made.definition()
    other = replace(made, settings=(*made.settings, "optimizer.clip=1"))
    assert other.definition() != made.definition()
