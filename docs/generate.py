"""Write the parts of the documentation that come from the code: `python -m docs.generate`.

These are the references of commands, settings and losses, tables in other pages, and the
measurements in recipes and studies. tests/test_docs.py compares the pages with what this module
writes.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import click

from benchmarks import studies
from benchmarks.scale import scale_tables
from cli import CONTEXT, main
from retrieval.evaluation import Settings
from retrieval.formats import FORMATS
from retrieval.metrics import METRICS
from trainer import toml
from trainer.config import Config
from trainer.losses import LOSSES, PML, options_of
from trainer.losses.miners import MINERS
from trainer.resolve import preset_names, resolve

ROOT = Path(__file__).parent.parent
WIDTH = 30
"""Columns of the names in the tree of files."""


def cli_reference() -> str:
    """The help of every command, as `dmltool COMMAND --help` prints it."""
    parts = [
        "# Command line\n\nThe help of every command. Generated from the code by `make docs`.\n"
    ]
    commands = {"": main} | {f" {name}": command for name, command in main.commands.items()}
    for name, command in commands.items():
        context = click.Context(command, info_name=f"dmltool{name}", terminal_width=80, **CONTEXT)
        parts.append(f"## dmltool{name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def formats_table() -> str:
    lines = ["| file | what is read |", "|---|---|"]
    for entry in FORMATS:
        if not entry.labels_only:
            lines.append(f"| {', '.join(f'`{s}`' for s in entry.suffixes)} | {entry.summary} |")
    only = [f"`{s}`" for entry in FORMATS if entry.labels_only for s in entry.suffixes]
    lines.append(f"| {', '.join(only)} | labels, for `--labels` and `--gallery-labels` |")
    return "\n".join(lines) + "\n"


def presets_table() -> str:
    lines = [
        "| preset | network | loss | batch | optimiser | epochs |",
        "|---|---|---|---|---|---|",
    ]
    for name in preset_names():
        config, _ = resolve(name, None, {})
        cells = (_network(config), _loss(config), _batch(config), _optimizer(config))
        lines.append(f"| `{name}` | {' | '.join(cells)} | {_epochs(config)} |")
    return "\n".join(lines) + "\n"


def _network(config: Config) -> str:
    network, size = config.network, config.input.crop
    parts = [f"{network.backbone}, {size}x{size}"]
    parts += [f"{network.dim} dimensions"] * bool(network.dim)
    parts += ["BatchNorm on the embedding"] * network.batchnorm
    return ", ".join(parts)


def _loss(config: Config) -> str:
    options = (f"{key} {value}" for key, value in config.loss.options.items())
    return ", ".join([f"`{config.loss.name}`", *options])


def _batch(config: Config) -> str:
    batches = config.batches
    return f"{batches.classes}x{batches.images}" if batches.classes else f"{batches.size} random"


def _optimizer(config: Config) -> str:
    optimizer = config.optimizer
    parts = [f"{optimizer.name}, lr {optimizer.lr:g}"]
    parts += [f"momentum {optimizer.momentum:g}"] * bool(optimizer.momentum)
    parts += [f"decay {optimizer.weight_decay:g}"] * bool(optimizer.weight_decay)
    parts += [f"head {optimizer.loss_lr:g} times"] * (optimizer.loss_lr != 1)
    return ", ".join(parts)


def _epochs(config: Config) -> str:
    schedule, first = config.schedule, config.phase.epochs
    parts = [f"{schedule.epochs}", schedule.name]
    parts += [f"x {schedule.factor:g} after {milestone}" for milestone in schedule.milestones]
    parts += [f"warm-up {schedule.warmup} steps"] * bool(schedule.warmup)
    parts += [f"first {first} epochs classification"] * bool(first)
    return ", ".join(parts)


def scores_table() -> str:
    lines = ["| key | interval | what it is |", "|---|---|---|"]
    for metric in METRICS:
        span = "" if metric.reads == "clusters" else f"`{metric.name}_ci`"
        title = metric.title.format(k="K") + (", by K" if metric.at_k else "")
        lines.append(f"| `{metric.name}` | {span} | {title}: {metric.help} |")
    tied = "how many queries have a negative exactly as near as their nearest positive"
    return "\n".join([*lines, f"| `tied_queries` | | {tied} |"]) + "\n"


READS = {
    "ranks": ("ranks (Q,), 0 without positives; K as well with `at_k=True`", "(Q,)"),
    "positions": ("`PositivePositions`: where the positives of each query are", "(Q,)"),
    "clusters": ("labels (N,) and the k-means cluster of each item (N,)", "a float"),
}


def metrics_table() -> str:
    lines = ["| reads | takes | returns | metrics |", "|---|---|---|---|"]
    for reads, (takes, returns) in READS.items():
        titles = [metric.title.format(k="K") for metric in METRICS if metric.reads == reads]
        lines.append(f"| `{reads}` | {takes} | {returns} | {', '.join(titles)} |")
    return "\n".join(lines) + "\n"


def measured(title: str) -> str:
    """The first table below a heading of benchmarks/RESULTS.md."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if section is None:
        return "Not measured yet.\n"
    rows = re.search(r"(^\|.*\n)+", section[1], re.M)[0]
    link = f"../benchmarks/RESULTS.md#{title.lower().replace(' ', '-')}"
    return f"{rows}\n[How it was measured]({link}).\n"


