"""Errors say what happened, why, and what to do."""

import re
import tomllib
from errno import EIO, EMFILE, ENOSPC, EROFS
from pathlib import Path

from retrieval.errors import DmlError, damaged, install, listed, remedy

ROOT = Path(__file__).parents[2]


def test_an_error_reads_as_what_why_and_fix_without_what_is_missing():
    error = DmlError("It failed.", "It is Monday.", "Wait.")
    assert (error.what, error.why, error.fix) == ("It failed.", "It is Monday.", "Wait.")
    assert str(error) == "It failed.\nIt is Monday.\nWait."
    assert str(DmlError("It failed.", fix="Wait.")) == "It failed.\nWait."
    assert str(damaged("It is short.")).endswith(".\nCopy or write the file again.")


def test_the_extras_that_errors_advise_to_install_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sources = [
        path
        for name in ("retrieval", "trainer", "exporter")
        for path in (ROOT / name).rglob("*.py")
    ]
    advised = {
        extra
        for path in [*sources, ROOT / "cli.py"]
        for extra in re.findall(r"""\binstall\(["'](\w+)["']\)""", path.read_text())
    }
    assert {"cpu", "gpu"} <= advised <= project["optional-dependencies"].keys()
    for extra in advised:
        assert f'".[{extra}]"' in install(extra)


def test_what_to_do_about_an_error_of_the_system_depends_on_the_error():
    told = {number: remedy(OSError(number, "no")) for number in (ENOSPC, EROFS, EMFILE, EIO)}
    assert "room" in told[ENOSPC]
    assert "permissions" in told[EROFS]
    assert "ulimit -n" in told[EMFILE]
    assert "disk" in told[EIO]


def test_long_lists_are_cut_and_say_how_many_more_there_are():
    assert listed(range(3), 3) == "0, 1, 2"
    assert listed(range(1003), 2) == "0, 1 and 1,001 more"
    assert listed("abc", 1, "\n") == "a\nand 2 more"
    assert listed([]) == ""
    assert listed([3, 4], 2, count=10**15) == "3, 4 and 999,999,999,999,998 more"
