"""Options of losses, miners and data sets are checked by their names and the types of values."""

import inspect
from collections.abc import Callable, Sequence

import pytest

from retrieval.errors import DmlError
from trainer.data import datasets
from trainer.data.datasets import DATASETS
from trainer.losses import LOSSES, pml
from trainer.losses.miners import MINERS, check
from trainer.parameters import check_options, options_of


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
            check(entry.name, {option: "nope"})
        assert entry.name in error.value.what
        assert f"{option} is a" in error.value.why
        assert "number." in error.value.why


@pytest.mark.parametrize("entry", MINERS, ids=lambda entry: entry.name)
def test_text_for_a_number_of_a_miner_is_an_error(entry):
    for option in numbers(pml.parameters_of("miner", entry.defaults["miner"])):
        with pytest.raises(DmlError, match=f"{option} = 'x'") as error:
            check("triplet", {}, entry.name, {option: "x"})
        assert error.value.what.startswith(f"The miner {entry.name!r}")
        assert error.value.why == f"{option} is a number."


@pytest.mark.parametrize("entry", DATASETS, ids=lambda entry: entry.name)
def test_a_value_of_another_type_for_an_option_of_a_data_set_is_an_error(entry):
    for option, default in datasets.options_of(entry.name).items():
        datasets.check(entry.name, {option: default})
        wrong = [1] if isinstance(default, str | None) else "x"
        with pytest.raises(DmlError, match=f"{option} = ") as error:
            datasets.check(entry.name, {option: wrong})
        assert error.value.what.startswith(f"The data set {entry.name!r} cannot use")
        assert f"--set data.options.{option}=" in error.value.fix


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
        check("group", options)
    assert error.value.why == why


def test_numbers_without_a_fraction_are_numbers():
    check("group", {"diagonal": 1, "iterations": 2})
    check("ranked_list", {"margin": 1, "Tn": 2})


def test_an_option_of_the_class_is_checked_by_the_default_of_the_table():
    with pytest.raises(DmlError, match="'ranked_list' cannot use Tn = 'x'"):
        check("ranked_list", {"Tn": "x"})  # the class has no default


@pytest.mark.parametrize("option", ["name", "num_classes", "dim"])
def test_what_a_loss_is_built_with_is_no_option_of_it(option):
    with pytest.raises(DmlError, match=f"The loss 'ce' has no option '{option}'"):
        check("ce", {option: 3})


def test_an_unknown_option_names_the_miner_as_typed():
    with pytest.raises(DmlError, match="The miner 'semihard' has no option 'marginn'"):
        check("triplet", {}, "semihard", {"marginn": 1})


class Odd:
    def __init__(
        self,
        *,
        sizes: list[int] = (),
        steps: Sequence[int] = (),
        call: Callable[[int], str] | None = None,
        share: float | None = None,
    ):
        pass


def test_types_that_are_not_checked_take_any_value_and_others_do_not():
    parameters = options_of(Odd)
    given = {"sizes": [1, 2], "steps": "x", "call": 3, "share": None}
    check_options("The loss own:Odd", given, parameters, {}, "loss.options")
    with pytest.raises(DmlError, match="share = 'x'"):
        check_options("The loss own:Odd", {"share": "x"}, parameters, {}, "loss.options")