def filled(page: str, **tables: str) -> str:
    """The page, each text between the two comments that name it."""
    text = (ROOT / page).read_text()
    for name, table in tables.items():
        begin, end = f"<!-- {name}: generated by docs/generate.py -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table + end + rest.split(end, 1)[1]
    return text


def evaluation_settings() -> str:
    """The fields of `retrieval.Settings` with their defaults."""
    texts = field_texts(ROOT / "retrieval" / "evaluation.py")["Settings"]
    rows = (
        f"| `{f.name}` | `{getattr(Settings(), f.name)!r}` | {texts[f.name]} |"
        for f in fields(Settings)
    )
    return "\n".join(["| field | default | meaning |", "|---|---|---|", *rows]) + "\n"


def recipes() -> str:
    found = {title: measured(title) for title in ("Learning letters", "Omniglot", "Fashion-MNIST")}
    return filled("docs/recipes.md", presets=presets_table(), **found)


def settings() -> str:
    """Every key of a configuration with its default and the text below it in trainer/config.py."""
    parts = [
        "# Settings of a run\n",
        "This page is for users of `dmltool train`. It lists all settings with their defaults.",
        "Presets and TOML files for `--config` have the same tables and keys. Change a setting",
        "with `--set table.key=value`. Generated from trainer/config.py by `make docs`.\n",
    ]
    texts = field_texts(ROOT / "trainer" / "config.py")
    for name, table in Config().to_dict().items():
        rows = ["| key | default | meaning |", "|---|---|---|"]
        owner = type(getattr(Config(), name)).__name__
        rows += [
            f"| `{key}` | `{toml.render(value)}` | {texts[owner].get(key, '')} |"
            for key, value in table.items()
        ]
        parts.append(f"## {name}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def field_texts(path: Path) -> dict[str, dict[str, str]]:
    """Class -> field -> the string that follows it."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            pairs = zip(node.body, node.body[1:], strict=False)
            found[node.name] = {
                field.target.id: " ".join(text.value.value.split())
                for field, text in pairs
                if isinstance(field, ast.AnnAssign)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            }
    return found


def loss_reference() -> str:
    """The table of losses, with the options of our own."""
    parts = [
        "# Losses\n",
        "This page is for users of `dmltool train`. It lists all losses with their options.",
        "Choose a loss with `--loss NAME` and set its options with",
        "`--set loss.options.KEY=VALUE`. The [recipes](recipes.md) have formulas. Other loss",
        "classes of pytorch-metric-learning are available as `--loss pml:NAME`. With every loss,",
        "`--set loss.length=16` first scales embeddings to the length 16, for l2-normalised",
        "training. Generated by `make docs`.\n",
        "| name | meaning | options and defaults |",
        "|---|---|---|",
    ]
    for entry in LOSSES:
        options = {k: v for k, v in entry.defaults.items() if k != "loss"}
        if entry.path != PML:
            options = {k: p.default for k, p in options_of(entry.load()).items()}
        shown = ", ".join(f"`{key} = {toml.render(value)}`" for key, value in options.items())
        if entry.path == PML:
            shown = f"those of `{entry.defaults['loss']}`" + (f"; {shown}" if shown else "")
        parts.append(f"| `{entry.name}` | {entry.summary} | {shown or 'none'} |")
    return "\n".join([*parts, *miner_reference()]) + "\n"


def miner_reference() -> list[str]:
    """The table of miners."""
    lines = [
        "\n## Miners\n",
        "A miner chooses the pairs or triplets of a batch that a loss sees, for example",
        "`--loss triplet --miner semihard`. Losses that compare pairs or triplets accept a miner:",
        "`contrastive`, `triplet`, `margin`, `multi_similarity` and others of",
        "pytorch-metric-learning. Set its options with `--set loss.miner_options.KEY=VALUE`.",
        "Other miner classes of pytorch-metric-learning are available as `--miner pml:NAME`. The",
        "[recipes](recipes.md#losses) say which losses and miners make up published methods.\n",
        "| name | chooses | options |",
        "|---|---|---|",
    ]
    for entry in MINERS:
        options = {k: v for k, v in entry.defaults.items() if k != "miner"}
        shown = "".join(f"; `{key} = {toml.render(value)}`" for key, value in options.items())
        own = f"those of `{entry.defaults['miner']}`{shown}"
        lines.append(f"| `{entry.name}` | {entry.summary} | {own} |")
    return lines


def tree() -> str:
    """Every file of the packages with the first line of its docstring."""
    lines = []
    for room in ("cli.py", "retrieval", "trainer", "exporter"):
        for path in [ROOT / room] if room.endswith(".py") else _in_order(ROOT / room):
            if path.name == "__init__.py":
                continue
            indent = "    " * (len(path.relative_to(ROOT).parts) - 1)
            room_of = path / "__init__.py" if path.is_dir() else path
            name = indent + path.name + "/" * path.is_dir()
            lines.append(f"{name:{WIDTH}} {_summary(room_of)}")
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


def _in_order(folder: Path) -> list[Path]:
    """The folder itself, its files, and the rooms in it."""
    inside = [path for path in sorted(folder.iterdir()) if not path.name.startswith(("_", "."))]
    rooms = [path for path in inside if (path / "__init__.py").exists()]
    files = [path for path in inside if path.suffix == ".py"]
    return [folder, *files, *(path for room in rooms for path in _in_order(room))]


def _summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


FILES = {
    "docs/architecture.md": lambda: filled("docs/architecture.md", tree=tree()),
    "docs/cli.md": cli_reference,
    "docs/settings.md": settings,
    "docs/losses.md": loss_reference,
    "docs/recipes.md": recipes,
    "docs/studies.md": lambda: filled("docs/studies.md", **studies.tables()),
    "docs/json.md": lambda: filled("docs/json.md", scores=scores_table()),
    "docs/python.md": lambda: filled("docs/python.md", settings=evaluation_settings()),
    "docs/extending.md": lambda: filled("docs/extending.md", metrics=metrics_table()),
    "docs/scale.md": lambda: filled("docs/scale.md", scale=scale_tables()),
    "README.md": lambda: filled("README.md", formats=formats_table()),
}

if __name__ == "__main__":
    for name, make in FILES.items():
        (ROOT / name).write_text(make())
