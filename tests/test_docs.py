"""The documentation says what the program does: every snippet runs or is parsed, every link leads
somewhere.

```bash and ```python blocks of a page run in order, in one folder that holds photos and the files
of a demo. ```sh lines need a data set, a GPU or minutes: they are parsed only, as are the former,
by the command line itself. The ```py block of docs/onnx.md is tested in
tests/exporter/onnx/test_metadata.py.
"""

import re
import shutil
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from typing import is_typeddict

import click
import numpy as np
import pytest
from click.testing import CliRunner

import exporter.results
import retrieval.results
import trainer.results
from cli import CONTEXT, main
from docs.generate import FILES, ROOT
from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.hdf5.writing import write
from retrieval.metrics import METRICS
from tests.forks import Forked
from tests.pages import BLOCK, README, blocks, commands
from tests.trainer.small import SMALL, draw_pictures
from trainer import losses
from trainer.data import datasets
from trainer.data.datasets import glyphs
from trainer.networks import backbones

PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [
    *PAGES,
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
LANGUAGES = {"bash", "json", "py", "python", "sh", "text", "toml"}
STEP = re.compile(r"# (\S+\.py)\n")  # the first line of a block that belongs into a file
LINK = re.compile(r"\]\(([^)\s]*)(?: \"([^\"]*)\")?\)")
PLAIN = {"cd", "git", "python3.11", "source"}  # commands that nobody doubts

ONE_EPOCH = (*SMALL, "--epochs=1")
LETTERS = (  # and on letters
    *("--epochs", "1", "--device", "cpu"),
    *("--set", "data.options.size=16", "--set", "input.crop=16"),
)


FEWER = 5  # of the letters one in so many


RESULTS = (retrieval.results, trainer.results, exporter.results)
"""The modules whose TypedDicts are printed as JSON."""


def test_the_page_on_json_names_every_key_and_no_other():
    types = [t for module in RESULTS for t in vars(module).values() if is_typeddict(t)]
    keys = {key for t in types for key in t.__annotations__}
    assert {"rows", "epoch", "max_abs"} <= keys
    text = (ROOT / "docs/json.md").read_text()
    named = set(re.findall(r"`([a-z]\w*)`", text))
    assert keys - named == set()
    first = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    listed = {key for cell in first for key in re.findall(r"`([a-z]\w*)`", cell)}
    assert listed - keys - {metric.name for metric in METRICS} == {"tied_queries"}


def test_nothing_advises_to_install_dmltool_by_its_name():
    """It is on no package index: whoever takes the name there would be installed."""
    sources = [
        file
        for folder in ("retrieval", "trainer", "exporter")
        for file in (ROOT / folder).rglob("*.py")
    ]
    for file in [*sources, ROOT / "cli.py", *LINKED]:
        assert not re.search(r"pip install [^\n]*?[\"' ]dmltool\b", file.read_text()), file


@pytest.mark.parametrize("name", FILES)
def test_generated_text_is_up_to_date(name):
    assert (ROOT / name).read_text() == FILES[name](), "run `make docs`"


# What the pages hold


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_a_language_that_is_checked(page):
    assert page.read_text().count("\n```") == 2 * len(blocks(page))
    found = {language for language, _ in blocks(page)}
    assert found <= LANGUAGES
    assert "py" not in found or page.name == "onnx.md"


# Commands exist, with their options and the names they are given


def check(words):
    """Raises for a command that would not start."""
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        parser = get_args_parser()
        parser.allow_abbrev = False
        given = parser.parse_args(words[1:])
        assert (given.module, given.training_script) == (True, "cli"), words
        words = ["dmltool", *given.training_script_args]
    if words[0] == "dmltool":
        check_dmltool(words[1:])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M), words
    elif words[0] == "pip":
        check_pip(words[1:])
    else:
        assert words[0] in PLAIN, words


def check_dmltool(args):
    assert args[0] in main.commands, args[0]
    given = main.commands[args[0]].make_context(args[0], list(args[1:]), **CONTEXT).params
    if args[0] == "train" and not given["resume"] and not given["file"]:
        check_settings(args)


