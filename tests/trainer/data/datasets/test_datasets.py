"""The table of data sets, and what holds for each of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from retrieval.errors import DmlError
from retrieval.metrics import BEFORE_RECORDED
from trainer.data.datasets import DATASETS, cars, cub, inshop, load, options_of, sop

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("entry", DATASETS, ids=lambda entry: entry.name)
def test_every_entry_has_a_reader_with_options_and_a_summary(entry):
    assert entry.summary
    assert isinstance(options_of(entry.name), dict)
    assert DATASETS.find(entry.name) is entry


def test_the_table_and_all_readers_load_neither_torch_nor_matplotlib():
    names = [entry.name for entry in DATASETS]
    code = f"""
import sys
from trainer.data.datasets import options_of
import trainer.data.images
for name in {names}: options_of(name)
sys.exit(any(m in sys.modules for m in ("torch", "matplotlib", "scipy")))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_an_unknown_data_set_names_the_nearest():
    with pytest.raises(DmlError) as caught:
        load("folders", "somewhere")
    assert "Did you mean 'folder'?" in caught.value.fix
    assert "cub" in caught.value.why


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(DmlError) as caught:
        load("folder", "somewhere", test_fracton=0.5)
    assert "test_fracton" in caught.value.what
    assert "Did you mean 'test_fraction'?" in caught.value.fix


@pytest.mark.parametrize("entry", [e for e in DATASETS if e.needs_root], ids=lambda e: e.name)
def test_a_missing_root_is_said_plainly(entry, tmp_path):
    with pytest.raises(DmlError, match="needs to know where its files are"):
        load(entry.name)
    with pytest.raises(DmlError, match=r"There is no (folder|table) .*nothing-here"):
        load(entry.name, tmp_path / "nothing-here")


@pytest.mark.parametrize("entry", [e for e in DATASETS if e.needs_root], ids=lambda e: e.name)
def test_an_empty_folder_is_an_error_that_says_what_is_wanted(entry, tmp_path):
    with pytest.raises(DmlError) as caught:
        load(entry.name, tmp_path)
    assert str(tmp_path) in caught.value.what
    assert caught.value.fix


def test_a_data_set_without_files_refuses_a_root(tmp_path):
    with pytest.raises(DmlError, match="reads no files") as caught:
        load("glyphs", tmp_path)
    assert caught.value.why.startswith("`dmltool list datasets` says of it: letters drawn")


@pytest.mark.parametrize("module", [cub, cars, sop, inshop])
def test_expected_counts_add_up_to_the_published_totals(module):
    totals = {"cub": 11_788, "cars": 16_185, "sop": 120_053, "inshop": 52_712}
    name = module.__name__.rpartition(".")[2]
    assert sum(images for images, _ in module.EXPECTED.values()) == totals[name]


def test_older_files_of_a_data_set_have_the_k_that_it_has_now():
    """Files record K; those that were written before name only their data set."""
    now = {entry.name: entry.recall_at for entry in DATASETS if entry.recall_at}
    assert now == BEFORE_RECORDED
