"""python -m tests.compile: compile the loops, which each process of the tests would else do first.

The code is kept beside the sources. `make test` does this while the sources are checked.
"""

import contextlib
import tempfile
from pathlib import Path

from tests.golden.cases import CASES

if __name__ == "__main__":
    for name, case in CASES.items():
        if not name.startswith(("trained", "exported")):
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                case(Path(folder))
