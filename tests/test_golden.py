"""Results as they were recorded: a change of structure must not change a number."""

import json
import math

import pytest

from retrieval.ranking.backends.choice import VARIABLE
from retrieval.ranking.backends.torch import TorchBackend
from tests.golden.cases import CASES, MEASURED, machine
from tests.golden.record import RESULTS

COUNTED = (
    "leave_one_out_with_duplicates_and_zeros",
    "ties_in_plenty",
    "integers_of_eight_bits",
    "double_precision",
    "query_and_gallery_with_ties",
    "sampled_queries",
    "comparison",
)
RECORDED = json.loads(RESULTS.read_text())


def assert_alike(found, recorded, close, where=""):
    """Equal in every digit or, where `close`, up to what the processor decides."""
    if isinstance(recorded, dict):
        assert found.keys() == recorded.keys(), where
        for key in recorded:
            assert_alike(found[key], recorded[key], close, f"{where}.{key}")
    elif isinstance(recorded, list):
        assert len(found) == len(recorded), where
        for n, (a, b) in enumerate(zip(found, recorded, strict=True)):
            assert_alike(a, b, close, f"{where}[{n}]")
    elif isinstance(recorded, float) and close:
        assert math.isclose(found, recorded, rel_tol=1e-3, abs_tol=1e-3), where
    elif not (close and where.endswith(".sha256")):
        assert found == recorded, where


def test_torch_counts_what_is_recorded(tmp_path, monkeypatch):
    """What counts on a GPU gives the same digits as the CPU; here torch is tried on a CPU."""
    monkeypatch.setenv(VARIABLE, "torch")
    used, count = [], TorchBackend.count
    monkeypatch.setattr(TorchBackend, "count", lambda *given: used.append(1) or count(*given))
    for name in COUNTED:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        found = json.loads(json.dumps(CASES[name](folder)))
        assert_alike(found, RECORDED["results"][name], close=False)
        assert used, name
        used.clear()


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_recorded(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(json.dumps(CASES[name](tmp_path)))
    close = name in MEASURED and machine() != RECORDED["machine"]
    assert_alike(found, RECORDED["results"][name], close)
