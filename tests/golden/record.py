"""Write tests/golden/results.json anew: `python -m tests.golden.record [CASE...]`."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

from tests.golden.cases import CASES, MEASURED, machine

RESULTS = Path(__file__).with_name("results.json")


def main(chosen: list[str]) -> None:
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() and chosen else {}
    found = old.get("results", {})
    for name in chosen or CASES:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            found[name] = CASES[name](Path(folder))
        print(name, file=sys.stderr)
    # The machine is that of the results that depend on it; those are recorded together.
    here = old["machine"] if old and not MEASURED & set(chosen) else machine()
    content = {"machine": here, "results": found}
    RESULTS.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
