"""python -m benchmarks.size: the size of the code and of its tests, to RESULTS.md.

`--dry` records nothing.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

import numpy as np

from benchmarks.measure import record, table

ROOT = Path(__file__).parents[1]
PACKAGES = ("cli.py", "retrieval", "trainer", "exporter")
BEFORE = (926, 8083, 5499, 3397, 17905, 147, 35, 41, 1155)
"""What `sizes` gives for the code before it was sorted into rooms."""
COMMAND = "dmltool eval x.npy --labels l.txt"
METHOD = f"""\
The product code is `cli.py`, `retrieval`, `trainer` and `exporter`. A line of code holds something
besides comments and docstrings. A test function is one whose name begins with `test_`. Python's
profiler counts the files with a function that `{COMMAND}` calls, for
1,000 vectors of 100 classes, with MAP@R and NMI. The first column is the state before the code was
sorted into rooms, when the golden results were recorded. The goals were a tenth fewer lines, and
18 files. Neither is reached. `python -m benchmarks.size` counts again.
"""
QUIET = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
PROFILED = """
import ast, sys, threading
called = set()
def look(frame, event, _):
    called.add((frame.f_code.co_filename, frame.f_code.co_name))
threading.setprofile(look)
sys.setprofile(look)
from cli import main
main(sys.argv[2:], standalone_mode=False)
sys.setprofile(None)
def functions(path):
    return {n.name for n in ast.walk(ast.parse(open(path).read())) if type(n) is ast.FunctionDef}
files = {m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)}
own = [path for path in files if path.startswith(tuple(sys.argv[1].split(",")))]
needed = [path for path in own if functions(path) & {name for file, name in called if file == path}]
print(len(needed), len(own))
"""


def sources(name: str) -> list[Path]:
    path = ROOT / name
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def lines_of_code(path: Path) -> int:
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        text_alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text_alone and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in QUIET:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def count_tests() -> int:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("*.py"))
    names = [n.name for t in trees for n in ast.walk(t) if isinstance(n, ast.FunctionDef)]
    return sum(name.startswith("test_") for name in names)


def files_of_eval() -> list[int]:
    """How many of our files have a function that `eval` calls, and how many it imports."""
    labels = np.arange(1000) % 100
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", np.random.default_rng(0).standard_normal((1000, 32)))
        np.savetxt(f"{folder}/l.txt", labels, "%d")
        places = ",".join(str(ROOT / name) for name in PACKAGES)
        arguments = ("eval", f"{folder}/x.npy", "--labels", f"{folder}/l.txt")
        line = [sys.executable, "-c", PROFILED, places, *arguments]
        printed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [int(number) for number in printed.splitlines()[-1].split()]


def sizes() -> tuple[int, ...]:
    lines = [sum(map(lines_of_code, sources(name))) for name in PACKAGES]
    files = sum(len(sources(name)) for name in PACKAGES)
    return (*lines, sum(lines), files, *files_of_eval(), count_tests())


def main() -> None:
    names = (
        "`cli.py`, lines of code",
        *("`retrieval`", "`trainer`", "`exporter`", "all", "files"),
        f"files with a function that `{COMMAND}` calls",
        *("files that it imports", "test functions"),
    )
    rows = [[n, f"{b:,}", f"{a:,}"] for n, b, a in zip(names, BEFORE, sizes(), strict=True)]
    found = table(["", "before", "now"], rows)
    print(found)
    if "--dry" not in sys.argv:
        record("Size of the code", f"{METHOD}\n{found}")


if __name__ == "__main__":
    main()
