"""python -m tests.compile: compile loops and tests, which each process would else do first.

The code is kept beside the sources. `make test` does this while the sources are checked.
"""

import contextlib
import tempfile
from pathlib import Path

from _pytest.assertion import rewrite

from tests.golden.cases import CASES


def compile_tests():
    """Write what pytest makes of the files of tests, where it looks for it."""
    for file in Path(__file__).parent.rglob("*.py"):
        if file.name.startswith("test_") or file.name == "conftest.py":
            folder = rewrite.get_cache_dir(file)
            path = folder / f"{file.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(file, path) is None:
                folder.mkdir(parents=True, exist_ok=True)
                digest, code = rewrite._rewrite_test(file, None)
                rewrite._write_pyc(None, code, digest, path)


if __name__ == "__main__":
    with contextlib.suppress(AttributeError, TypeError):  # another pytest: it does this itself
        compile_tests()
    for name, case in CASES.items():
        if not name.startswith(("trained", "exported")):
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                case(Path(folder))
