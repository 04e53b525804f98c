"""Names are looked up in one way, and a wrong one is answered with the nearest or with all."""

import math

import click
import pytest

from retrieval import registry
from retrieval.errors import DmlError
from retrieval.registry import Entry, Registry, check_options, nearest, unknown
from trainer.commands import TABLES
from trainer.resolve import preset_path


def made() -> Registry:
    return Registry(
        "loss",
        Entry("group", "math:gcd", "a group"),
        Entry("triplet", "math", "three"),
        option="--loss",
        families={"pml": lambda name: Entry(f"pml:{name}", "math:sin", "")},
        own=lambda path: Entry(path, path, "your own"),
    )


def test_an_entry_loads_the_object_behind_its_path():
    assert made().find("group").load() is math.gcd
    assert made().find("triplet").load() is math


def test_families_and_own_paths_become_entries():
    assert made().find("pml:Circle").name == "pml:Circle"
    assert made().find("math:cos").load() is math.cos


def test_a_near_name_is_suggested_with_the_option_that_takes_it():
    with pytest.raises(DmlError) as caught:
        made().find("Gruop")
    assert caught.value.what == "There is no loss 'Gruop'."
    assert caught.value.fix == "Did you mean 'group'? --loss group"


def test_far_names_are_not_suggested_but_all_are_listed():
    with pytest.raises(DmlError) as caught:
        made().find("zzz")
    assert "Did you mean" not in str(caught.value)
    for name in ("group", "triplet", "pml:NAME", "package.module:NAME"):
        assert name in caught.value.why


def test_an_added_entry_is_found_and_listed():
    table = made()
    table.add(Entry("mine", "math:tan", "my own"))
    assert table.find("mine").load() is math.tan
    assert table.summaries() == {"group": "a group", "triplet": "three", "mine": "my own"}
    assert len(list(table)) == 3


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("margn", "Did you mean 'margin'? --set loss.options.margin=..."),
        ("zzz", "Leave out --set loss.options.zzz=..."),
    ],
)
def test_options_that_do_not_exist_are_refused(given, fix):
    with pytest.raises(DmlError) as caught:
        check_options("The loss 'x'", ["margin", given], ["margin", "scale"], "loss.options")
    assert caught.value.fix == fix
    assert "margin, scale" in caught.value.why


def test_nearest_ignores_case_and_gives_nothing_for_strangers():
    assert nearest("CIRCLELOSS", ["CircleLoss", "ArcFaceLoss"]) == "CircleLoss"
    assert nearest("x", ["CircleLoss"]) == nearest("x", []) == ""


def test_a_name_that_shares_only_scattered_letters_is_not_suggested():
    presets = ["cars-ce", "inshop-ce", "cub-group"]
    assert nearest("nope", presets) == ""
    assert nearest("inshop", presets) == "inshop-ce"
    assert nearest("cub-grup", presets) == "cub-group"


def test_errors_name_the_command_that_lists_the_names():
    for listing, path in TABLES.items():
        with pytest.raises(DmlError) as caught:
            Entry(listing, path, "").load().find("?")
        assert caught.value.fix.endswith(f"dmltool list {listing}")
    with pytest.raises(DmlError) as caught:
        preset_path("?")
    assert caught.value.fix.endswith("dmltool list presets")
    assert unknown("split", "?", ["a"]).fix == "Give one of these names."


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (["train", "--loss", "mine:Loss"], True),
        (["train", "--loss=mine:Loss"], True),
        (["train", "--log", "tensorboard,mine:Loss"], True),
        (["train", "--set", "loss.name=mine:Loss"], True),
        (["train", "--set", 'loss.name = "mine:Loss"'], True),
        (["train", "--set", "loss.monitor=['ce', 'mine:Loss']"], True),
        (["sweep", "--grid", "loss.name=ce,mine:Loss"], True),
        (["train", "--resume", "runs"], False),
        (["train", "--resume", "mine:Loss"], False),  # a folder may have any name
        (["train", "--resume=mine:Loss"], False),
        (["train", "--set", "data.root=photos/mine:Loss"], False),
        (["train", "--loss", "mine:Losses"], False),
    ],
)
def test_code_outside_dmltool_has_to_be_typed(words, allowed, monkeypatch):
    table = Registry("loss", own=lambda path: Entry(path, path, "own"))
    with click.Context(click.Command("main")) as context:
        context.meta[registry.ARGUMENTS] = words
        if allowed:
            assert table.find("mine:Loss").path == "mine:Loss"
            return
        with pytest.raises(DmlError, match="code outside dmltool"):
            table.find("mine:Loss")
        monkeypatch.setenv(registry.OWN, "other:Loss,mine:Loss")
        assert table.find("mine:Loss").path == "mine:Loss"
