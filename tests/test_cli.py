"""The command group: help, exit codes, errors, the next step."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import cli
from cli import main
from retrieval.console import warn
from retrieval.errors import DmlError
from tests.commands import call
from tests.trainer.small import SMALL, draw_pictures

pytestmark = pytest.mark.usefixtures("tried")

DMLTOOL = Path(sys.executable).parent / "dmltool"

QUICK = ("--no-nmi", "--no-map")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["eval", "nowhere.h5"], "nowhere.h5"),
        (["eval", "x.npy"], "no labels"),
        (["eval", "x.npy", "--labels", "short.npy"], "59"),
        (["eval", "notes.md"], "notes.md"),
        (["eval", "a.h5", "--out", "no/such/folder.json"], "does not exist"),
        (["eval", "a.h5", "--gallery", "wide.npz"], "dimensions"),
        (["compare", "a.h5", "shop.h5"], "different splits"),
        (["inspect", "."], "."),
    ],
)
def test_mistakes_get_a_clear_message_and_exit_code_1(files, args, message, monkeypatch):
    monkeypatch.chdir(files)
    np.save("short.npy", np.zeros(59, int))
    np.savez("wide.npz", embeddings=np.ones((4, 9)), labels=np.arange(4))
    Path("notes.md").write_text("# notes")
    result = call(*args)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_error_in_code_of_the_users_own_is_not_called_a_bug_of_dmltool(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        "from trainer.losses.base import Loss\n"
        "class Broken(Loss):\n"
        "    def split(self, embeddings, labels):\n"
        "        return {'x': embeddings.no_such_thing}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    draw_pictures(tmp_path / "photos")
    given = (*SMALL, "--loss=my_losses:Broken", "--data", tmp_path / "photos")
    result = call("train", *given, "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "no_such_thing" in result.stderr
    assert "The module my_losses raised it" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["eval"],
        ["eval", "a.h5", "--recall-at", "0"],
        ["eval", "a.h5", "--memory", "lots"],
        ["evil"],
    ],
)
def test_usage_errors_exit_with_2(args):
    assert call(*args).exit_code == 2


def test_a_bug_is_reported_as_one_and_debug_shows_the_traceback(files, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("retrieval.evaluation.score", broken)
    result = call("eval", files / "a.h5")
    assert result.exit_code == 1
    assert "bug" in result.stderr
    with pytest.raises(ZeroDivisionError):
        call("--debug", "eval", files / "a.h5")


@pytest.mark.parametrize("args", [("eval", "a.h5", *QUICK), ("--help",)])
def test_a_full_standard_output_is_not_called_a_bug(files, args):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [DMLTOOL, *args], stdout=full, stderr=subprocess.PIPE, text=True, cwd=files
        )
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "bug" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "kept"), [("0", None), ("-3", None), ("abc", None), ("10", "10")]
)
def test_a_number_of_threads_that_numba_refuses_is_ignored(monkeypatch, given, kept):
    monkeypatch.setenv("NUMBA_NUM_THREADS", given)
    call("list", "losses")
    assert os.environ.get("NUMBA_NUM_THREADS") == kept


def test_messages_are_folded_between_words_on_a_terminal_and_whole_elsewhere(monkeypatch, capsys):
    words = "a message of many words " * 8
    monkeypatch.setenv("COLUMNS", "80")
    warn(words.strip())
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    warn(words.strip())
    error = DmlError(words + "what.", words + "why.", "dmltool " + "--option " * 12)
    cli.show_error(error)
    shown = click.unstyle(capsys.readouterr().err)
    lines = [line for line in shown.splitlines() if "Fix:" not in line]
    assert max(map(len, lines)) <= 80
    assert all(line.startswith(("! ", "  ", "Error: ")) for line in lines)
    assert " ".join(shown.split()).count(words.strip()) == 3
    assert error.fix in shown  # a command can be copied
    cli.show_error(DmlError("What.", "Why.", "Do this\nor do that"))
    assert click.unstyle(capsys.readouterr().err).endswith("  Fix: Do this\n  or do that\n")


def test_the_commands_are_summarised_in_full_at_80_columns():
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).stdout
    listed = re.findall(r"^  ([a-z]+)  +(.*)$", shown[shown.index("\nTrain:") :], re.M)
    assert [name for name, _ in listed] == list(main.commands)
    for name, summary in listed:
        first = main.commands[name].help.split("\n")[0]
        assert summary == first.removesuffix(".") or summary == first


@pytest.mark.parametrize("name", ["", *main.commands])
def test_help_fits_80_columns_and_ends_with_an_example(name):
    shown = CliRunner().invoke(main, [*name.split(), "--help"], terminal_width=80).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"  Examples?:\n    (dmltool|torchrun) ", shown)


def test_the_shell_completes_every_path_and_nothing_else_as_one():
    of_files = re.compile(r"\b(FILE|PATH|RUN|DIR|DIRECTORY|FOLDER|ROOT|DATA|MODEL)\b|^[AB]$")
    for name in main.commands:
        context = click.Context(main.commands[name])
        for option in main.commands[name].params:
            offered = [item.type for item in option.shell_complete(context, "")]
            shown = option.make_metavar(context)
            assert (offered in (["file"], ["dir"])) == bool(of_files.search(shown)), (name, shown)


def test_help_calls_every_whole_number_n():
    for name in main.commands:
        assert "INTEGER" not in main.commands[name].get_help(click.Context(main.commands[name]))


def test_options_take_the_values_of_the_settings_that_they_set():
    """The tables of options and of settings are apart, because settings load torch or NumPy."""
    from exporter.exporting import Settings as Exporting
    from exporter.onnx.metadata import Preprocessing
    from retrieval.evaluation import Settings as Scoring
    from retrieval.reporting.gather import Options as Reporting
    from trainer.config import Data, Input, Run

    tables = {
        "train": (Data, Run),
        "export": (Exporting,),
        "embed": (Exporting, Preprocessing, Input),
        "eval": (Scoring,),
        "compare": (Scoring,),
        "report": (Reporting,),
    }
    compared = set()
    for command, settings in tables.items():
        known = {f.name: f for table in settings for f in fields(table) if "choices" in f.metadata}
        for option in main.commands[command].params:
            if isinstance(option.type, click.Choice) and option.name in known:
                taken = [str(choice) for choice in known[option.name].metadata["choices"]]
                assert list(option.type.choices) == taken, f"{command} {option.opts[0]}"
                compared.add(f"{command} {option.name}")
    assert compared >= {
        *("train select", "train cache", "train precision", "report distance", "report map"),
        *("export provider", "export precision", "export input", "export backend"),
        *("embed provider", "embed layout", "embed interpolation", "embed scale"),
        *("eval kmeans_init", "compare kmeans_init"),
    }


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['dmltool', '--help']\n"
        "from cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "names = {'numpy', 'numba', 'torch', 'h5py', 'rich', 'faiss', 'trainer.config'}\n"
        "heavy = names & set(sys.modules)\n"
        "sys.exit(f'loads {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_loads_no_other_package():
    """`dmltool eval` must not pay for, or need, what training and exporting need."""
    for layer, names in {
        "retrieval": ("trainer", "exporter"),
        "trainer": ("exporter",),
        "exporter": (),
    }.items():
        code = f"import sys, {layer}.commands; sys.exit(any(n in sys.modules for n in {names}))"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_scores_without_nmi_load_no_k_means(files):
    command = ["eval", str(files / "a.h5"), "--no-nmi", "--no-map"]
    code = (
        "import sys; from cli import main\n"
        f"main({command!r}, standalone_mode=False)\n"
        "sys.exit(any(name.startswith('retrieval.kmeans.') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Recall@1" in done.stdout


def test_an_interrupt_leaves_nothing_half_written(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "big.npz",
        embeddings=rng.standard_normal((30_000, 512), dtype=np.float32),
        labels=np.arange(30_000) % 999,
    )
    before = set(tmp_path.iterdir())
    process = subprocess.Popen(
        [DMLTOOL, "eval", "big.npz", "--out", "out.json", "--threads", "1", *QUICK],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "Interrupted" in stderr
    assert "Traceback" not in stderr
    assert stdout == ""
    assert set(tmp_path.iterdir()) == before


def test_every_command_ends_with_the_next_step_on_stderr(files, monkeypatch):
    monkeypatch.chdir(files)
    (files / "a.h5").rename("my a.h5")

    def last_line(*args):
        done = call(*args)
        assert done.exit_code == 0, done.stderr
        assert "Next:" not in done.stdout
        return done.stderr.splitlines()[-1]

    quick = ("--no-map", "--no-nmi")
    assert last_line("eval", "b.h5", *quick) == "Next: dmltool report b.h5"
    with_labels = ("b.h5", "--labels", "y.npy")
    assert (
        last_line("eval", *with_labels, *quick) == f"Next: dmltool report {' '.join(with_labels)}"
    )
    assert last_line("inspect", "b.h5") == "Next: dmltool eval b.h5"
    assert last_line("compare", "my a.h5", "b.h5", *quick) == (
        "Next: dmltool report b.h5 --compare 'my a.h5'"
    )
    assert last_line("merge", "b.h5", "b.h5", "--out", "c.h5") == "Next: dmltool eval c.h5"
    page = last_line("report", "b.h5", "--map", "none", "--no-nmi")
    assert page == f"Next: open {files / 'report.html'} in a browser"
    assert "Next:" not in call("inspect", "b.h5", "--json").stderr
    assert "Next:" not in call("eval", "b.h5", *quick, "--json").stderr
    assert "Next:" not in call("compare", "b.h5", "b.h5", *quick, "--json").stderr


@pytest.mark.parametrize(
    "args",
    [
        ["report", "nope.h5"],
        ["report", "b.h5", "--compare", "nope.h5"],
        ["eval", "nope.h5", "--out", "report.html"],
        ["compare", "b.h5", "nope.h5", "--out", "report.html"],
        ["merge", "b.h5", "nope.h5", "--out", "there.h5"],
        ["export", "nope.h5"],
        ["export", "nope.h5", "--out", "there"],
        ["embed", "nope.h5", "photos", "--out", "there.h5"],
    ],
)
def test_a_missing_input_is_named_before_an_output_that_exists(files, args, monkeypatch):
    (files / "there").mkdir()
    for name in ("report.html", "there.h5", "model.onnx", "there/model.onnx"):
        (files / name).touch()
    monkeypatch.chdir(files)
    done = call(*args)
    assert done.exit_code == 1
    assert "nope.h5" in done.stderr.splitlines()[0]


@pytest.mark.parametrize("command", ["eval", "compare", "report"])
def test_an_option_and_its_opposite_exclude_each_other(command):
    done = call(command, "a.h5", "--nmi", "--no-nmi")
    assert done.exit_code == 2
    assert "--nmi and --no-nmi exclude each other" in done.stderr


@pytest.mark.parametrize("command", cli.COMMANDS["Train"] | cli.COMMANDS["Evaluate"])
def test_what_to_do_without_memory_names_options_of_the_command(command, monkeypatch):
    def fill(_):
        raise MemoryError

    running = main.commands[command]
    monkeypatch.setattr(running, "invoke", fill)
    monkeypatch.setattr(running, "parse_args", lambda *_: [])
    told = CliRunner().invoke(main, [command]).stderr
    assert "Fix: " in told
    named = set(re.findall(r"--[a-z-]+", told.partition("Fix: ")[2]))
    assert named <= {name for each in running.params for name in each.opts}
    assert bool(named) == (command in ("train", "sweep", "eval", "compare"))


def test_errors_of_the_system_say_what_helps():
    full = cli.explained(OSError(errno.ENOSPC, "No space left on device"))
    assert (full.what, full.fix[:9]) == ("Standard output cannot be used.", "Make room")
    denied = cli.explained(PermissionError(errno.EACCES, "Permission denied", "x.h5"))
    assert (denied.what, denied.why) == (
        "x.h5 cannot be used.",
        "The system says: Permission denied.",
    )
    many = cli.explained(OSError(errno.EMFILE, "Too many open files"))
    assert many.what.startswith("A file or a connection")
