"""Settings are checked before training: keys, types, names, options, monitors and phases."""

from dataclasses import replace

import pytest

from retrieval.errors import DmlError
from tests.trainer.small import small_config
from trainer import losses
from trainer.config import Batches, Config, Loss, Phase
from trainer.resolve import resolve
from trainer.run.setup import balanced, open_data
from trainer.run.watch import Watch
from trainer.validate import check_names, from_dict


@pytest.mark.parametrize("name", ["nonsense", "proxy_anchor", "proxy_nca"])
def test_a_wrong_monitor_names_the_option_and_losses_that_can_be_one(name):
    with pytest.raises(DmlError) as error:
        losses.check_monitors([name], "ce", {})
    text = f"{error.value.why} {error.value.fix}"
    assert "--monitor" in error.value.fix
    assert "--loss" not in error.value.fix
    assert "spce" in text
    assert "soft_triple" not in text


def test_monitors_and_phases_without_a_head_are_refused_with_the_settings():
    with pytest.raises(DmlError, match="monitor ce needs a loss") as error:
        check_names(Config(loss=Loss(name="triplet", monitor=("ce",))))
    assert "'triplet' has none" in error.value.why
    with pytest.raises(DmlError, match="'triplet' has no head"):
        check_names(Config(loss=Loss(name="triplet"), phase=Phase(epochs=1)))
    check_names(Config(loss=Loss(name="group", monitor=("ce",)), phase=Phase(epochs=1)))


def test_anchors_leave_an_image_to_refine():
    batches = Batches(classes=4, images=4)
    check_names(Config(loss=Loss(name="group", options={"anchors": 3}), batches=batches))
    with pytest.raises(DmlError, match="anchors = 4 with 4 images") as error:
        check_names(Config(loss=Loss(name="group", options={"anchors": 4}), batches=batches))
    assert "anchors=3" in error.value.fix
    assert "--batch 4x5" in error.value.fix


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["optimizer.lrr=1"], "Did you mean optimizer.lr?"),
        (["optimiser.lr=1"], "Did you mean optimizer?"),
        (["optimizer.zzz=1"], "There is no key optimizer.zzz. There are name, lr"),
        (["network.lr=1"], "Did you mean optimizer.lr?"),
        (["optimizer.lr=fast"], "is not a number."),
        (["schedule.epochs=1.5"], "is not a whole number."),
        (["run.compile=1"], "is not true or false."),
        (["schedule.epochs=true"], "is not a whole number."),
        (["input.scale=[0.1]"], "is not a list of 2."),
        (["input.scale=0.1"], "is not a list such as [1, 2]."),
        (["loss.options=3"], "is not a table of keys."),
        (["optimizer.lr=-1"], "optimizer.lr = -1.0 is not a number from 0 to"),
        (["optimizer.lr=nan"], "optimizer.lr = nan is not a number from 0 to"),
        (["optimizer.name=sdg"], "is not sgd, adam, radam or adamw. Did you mean sgd?"),
        (["input.scale=[0.9, 0.1]"], "does not begin with the smaller number"),
        (["batches.classes=4"], "are not both given"),
        (["loss.length=-1"], "loss.length = -1.0 is not a number from 0 to"),
        (["loss.miner_options.epsilon=0.1"], "loss.miner names no miner"),
        (["phase.epochs=99"], "more than schedule.epochs"),
        (["phase.optimizer.lrr=1"], "There is no key phase.optimizer.lrr"),
        (["phase.optimizer.problems=1"], "There is no key phase.optimizer.problems"),
        (["phase.optimizer.lr=fast"], "phase.optimizer.lr = 'fast' is not a number."),
        (["phase.optimizer.lr=-1"], "phase.optimizer.lr = -1.0 is not a number from 0 to"),
        (["optimizer.decoupled=true", "optimizer.name=sgd"], "sgd has no such weight decay"),
        (["batches.sampling=evenly"], "is not images or classes."),
        (["lr=1"], "Did you mean optimizer.lr?"),
        (["optimizer.lr"], "table.key=value"),
        (["data.root.x=1", "data.root.x.y=2"], "is not a table"),
    ],
)
def test_what_is_wrong_with_a_setting_is_said(settings, told):
    with pytest.raises(DmlError) as caught:
        resolve("glyphs-ce", None, {}, settings)
    assert told in str(caught.value)


def test_all_problems_are_told_together():
    with pytest.raises(DmlError) as caught:
        resolve("glyphs-ce", None, {}, ["optimizer.lr=-1", "schedule.epochs=0", "data.cache=x"])
    assert all(part in str(caught.value) for part in ("optimizer.lr", "schedule.epochs", "cache"))
    with pytest.raises(DmlError) as caught:
        from_dict({"lr": 1, "data": {"rot": "x"}, "loss": 3}, "it")
    assert all(part in str(caught.value) for part in ("optimizer.lr", "data.root", "loss = 3"))


def test_wrong_keys_types_and_values_are_told_together():
    tables = {
        "optimizer": {"lr": "fast"},
        "run": {"sed": 1, "select": "best"},
        "input": {"crop": 9e9},
    }
    with pytest.raises(DmlError) as caught:
        from_dict(tables | {"schedule": {"epochs": 0}}, "The file")
    lines = caught.value.why.splitlines()
    keys = ("optimizer.lr", "run.sed", "input.crop", "schedule.epochs", "run.select")
    assert [key for key in keys if sum(key in line for line in lines) == 1] == list(keys)
    assert caught.value.what == "The file cannot be used."


def test_several_wrong_names_are_told_together():
    wrong = ["loss.name=grup", "network.backbone=resnet5", "data.dataset=foldr"]
    config, _ = resolve("glyphs-ce", None, {}, wrong)
    with pytest.raises(DmlError) as caught:
        check_names(config)
    assert all(name in caught.value.why for name in ("'group'", "'resnet50'", "'folder'"))


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_beyond_all_floats_is_explained(digits):
    with pytest.raises(DmlError, match=r"optimizer\.lr = .*is not a number that is small enough"):
        from_dict({"optimizer": {"lr": 10**digits}}, "x.toml")


def test_anchors_that_leave_nothing_to_refine_are_refused_also_if_they_are_the_default(pictures):
    with pytest.raises(DmlError, match="anchors = 2 with 2 images"):
        check_names(Config(loss=Loss("group"), batches=Batches(classes=4, images=2)))
    check_names(Config(loss=Loss("group"), batches=Batches(classes=4, images=3)))
    config = small_config(pictures)
    config = replace(config, loss=Loss("group", {"anchors": 4}), batches=Batches(16, balance=True))
    source = open_data(config, Watch())
    with pytest.raises(DmlError, match="anchors = 4 with 4 images"):
        balanced(config, source.data, 1, Watch())
