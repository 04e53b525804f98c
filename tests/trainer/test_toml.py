"""TOML that is written and read, and files that are refused instead of parsed."""

import os
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from retrieval.errors import DmlError
from retrieval.files import write_text
from trainer import toml
from trainer.config import Config, Data
from trainer.resolve import resolve
from trainer.validate import from_dict


def test_odd_texts_survive_being_written_as_toml():
    odd = 'a "b" \\ \n \x7f \x01 ü 雪 \U0001f600'
    config = replace(Config(), data=Data(root=odd, options={"a b": [1, {"c": True}], "x": 1e300}))
    assert from_dict(tomllib.loads(config.to_toml()), "it") == config
    assert tomllib.loads(f"x = {toml.render(float('inf'))}")["x"] == float("inf")


def test_a_run_on_a_folder_that_is_not_utf8_says_which_line_of_its_config_is_at_fault(tmp_path):
    root = os.fsdecode(b"/data/caf\xe9")
    config = replace(Config(), data=replace(Config().data, root=root))
    write_text(tmp_path / "config.toml", config.to_toml())
    with pytest.raises(DmlError, match=r"config.toml, line \d+: .* is not UTF-8") as caught:
        resolve(None, tmp_path / "config.toml", {})
    assert "Rename" in caught.value.fix


HOSTILE_TOML = {
    "lists": "a = " + "[" * 40_000,
    "tables": "a = " + "{b=" * 20_000,
    "a name": ".".join("a" * 25_000) + " = 1\n",
    "a quoted name": ".".join(['"a b"'] * 10_000) + " = 1\n",
    "a header": f"[ {' . '.join('a' * 20_000)} ]\n" + "\n".join(f"a{n} = 1" for n in range(900)),
    "one word": "a" * 99_000,
    "quotes": '"' * 99_000,
    "large": "# " + "x" * 200_000,
}


@pytest.mark.parametrize("name", HOSTILE_TOML)
def test_toml_made_to_take_long_is_refused_at_once(tmp_path, name):
    path = tmp_path / "x.toml"
    path.write_text(HOSTILE_TOML[name])
    began = time.process_time()  # others may keep the machine busy
    with pytest.raises(DmlError, match=r"x.toml is not"):
        toml.read(path)
    assert time.process_time() - began < 1


def test_a_configuration_without_end_is_refused():
    with pytest.raises(DmlError, match=r"/dev/zero is not a configuration"):
        toml.read(Path("/dev/zero"))


def test_a_setting_that_is_nested_too_deeply_is_a_text():
    assert toml.parse_value("[" * 40_000).startswith("[[")


def test_ordinary_names_and_texts_may_hold_dots():
    assert toml.parse('a.b."c.d".e = "1.2.3, and so on... 1.5"\n[x.y]\nz = [0.5, 1.5]')["x"]["y"]


@pytest.mark.parametrize(("word", "flip"), [("False", False), ("True", True), ("true", True)])
def test_settings_take_true_and_false_in_pythons_spelling_too(word, flip, dmltool):
    done = dmltool("train", "--set", f"input.flip={word}", "--dry-run")
    assert tomllib.loads(done.stdout)["input"]["flip"] is flip
