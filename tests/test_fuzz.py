"""The harnesses of tests/fuzz notice what they are for, and repeat themselves."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval.formats import FORMATS, trial
from tests.forks import Forked
from tests.fuzz import mutate, seeds, targets

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def planted():
    command = [sys.executable, "-m", "tests.fuzz.planted"]  # small: it forks often
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("fine", "ok"),
        ("refuse", "refused"),
        ("wrong_exception", "exception"),
        ("end_itself", "exception"),
        ("crash", "signal"),
        ("hang", "hang"),
        ("hang_in_a_grandchild", "hang"),
        ("blow_up", "memory"),
        ("ask_for_too_much", "memory"),
        ("heap_garbage", "unstable"),
    ],
)
def test_every_kind_of_fault_of_a_reader_is_noticed(planted, fault, kind):
    assert planted["files"][fault] == kind


@pytest.mark.parametrize(
    ("writer", "kind"),
    [
        ("write_in_place", "torn"),
        ("write_beside", "litter"),
        ("lock_out", "blocked"),
        ("forget", "lost"),
        ("ignore_signals", "hang"),
    ],
)
def test_every_kind_of_fault_of_a_writer_is_noticed(planted, writer, kind):
    assert kind in planted["kills"][writer]


def test_a_writer_without_fault_passes_every_kill(planted):
    assert planted["kills"]["write_whole"] == ["same"]


def test_every_suffix_has_a_seed(tmp_path):
    names = [*seeds.embedding_files(tmp_path / "a"), *seeds.torch_files(tmp_path / "b")]
    for format in FORMATS:
        if format.marks:
            continue  # a folder, not a file: damaged in tests/retrieval/formats/test_zarr_store.py
        for suffix in format.suffixes:
            assert any(name.endswith(suffix) for name in names), f"tests/fuzz/seeds.py: {suffix}"


def test_seeds_and_mutations_repeat_themselves(tmp_path):
    first, second = (seeds.embedding_files(tmp_path / name) for name in "ab")
    assert first == second
    for change in (mutate.mutate, mutate.mutate_text):
        a, b = (
            [change(data, random.Random(f"{n}")) for n, data in enumerate(first.values())]
            for _ in range(2)
        )
        assert a == b
        assert a != list(first.values())


def run(*args: str) -> tuple[int, str, str]:
    """A process of its own: one that forks should have no threads, and pytest's has some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(trial.SWITCH)
        return Forked("-m", *args).end(timeout=300)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """Every file as it is, and 60 damaged ones."""
    folder = tmp_path_factory.mktemp("findings")
    return run("tests.fuzz", "--sound", "--files", "60", "--keep", str(folder))


def test_a_short_campaign_of_files(campaign):
    code, told, _ = campaign
    table, _, last = told.partition("\n\n")
    summary = json.loads(last)
    assert code == 0, summary["findings"]
    assert summary["files"] == 60
    assert "| all | 60 |" in table
    assert sum(row["ok"] for row in summary["outcomes"].values()) >= 6, "damage is too heavy"


def test_files_that_are_not_damaged_are_all_read(campaign):
    outcomes = json.loads(campaign[1].rpartition("\n\n")[2])["sound"]
    assert outcomes.keys() >= {"torch", "checkpoint", "model.onnx", "image", "settings"}
    assert {kind for row in outcomes.values() for kind in row if row[kind]} == {"ok"}, outcomes


def test_a_short_campaign_of_kills():
    code, told, _ = run("tests.fuzz.kill", "--kills", "6", "--only", "writer,merge,embed")
    summary = json.loads(told.rpartition("\n\n")[2])
    assert code == 0, summary["findings"]
    assert summary["kills"] >= 6


def test_campaigns_are_not_part_of_the_tests():
    assert not list((ROOT / "tests" / "fuzz").rglob("test_*"))
    assert not list((ROOT / "tests" / "fuzz").rglob("*_test.py"))


def test_equal_labels_that_are_objects_have_one_digest():
    first, second = (np.array(["a", "".join(["b", end])], object) for end in ("cc", "cc"))
    assert first[1] is not second[1]
    assert targets._digest(first) == targets._digest(second)
    assert targets._digest(first) != targets._digest(first[::-1])
