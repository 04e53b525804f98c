"""The doctor tries things, and names what to install."""

import builtins
import io
import json
import re
import sys
from functools import cache
from pathlib import Path

import jinja2
import pytest
from click.testing import CliRunner
from rich.console import Console

from cli import main
from exporter import doctor


def by_name(checks):
    return {check.name: check for check in checks}


@pytest.fixture(autouse=True, scope="module")
def measured_once():
    """The size of a package is found once: a look at each file of torch for every test is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "_size", cache(doctor._size))
        yield


@pytest.fixture
def without(monkeypatch):
    """Makes modules as if they were not installed."""

    def hide(*names):
        real = builtins.__import__

        def refuse(name, *args, **kwargs):
            if name.split(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
            return real(name, *args, **kwargs)

        def refuse_import(name, package=None):
            if name.split(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
            return real_import(name, package)

        real_import = doctor.import_module
        monkeypatch.setattr(builtins, "__import__", refuse)
        monkeypatch.setattr(doctor, "import_module", refuse_import)
        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)

    return hide


def test_everything_is_ready_where_the_tests_run(tmp_path):
    checks = doctor.examine(tmp_path)
    found = by_name(checks)
    assert doctor.ready(checks)
    assert found["torch"].state == doctor.OK
    assert "train" in found["torch"].found or "CUDA" in found["torch"].found
    assert found["used"].found.startswith(("CPU", "CUDA"))
    assert found["faiss"].found
    assert "models" in found["torchvision"].found
    assert str(tmp_path) in found["disk"].found


def test_packages_are_shown_with_their_size_on_disk(tmp_path):
    checks = doctor.examine(tmp_path)
    package = Path(jinja2.__file__).parent
    inside = sum(file.stat().st_size for file in package.rglob("*") if file.is_file())
    assert by_name(checks)["jinja2"].size == pytest.approx(inside, rel=0.1)
    console = Console(width=80, file=io.StringIO())
    console.print(doctor.table(checks))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"torch +[\d,]+ MB", shown)


@pytest.mark.parametrize("module", ["torch", "onnx", "matplotlib"])
def test_what_the_quick_start_needs_is_missing(module, without, tmp_path):
    without(module)
    checks = doctor.examine(tmp_path)
    assert not doctor.ready(checks)
    check = by_name(checks)[module]
    assert check.state == doctor.MISSING
    assert "pip install" in check.fix


def test_gpus_are_tried_for_counting_ranks(monkeypatch):
    from retrieval.ranking.backends import trial

    monkeypatch.setattr(trial, "fault_of", lambda name, dim: None)
    assert doctor._ranks_on(2) == "counts ranks as the CPU"
    monkeypatch.setattr(trial, "fault_of", lambda name, dim: "is off" if name == "cuda:1" else None)
    assert doctor._ranks_on(2) == "does not count ranks (cuda:1: is off)"


@pytest.mark.parametrize("module", ["faiss", "timm"])
def test_what_can_be_done_without_is_said_and_no_more(module, without, tmp_path):
    without(module)
    checks = doctor.examine(tmp_path)
    assert doctor.ready(checks)
    check = by_name(checks)[module]
    assert check.found == "not installed"
    assert "pip install" in check.fix


def test_a_missing_reader_is_shown_with_the_files_that_need_it(without, tmp_path):
    without("pyarrow")
    found = by_name(doctor.examine(tmp_path))
    for files in (".parquet .pq .arrow .feather", ".zst"):
        assert found[files].found == "pyarrow not installed"
        assert "[readers]" in found[files].fix


def test_two_builds_of_one_module_are_a_fault(monkeypatch, tmp_path):
    there = {**doctor._modules(), "onnxruntime": ["onnxruntime", "onnxruntime-gpu"]}
    monkeypatch.setattr(doctor, "_modules", lambda: there)
    checks = doctor.examine(tmp_path)
    assert not doctor.ready(checks)
    assert "both installed" in by_name(checks)["onnxruntime"].found


def test_a_library_that_does_not_load_is_broken(monkeypatch, tmp_path):
    real = doctor.import_module

    def fail(name, package=None):
        if name == "onnxscript":
            raise OSError("libfoo.so: cannot open shared object file")
        return real(name, package)

    monkeypatch.setattr(doctor, "import_module", fail)
    checks = doctor.examine(tmp_path)
    assert not doctor.ready(checks)
    check = by_name(checks)["onnxscript"]
    assert (check.state, "libfoo.so" in check.found) == (doctor.BROKEN, True)


def test_a_full_disk_is_not_ready(monkeypatch, tmp_path):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    checks = doctor.examine(tmp_path)
    assert not doctor.ready(checks)
    assert by_name(checks)["disk"].fix


def test_the_command_prints_and_its_exit_code_tells(without):
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "Ready" in result.stdout
    without("onnxscript")
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ready"] is False
    [check] = [check for check in found["checks"] if check["name"] == "onnxscript"]
    assert check["state"] == "missing"


def test_torch_files_are_ticked_only_where_torch_is_installed(tmp_path, without):
    assert by_name(doctor.examine(tmp_path))[".pt .pth"].state == doctor.OK
    without("torch")
    found = by_name(doctor.examine(tmp_path))
    assert ".pt" not in found["built in"].found.split()
    assert found[".pt .pth"].state == doctor.NOTE
    assert "torch not installed" in found[".pt .pth"].found
    assert ".npy" in found["built in"].found.split()
