"""Held-out classes, and classes that can fill a batch."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.errors import DmlError
from tests.trainer.data.datasets.trees import made, splits_of
from trainer.data.datasets.records import build
from trainer.data.datasets.splitting import (
    check_batches,
    chosen_splits,
    divide,
    held_out,
    shuffled,
    with_validation,
    without_small_classes,
)


def test_validation_takes_whole_classes_from_train_only():
    data = build(
        "made",
        None,
        [(f"{c}-{i}", f"c{c}", "train" if c < 40 else "test") for c in range(60) for i in range(3)],
        reader=print,
    )
    cut = with_validation(data, 0.1, seed=3)
    found = splits_of(cut)
    assert len(found["val"]) == 4
    assert not found["val"] & found["train"]
    assert found["train"] | found["val"] == splits_of(data)["train"]
    assert found["test"] == splits_of(data)["test"]
    assert cut.counts()["val"] == (12, 4)
    assert len(data.rows("val")) == 0


def test_validation_depends_on_the_seed_and_on_nothing_else():
    data = made({f"c{c}": 3 for c in range(50)})
    mirrored = made({f"c{c}": 3 for c in reversed(range(50))})
    first = splits_of(with_validation(data, 0.2, 1))["val"]
    assert first == splits_of(with_validation(mirrored, 0.2, 1))["val"]
    assert first != splits_of(with_validation(data, 0.2, 2))["val"]


def test_the_order_of_classes_never_changes_between_versions():
    assert shuffled("abcdef", 0) == ["f", "d", "c", "e", "a", "b"]


def test_validation_passes_over_classes_of_one_image():
    data = made({"lone": 1, "solo": 1, "a": 2, "b": 2, "c": 2, "d": 2})
    for seed in range(10):
        assert not {"lone", "solo"} & splits_of(with_validation(data, 0.3, seed))["val"]


def test_a_given_validation_split_stays():
    data = build("made", None, [("a", "x", "train"), ("b", "y", "val")], reader=print)
    assert with_validation(data) is data


def test_no_validation_is_cut_at_fraction_zero():
    data = made({"a": 2, "b": 2})
    assert with_validation(data, 0) is data


@pytest.mark.parametrize("sizes", [{"a": 5, "b": 5, "c": 5}, {"a": 5, "b": 1, "c": 1, "d": 1}])
def test_too_few_classes_for_validation_is_an_error(sizes):
    with pytest.raises(DmlError) as caught:
        with_validation(made(sizes), 0.1)
    assert "too few classes" in caught.value.what
    assert "--select last" in caught.value.fix


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2, True, "0.1", float("nan")])
def test_a_fraction_outside_zero_to_one_is_an_error(fraction):
    with pytest.raises(DmlError, match="val_fraction"):
        with_validation(made({"a": 2, "b": 2, "c": 2, "d": 2}), fraction)


@given(st.integers(4, 60), st.floats(0, 0.4), st.floats(0, 0.4), st.integers(0, 2**31))
def test_dividing_gives_each_class_one_split_of_the_size_asked_for(n, test, val, seed):
    names = [f"c{i}" for i in range(n)]
    want = held_out(n, test, "test"), held_out(n, val, "val")
    if n - sum(want) < 2:
        with pytest.raises(DmlError, match="cannot be divided"):
            divide(Path("x"), names, test, val, seed)
        return
    splits = list(divide(Path("x"), names, test, val, seed).values())
    assert (splits.count("test"), splits.count("val")) == want
    assert len(splits) == n


def test_batches_that_can_be_filled_pass():
    check_batches(made({"a": 3, "b": 4, "c": 3}), 3, 3)
    check_batches(made({"a": 1, "b": 4}), 2, 3, repeat=True)


def test_a_class_with_too_few_images_for_the_batch_is_named():
    with pytest.raises(DmlError) as caught:
        check_batches(made({"rare": 2, "common": 9}), 2, 4)
    assert "1 of 2" in caught.value.what
    assert "rare (2)" in caught.value.why
    assert "common" not in caught.value.why
    assert "at most 2" in caught.value.fix
    assert "--min-images 4: 1 class remains" in caught.value.fix


def test_a_batch_that_no_class_can_fill_does_not_propose_to_leave_all_out():
    with pytest.raises(DmlError) as caught:
        check_batches(made({"a": 2, "b": 3}), 2, 4)
    assert "--min-images" not in caught.value.fix
    assert caught.value.fix.endswith("add images, or repeat them (--set batches.repeat=true).")


def test_too_few_classes_for_the_batch_is_an_error_even_with_repeats():
    with pytest.raises(DmlError, match="needs 3 classes, train has 2"):
        check_batches(made({"a": 9, "b": 9}), 3, 2, repeat=True)


def test_small_classes_can_be_left_out_of_training():
    data = build(
        "made",
        None,
        [
            ("1", "small", "train"),
            *((f"{i}", "big", "train") for i in range(4)),
            ("9", "small", "test"),
        ],
        reader=print,
    )
    less = without_small_classes(data, 2)
    assert less.counts() == {"train": (4, 1), "test": (1, 1)}
    assert "1 class with fewer than 2 images" in less.notes[0]
    with pytest.raises(DmlError, match="no classes are left"):
        without_small_classes(data, 5)


def test_splits_are_those_held_out_unless_others_are_wanted():
    rows = [(f"{i}.png", f"c{i // 4}", ("query", "gallery")[i % 2]) for i in range(10)]
    data = build("made", None, rows, reader=print)
    assert {name: rows.tolist() for name, rows in chosen_splits(data, ()).items()} == {
        "query": [0, 2, 4, 6, 8],
        "gallery": [1, 3, 5, 7, 9],
    }
    assert list(chosen_splits(data, ["gallery"])) == ["gallery"]
    with pytest.raises(DmlError, match="has no split train") as caught:
        chosen_splits(data, ["train"])
    assert "query, gallery" in caught.value.why