def check_settings(args):
    """The preset, the loss, the data set and the backbone exist, and so do the options of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.trackers.find_spec", bool)  # trackers need not be installed
        done = CliRunner().invoke(main, [*args, "--dry-run"])
    assert done.exit_code == 0, done.output
    config = tomllib.loads(done.stdout)
    losses.build(config["loss"]["name"], 2, 4, **config["loss"]["options"])
    backbones.BACKBONES.find(config["network"]["backbone"])
    known = datasets.options_of(config["data"]["dataset"])
    assert config["data"]["options"].keys() <= known.keys(), known


def check_pip(words):
    assert words[0] == "install", words
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:\.|dmltool)\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), extras
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).exists(), words


def shell_lines():
    for page in PAGES:
        if page.name == "extending.md":
            continue  # what it adds is there in its own test only
        for _, text in blocks(page, "bash", "sh"):
            for words, _ in commands(text):
                yield pytest.param(words, id=f"{page.stem}: {' '.join(words)}")


@pytest.mark.parametrize("words", list(shell_lines()))
def test_every_command_of_a_page_could_start(words):
    check(words)


@pytest.mark.parametrize(
    "line",
    [
        "dmltool evaluate x.h5",
        "dmltool eval",
        "dmltool eval x.h5 --distnce cos",
        "dmltool eval x.h5 --distance euclid",
        "dmltool list loses",
        "dmltool train --preset cub",
        "dmltool train --loss grup",
        "dmltool train --loss pml:NoSuchLoss",
        "dmltool train --dataset birds --data x",
        "dmltool train --backbone resnet5",
        "dmltool train --set optimizer.rate=1",
        "dmltool train --set loss.options.temperature=1",
        "dmltool train --set data.options.sizes=1",
        "torchrun --nproc-per-nod=4 -m cli train",
        "torchrun --nproc-per-node=4 -m cli train --presets sop-ce",
        'pip install ".[cuda]"',
        "make bencmark",
        "dmltol eval x.h5",
    ],
)
def test_a_wrong_line_would_be_noticed(line):
    with pytest.raises((AssertionError, click.UsageError, DmlError, SystemExit)):
        check(next(commands(line))[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_named_in_the_text_exist(page):
    from torch.distributed.run import get_args_parser

    parameters = [p for command in main.commands.values() for p in command.params]
    known = {option for p in parameters for option in (*p.opts, *p.secondary_opts)}
    known |= {option for action in get_args_parser()._actions for option in action.option_strings}
    known |= {"--help", "--version", "--debug"}
    prose = BLOCK.sub("", page.read_text())
    for code in re.findall(r"`([^`\n]+)`", prose):
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", code):
            assert option in known, option
        for name in re.findall(r"^dmltool ([a-z]+)", code):
            assert name in main.commands, code


# Snippets run


def draw_demo(folder):
    """What `dmltool demo` leaves, in small."""
    rng = np.random.default_rng(0)
    labels, names = np.arange(60) % 6, np.array([f"U+{n}" for n in range(6)])
    paths = np.array([f"{n}.png" for n in range(60)])
    for name in ("pixels", "untrained", "ce/embeddings", "spce/embeddings", "group/embeddings"):
        vectors = rng.standard_normal((60, 8), np.float32) + np.eye(6, 8, dtype=np.float32)[labels]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / f"{name}.h5", {"test": Split(vectors, labels, paths)}, names)
    sides = {"query": slice(40), "gallery": slice(40, None)}
    shop = {s: Split(vectors[rows], labels[rows], paths[rows]) for s, rows in sides.items()}
    write(folder / "ce" / "shop.h5", shop, names)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to work in, where there are few letters."""
    monkeypatch.chdir(tmp_path)
    for name in ("TRAIN", "TEST"):
        monkeypatch.setattr(glyphs, name, getattr(glyphs, name)[::FEWER])
    return tmp_path


def shortened(args):
    if args[0] != "train" or "--resume" in args:
        return args
    return [*args, *(ONE_EPOCH if "--data" in args else LETTERS)]


def run_dmltool(args, target=None):
    done = CliRunner().invoke(main, shortened(args))
    assert done.exit_code == 0, f"{args}: {done.output}"
    if target:
        Path(target).write_text(done.stdout)


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if blocks(p, "bash", "python") and p.name != "extending.md"],
    ids=lambda page: page.name,
)
def test_the_snippets_of_a_page_run_in_order(page, place):
    draw_pictures(place / "photos")
    draw_demo(place / "demo")
    names = {"__name__": "snippet"}
    for language, text in blocks(page, "bash", "python"):
        if language == "python":
            exec(compile(text, page.name, "exec"), names)  # the text of our own pages
            continue
        for words, target in commands(text):
            assert words[0] == "dmltool", "put what cannot run into a block of sh"
            run_dmltool(words[1:], target)


