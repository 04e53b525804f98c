"""Options of losses and miners: wrong types, monitors and phases are errors before training."""

import inspect

import pytest

from retrieval.errors import DmlError
from trainer import losses
from trainer.config import Batches, Config, Loss, Phase, Schedule
from trainer.losses import LOSSES, build, pml
from trainer.losses.miners import MINERS
from trainer.validate import check_names


def numbers(parameters):
    return [
        name
        for name, p in parameters.items()
        if isinstance(p.default, int | float) and not isinstance(p.default, bool)
    ]


def parameters_of(entry):
    if "loss" in entry.defaults:
        return pml.parameters_of("loss", entry.defaults["loss"])
    return inspect.signature(entry.load()).parameters


@pytest.mark.parametrize("entry", LOSSES, ids=lambda entry: entry.name)
def test_text_for_a_number_of_a_loss_is_an_error(entry):
    for option in numbers(parameters_of(entry)):
        with pytest.raises(DmlError, match=f"{option} = 'nope'") as error:
            losses.check(entry.name, {option: "nope"})
        assert entry.name in error.value.what
        assert f"{option} is a" in error.value.why
        assert "number." in error.value.why


@pytest.mark.parametrize("entry", MINERS, ids=lambda entry: entry.name)
def test_text_for_a_number_of_a_miner_is_an_error(entry):
    for option in numbers(pml.parameters_of("miner", entry.defaults["miner"])):
        with pytest.raises(DmlError, match=f"{option} = 'x'") as error:
            losses.check("triplet", {}, entry.name, {option: "x"})
        assert error.value.what.startswith(f"The miner {entry.name!r}")
        assert error.value.why == f"{option} is a number."


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"iterations": 1.5}, "iterations is a whole number."),
        ({"iterations": True}, "iterations is a whole number."),
        ({"bias": 1}, "bias is true or false."),
        ({"similarity": 3}, "similarity is a text."),
        ({"similarity": "x"}, "similarity is 'pearson', 'cosine' or 'gaussian'."),
    ],
)
def test_options_of_another_type(options, why):
    with pytest.raises(DmlError) as error:
        losses.check("group", options)
    assert error.value.why == why


def test_numbers_without_a_fraction_are_numbers():
    losses.check("group", {"diagonal": 1, "iterations": 2})
    losses.check("ranked_list", {"margin": 1, "Tn": 2})


def test_an_option_of_the_class_is_checked_by_the_default_of_the_table():
    with pytest.raises(DmlError, match="'ranked_list' cannot use Tn = 'x'"):
        losses.check("ranked_list", {"Tn": "x"})  # the class has no default


def test_an_unknown_option_names_the_miner_as_typed():
    with pytest.raises(DmlError, match="The miner 'semihard' has no option 'marginn'"):
        losses.check("triplet", {}, "semihard", {"marginn": 1})


@pytest.mark.parametrize("entry", LOSSES, ids=lambda entry: entry.name)
def test_the_table_knows_which_losses_have_weights_of_their_own(entry):
    loss = build(entry.name, 4, 8)
    assert entry.own_weights == any(not n.startswith("head.") for n, _ in loss.named_parameters())


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


def test_a_phase_longer_than_the_training_says_what_to_change():
    with pytest.raises(DmlError) as error:
        Config(phase=Phase(epochs=10), schedule=Schedule(epochs=1))
    assert error.value.fix == "Use --set phase.epochs=0, or --epochs 11 or more."
