"""Imports point one way, cli -> exporter -> trainer -> retrieval; `retrieval` needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Imported when ranks are counted by torch.
USE_TORCH = {f"retrieval.ranking.backends.{name}" for name in ("torch", "trial")}
LAYERS = ["retrieval", "trainer", "exporter", "cli"]  # a layer may import itself and those before


def modules(layer: str) -> list[Path]:
    return [ROOT / "cli.py"] if layer == "cli" else sorted((ROOT / layer).rglob("*.py"))


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_downward(layer):
    above = set(LAYERS[LAYERS.index(layer) + 1 :])
    for path in modules(layer):
        assert not imported(path) & above, f"{path} imports a layer above it"


def test_errors_module_imports_nothing_of_ours():
    assert not imported(ROOT / "retrieval" / "errors.py") & set(LAYERS)


def test_importing_all_of_retrieval_never_loads_torch():
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules("retrieval")
    } - USE_TORCH
    code = "import importlib, sys\n" + "".join(
        f"importlib.import_module({name.removesuffix('.__init__')!r})\n" for name in names
    )
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_modules_that_windows_lacks_are_never_needed_to_import_ours():
    """They stand behind a look at `sys.platform`, or in the function that needs them."""
    for path in (path for layer in LAYERS for path in modules(layer)):
        for node in ast.parse(path.read_text()).body:
            names = {alias.name for alias in getattr(node, "names", ())}
            lacking = {"fcntl", "resource", "termios", "pwd", "grp"}
            assert not (isinstance(node, ast.Import) and names & lacking), f"{path} needs {names}"
