"""Imports point one way, cli -> exporter -> trainer -> retrieval; `retrieval` needs no torch.

Tests mirror the packages file by file.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Imported when ranks are counted by torch.
USE_TORCH = {f"retrieval.ranking.backends.{name}" for name in ("products", "torch", "trial")}
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


# Cycles, of which no module and no room could be understood or tested without the others.


def graph() -> dict[str, set[str]]:
    """The modules that each module imports anywhere, or names in a string as a table does.

    What is imported for a type checker alone does not count.
    """
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for layer in LAYERS
        for path in modules(layer)
    }
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        names, left = set(), [ast.parse(path.read_text())]
        while left:
            node = left.pop()
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                left += node.orelse
                continue
            left += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inside = f"{node.module}.{alias.name}"
                    names.add(inside if inside in paths else node.module)
            elif isinstance(node, ast.Constant) and "." in str(node.value):
                names.add(str(node.value).partition(":")[0])
        found[module] = (names & paths.keys()) - {module}
    return found


def cycles(imports: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """The largest groups of modules that all need one another, directly or through others."""
    reach = {module: set(others) for module, others in imports.items()}
    for middle in reach:
        for others in reach.values():
            if middle in others:
                others |= reach[middle]
    return {
        tuple(sorted({module} | {other for other in others if module in reach[other]}))
        for module, others in reach.items()
        if module in others
    }


def test_cycles_are_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {("a", "b", "c")}
    imports = graph()
    assert "retrieval.remote.cache" in imports["retrieval.loading.sources"]  # in a function
    assert "trainer.losses.ce" in imports["trainer.losses"]  # in a string
    assert "retrieval.resources" not in imports["retrieval.files"]  # for a type checker


def test_no_modules_import_one_another_in_a_cycle():
    assert not cycles(graph())


def room_of(module: str) -> str:
    """The folder of a package that holds the module; a module beside the folders is its own."""
    package, *inside = module.split(".")
    alone = not inside or (ROOT / package / f"{inside[0]}.py").exists()
    return module if alone else f"{package}.{inside[0]}"


def rooms(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The rooms that the modules of each room import."""
    found: dict[str, set[str]] = {room_of(module): set() for module in imports}
    for module, others in imports.items():
        found[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    return found


def test_no_rooms_import_one_another_in_a_cycle():
    assert room_of("retrieval.ranking.backends.numpy") == room_of("retrieval.ranking")
    assert room_of("retrieval.problem") != room_of("retrieval.metrics")
    assert "retrieval.ranking" in rooms(graph())["retrieval.evaluation"]
    assert not cycles(rooms(graph()))


# Tests mirror the packages: what `retrieval/checks.py` does is tested in
# `tests/retrieval/test_checks.py`. What a package as a whole does, or its `__init__.py`, is tested
# in a file with the name of the package, in its folder or beside it.

ELSEWHERE = {
    "retrieval/__init__.py": "Public names are tested in tests/test_public.py.",
    "trainer/__init__.py": "Public names are tested in tests/test_public.py.",
    "exporter/__init__.py": "Public names are tested in tests/test_public.py.",
    "retrieval/ranking/backends/__init__.py": "It holds types and no code.",
    "retrieval/run_files.py": "It holds names and no code.",
    "trainer/networks/entry.py": "It holds types, which test_backbones.py and others use.",
    "trainer/trackers/tracker.py": "It holds an interface and no code.",
    "trainer/run/watch.py": "Its methods do nothing; the display that has them is tested.",
}


def places(module: Path) -> list[Path]:
    """The files that may hold the tests of a module, from the root."""
    folder = "tests" / module.parent
    if module.stem != "__init__":
        return [folder / f"test_{module.stem}.py"]
    return [place / f"test_{folder.name}.py" for place in (folder, folder.parent)]


def has_code(path: Path) -> bool:
    """Whether there is more than a docstring, imports and constants."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) for node in ast.parse(path.read_text()).body)


def mirrored_modules() -> list[Path]:
    """All modules of the packages, from the root; of the `__init__.py` those with code."""
    found = [path for layer in LAYERS if layer != "cli" for path in modules(layer)]
    return [path.relative_to(ROOT) for path in found if path.stem != "__init__" or has_code(path)]


def test_every_module_has_a_test_file_of_its_name():
    missing = {
        module.as_posix()
        for module in mirrored_modules()
        if not any((ROOT / place).exists() for place in places(module))
    }
    wrong = sorted(missing ^ ELSEWHERE.keys())
    assert not wrong, f"without a test file, or in ELSEWHERE with one: {', '.join(wrong)}"


def test_every_test_file_is_named_after_a_module():
    strangers = []
    for layer in LAYERS:
        for path in sorted((ROOT / "tests" / layer).rglob("test_*.py")):
            name, folder = path.stem.removeprefix("test_"), path.relative_to(ROOT / "tests").parent
            known = [folder / f"{name}.py", folder / name / "__init__.py"]
            if folder.name == name:  # the package of the folder itself
                known.append(folder / "__init__.py")
            if not any((ROOT / module).exists() for module in known):
                strangers.append(path.relative_to(ROOT).as_posix())
    assert not strangers, f"no module has the name of {', '.join(strangers)}"
