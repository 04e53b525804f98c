"""The documentation says what the program does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import FILES, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", FILES)
def test_generated_text_is_up_to_date(name):
    assert (ROOT / name).read_text() == FILES[name](), "run `make docs`"


def snippets(language):
    for page in PAGES:
        for n, text in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)):
            yield pytest.param(text, id=f"{page.name}-{n}")


@pytest.mark.parametrize("code", list(snippets("python")))
def test_python_snippets_run(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_shell_snippets_of_the_readme_run_in_order(tmp_path):
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    lines.sort(key=lambda line: not line.startswith("dmltool demo"))  # it writes the files
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "shop.json").stat().st_size > 0


@pytest.mark.parametrize("loss", ["ce", "spce", "group"])
def test_the_readme_trains_each_loss_on_embedded_data(loss, tmp_path):
    """Its lines as they stand, cut to one epoch of small letters."""
    line = "dmltool train" + (f" --loss {loss}" if loss != "ce" else "")
    assert re.search(rf"^{line} +#", (ROOT / "README.md").read_text(), re.M)
    short = "--epochs 1 --set data.options.size=16 --set input.crop=16 --json"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [Path(sys.executable).parent / "dmltool", *line.split()[1:], *short.split()],
        cwd=tmp_path, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / f"glyphs-{loss}" / "best.pt").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
