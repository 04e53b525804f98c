"""What programs import: `from retrieval import evaluate` and the like."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "retrieval": {
        "DmlError",
        "Embeddings",
        "Settings",
        "Split",
        "compare",
        "evaluate",
        "load",
        "report",
        "save",
    },
    "trainer": {"Config", "Watch", "load_embedder", "train"},
    "exporter": {"Model", "Session", "describe", "embed", "export"},
}
NAMES = [(package, name) for package, names in PACKAGES.items() for name in sorted(names)]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_public_names_are_these(package):
    assert set(importlib.import_module(package).__all__) == PACKAGES[package]


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_a_public_name_is_never_a_module(package, name):
    """Importing a module of the same name would put it in the place of the function."""
    assert not (ROOT / package / name).exists()
    assert not (ROOT / package / f"{name}.py").exists()
    found = getattr(importlib.import_module(package), name)
    assert not isinstance(found, ModuleType)
    assert found.__name__ == name


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_every_parameter_of_a_public_function_is_documented(package, name):
    found = getattr(importlib.import_module(package), name)
    text = inspect.getdoc(found)
    assert text
    if inspect.isfunction(found):
        documented = text[text.index("Parameters\n----------") :].replace(", ", " ").splitlines()
        words = {word for line in documented if not line.startswith(" ") for word in line.split()}
        assert set(inspect.signature(found).parameters) <= words


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_what_programs_get(package):
    """They read the imports under TYPE_CHECKING; programs get what PUBLIC names."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {a.asname: node.module for node in imports for a in node.names if a.asname}
    assert seen == importlib.import_module(package).PUBLIC


def test_importing_a_package_is_light_and_an_unknown_name_is_an_attribute_error():
    code = (
        f"import sys, {', '.join(PACKAGES)}\n"
        "heavy = {'numpy', 'torch', 'onnx', 'rich', 'click'} & set(sys.modules)\n"
        "sys.exit(f'loads {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for package in PACKAGES:
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
            importlib.import_module(package).nothing  # noqa: B018
