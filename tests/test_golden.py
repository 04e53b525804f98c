"""Results as they were recorded: a change of structure must not change a number.

The file is also the script of several processes: `python test_golden.py FOLDER`.
"""

import json
import math
import os
import sys
from contextlib import chdir, suppress
from pathlib import Path

import numpy as np
import pytest

from retrieval.ranking import nearest_positive, positions, sorted_rows, tiles
from retrieval.ranking.backends import numpy as numpy_backend
from retrieval.ranking.backends.choice import VARIABLE
from retrieval.ranking.backends.torch import TorchBackend
from tests.golden import cases
from tests.golden.cases import CASES, MEASURED, machine
from tests.golden.record import RESULTS
from tests.ranks import together

COUNTED = tuple(name for name in CASES if name not in MEASURED)
OF_ONE_PROCESS = {"merged", "report_view"}  # merge and report refuse several
SHARED = tuple(name for name in COUNTED if name not in OF_ONE_PROCESS)
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


def counted(folder, names=COUNTED):
    """The results of cases that count ranks, each in a folder of its own."""
    found = {}
    for name in names:
        (folder / name).mkdir()
        with chdir(folder / name):
            found[name] = json.loads(json.dumps(CASES[name](folder / name)))
    return found


def assert_as_recorded(found, names=COUNTED):
    assert found.keys() == set(names)
    for name, result in found.items():
        assert_alike(result, RECORDED["results"][name], close=False, where=name)


def test_torch_counts_what_is_recorded(tmp_path, monkeypatch):
    """What counts on a GPU gives the same digits as the CPU; here torch is tried on a CPU."""
    monkeypatch.setenv(VARIABLE, "torch")
    used, count = [], TorchBackend.count
    monkeypatch.setattr(TorchBackend, "count", lambda *given: used.append(1) or count(*given))
    assert_as_recorded(counted(tmp_path))
    assert len(used) >= len(COUNTED)


def test_blocks_of_other_sizes_count_what_is_recorded(tmp_path, monkeypatch):
    sizes, tile_rows = [], numpy_backend.tile_rows
    monkeypatch.setattr(
        numpy_backend, "tile_rows", lambda *given: sizes.append(tile_rows(*given)) or 37
    )
    small = {
        tiles: {"_PAIRS": 5, "_POSTPONED": 7},
        positions: {"_QUERIES": 11, "_COMPARED": 13, "ROOM": 3, "SPARE": 2},
        nearest_positive: {"_LARGE": 1, "_QUERIES": 9, "_MEMBERS": 6, "_TOGETHER": 20},
        sorted_rows: {"_NUMBERS": 64, "_ROWS": 2},
    }
    for module, constants in small.items():
        for name, value in constants.items():
            assert getattr(module, name) > value
            monkeypatch.setattr(module, name, value)
    assert_as_recorded(counted(tmp_path))
    assert min(sizes) > 37


def test_shards_count_what_is_recorded(tmp_path, monkeypatch):
    """Each file of arrays is written as a folder of three files, with the name of the file."""
    write, written = np.savez, []

    def in_shards(name, **arrays):
        Path(name).mkdir()
        for n in range(3):
            part = {key: np.array_split(array, 3)[n] for key, array in arrays.items()}
            write(Path(name) / f"part-{n}.npz", **part)
        written.append(name)

    monkeypatch.setattr(np, "savez", in_shards)
    assert_as_recorded(counted(tmp_path))
    assert len(written) > len(COUNTED) // 2


@pytest.mark.parametrize("size", [2, 3])
def test_processes_count_what_is_recorded(size, tmp_path):
    ranks = together(size, __file__, tmp_path)
    assert [rank.code for rank in ranks] == [0] * size, ranks
    assert_as_recorded(json.loads((tmp_path / "found.json").read_text()), SHARED)


def main(folder):
    """Rank 0 writes the results; the commands of the others print and write nothing."""
    rank = os.environ["RANK"]
    own = folder / rank
    own.mkdir()
    if rank == "0":
        (folder / "found.json").write_text(json.dumps(counted(own, SHARED)))
        return
    cases.scored = lambda *args: cases.call("eval", *args, "--json")  # "", not the JSON of a result
    for name in SHARED:
        with suppress(json.JSONDecodeError, FileNotFoundError), chdir(own):
            CASES[name](own)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_recorded(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(json.dumps(CASES[name](tmp_path)))
    close = name in MEASURED and machine() != RECORDED["machine"]
    assert_alike(found, RECORDED["results"][name], close)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