def test_the_readme_leads_from_photos_to_a_report():
    (text,) = [text for _, text in blocks(README, "bash") if "--data photos" in text]
    names = [words[1] for words, _ in commands(text)]
    assert names == ["train", "export", "eval", "report"]


@pytest.mark.parametrize("loss", ["ce", "spce", "group"])
def test_the_readme_trains_each_loss_on_embedded_data(loss, place):
    """Its lines as they stand, cut to one epoch of small letters."""
    line = "dmltool train" + (f" --loss {loss}" if loss != "ce" else "")
    assert re.search(rf"^{line} +#", README.read_text(), re.M)
    run_dmltool(line.split()[1:])
    assert (place / "runs" / f"glyphs-{loss}" / "best.pt").exists()


def test_the_steps_of_extending_work_on_a_copy(tmp_path):
    """Its files are written, its lines appended, its snippets run, all in a copy of dmltool."""
    for name in ("retrieval", "trainer", "exporter"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "cli.py", tmp_path)
    with (tmp_path / "trainer" / "data" / "datasets" / "glyphs.py").open("a") as file:
        file.write(f"\nTRAIN, TEST = TRAIN[::{FEWER}], TEST[::{FEWER}]\n")
    for language, text in blocks(ROOT / "docs" / "extending.md", "bash", "python"):
        step = STEP.match(text)
        if step:
            with (tmp_path / step[1]).open("a") as file:
                file.write(f"\n\n{text}")
        elif language == "python":
            run_copy(tmp_path, "-c", text)
        else:
            for words, _ in commands(text):
                run_copy(tmp_path, "-m", "cli", *shortened(words[1:]))
    assert (tmp_path / "runs" / "prototype" / "best.pt").exists()
    assert (tmp_path / "runs" / "patches" / "lines.txt").read_text().count("loss")


# Libraries stay loaded, our own modules are those of the copy.
FRESH = """
import importlib, sys
own = ("cli", "exporter", "retrieval", "tests", "trainer")
for name in [name for name in sys.modules if name.partition(".")[0] in own]:
    del sys.modules[name]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.path[:0] = [{folder!r}]
importlib.invalidate_caches()
"""


def run_copy(folder, *args):
    kind, name, *rest = args
    if kind == "-m":
        name = f"import runpy\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    code = FRESH.format(folder=str(folder)) + name
    ended, told, errors = Forked("-c", code, *rest, cwd=folder).end()
    assert ended == 0, f"{args}: {told}{errors}"


# Links


def anchors(page):
    """As GitHub makes them of headings: without marks, spaces become hyphens."""
    found = []
    for title in re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return found


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link, title in LINK.findall(BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue  # of the web: asking it is no test
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
        if target.suffix == ".py" and title:  # the title names what is there
            assert re.search(rf"\b{title}\b", target.read_text()), f"{link}: {title}"


# Files of ours


def named_files(text):
    """Paths and names of Python files that stand alone between backticks."""
    return re.findall(r"`([\w/.-]+\.py)`", BLOCK.sub("", text))


def named_objects(text):
    """Dotted names of our modules, and of what is in them, that stand alone between backticks."""
    return re.findall(r"`((?:retrieval|trainer|exporter)(?:\.\w+)+)`", BLOCK.sub("", text))


def is_there(name):
    """A path from the root, or the bare name of a file of the packages."""
    if "/" in name:
        return (ROOT / name).exists()
    folders = [ROOT / package for package in ("retrieval", "trainer", "exporter", "tests")]
    return (ROOT / name).exists() or any(any(folder.rglob(name)) for folder in folders)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_source_files_named_in_the_text_exist(page):
    text = page.read_text()
    shown = re.findall(r"^```python\n# (\S+)/(\w+\.py)$", text, re.M)  # files to be written
    tests = {f"tests/{folder}/test_{name}" for folder, name in shown}
    assert [name for name in named_files(text) if name not in tests and not is_there(name)] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_modules_and_classes_named_in_the_text_exist(page):
    for name in named_objects(page.read_text()):
        resolve_name(name)


def test_a_source_file_that_does_not_exist_would_be_noticed():
    names = named_files(
        "`retrieval/tiles.py` and `tile.py`, but not `tiles.py`\n```py\n`a.py`\n```\n"
    )
    assert [name for name in names if not is_there(name)] == ["retrieval/tiles.py", "tile.py"]
