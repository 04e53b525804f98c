"""Settings are checked by their annotations and fields, all problems together."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from retrieval.evaluation import Settings
from retrieval.reporting.gather import Options
from retrieval.settings import BadSettings, Checked, accepting, converted, either, one_of, within


@dataclass(frozen=True)
class Small(Checked):
    name: str = one_of("red", "green", default="red")
    sizes: tuple[int, ...] = within(1, default=(1,))
    share: float = accepting(lambda share: share < 1, "below 1", default=0.5)
    place: str | Path | None = None


def test_values_are_converted_to_the_types_of_their_fields():
    small = Small(sizes=[np.int64(3)], share=0, place=Path("a"))
    small.require_valid()
    assert small == Small(sizes=(3,), share=0.0, place=Path("a"))
    assert type(small.sizes[0]) is int


def test_all_problems_are_told_with_a_fix_that_names_the_defaults():
    with pytest.raises(BadSettings) as caught:
        Small("gren", (3, 0), 1, place=1).require_valid()
    assert caught.value.why.splitlines() == [
        "name = 'gren' is not red or green. Did you mean green?",
        "sizes = 0 is not 1 or more.",
        "share = 1.0 is not below 1.",
        "place = 1 is not a text.",
    ]
    assert caught.value.fix == (
        "Leave them out for their defaults, name='red', sizes=(1,), share=0.5, place=None, or give "
        "other values."
    )


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Settings, {"seeds": "x", "nmi": "yes", "queries": 2.5, "level": 1, "recall_at": (True,)}),
        (Settings, {"distances": ("l2", "l2")}),
        (Settings, {"distances": 3, "map_at_r": 1, "memory": 5, "device": "gpu"}),
        (Options, {"map": "umap", "nmi": 1, "device": 3, "seed": -1}),
    ],
)
def test_every_wrong_value_of_a_command_is_refused_at_once(kind, wrong):
    with pytest.raises(BadSettings) as caught:
        kind(**wrong)
    assert [line.split(" = ")[0] for line in caught.value.why.splitlines()] == [
        name for name in kind.__dataclass_fields__ if name in wrong
    ]


def test_not_a_number_is_in_no_range():
    assert [each.text for each in Small(share=float("nan")).problems()] == [
        "share = nan is not below 1."
    ]


def test_a_text_is_no_whole_number_and_true_is_none_either():
    for value in ("1", True, 1.5, None):
        with pytest.raises(ValueError, match="a whole number"):
            converted(value, int)
    assert converted(None, int | None) is None


def test_choices_are_listed():
    assert either(("l2", "cos", "both")) == "l2, cos or both"
    assert either((1,)) == "1"
