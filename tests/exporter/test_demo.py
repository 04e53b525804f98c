"""The demo: what it runs, what it keeps, and what it does again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cli import main
from exporter import tool_commands
from exporter.demo import Step, steps
from tests.commands import call
from tests.forks import Forked

DMLTOOL = str(Path(sys.executable).parent / "dmltool")
STEP = """
import sys
from cli import main
from trainer.data.datasets import glyphs
glyphs.TRAIN, glyphs.TEST = glyphs.TRAIN[::5], glyphs.TEST[::5]
main(sys.argv[1:])
"""


def options(folder):
    return ("demo", "--quick", "--epochs", "1", "--out", folder / "demo")


def run(folder, stop=None):
    """Run the demo in this process, and its steps as forks with a fifth of the letters.

    Forks start at once. The step that makes the path `stop` gets a Ctrl-C.
    """

    def run_child(command):
        process = Forked("-c", STEP, *command[len(tool_commands.DMLTOOL) :], cwd=folder)
        while stop and process.running():
            if stop.exists():
                process.send(signal.SIGINT)
                break
            time.sleep(0.01)
        code, stdout, stderr = process.end()
        click.echo(stdout)
        click.echo(stderr, err=True)
        return code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool_commands.signals, "run_child", run_child)
        return call(*options(folder))


def shown(stdout):
    return re.findall(r"^\$ dmltool (\w+)", stdout, re.M)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A demo that was interrupted while it trained, and run again."""
    folder = tmp_path_factory.mktemp("demo")
    done = run(folder, stop=folder / "demo" / "ce" / "config.toml")
    assert done.exit_code == 130, done.stderr
    assert "run the demo again" in done.stderr
    done = run(folder)
    assert done.exit_code == 0, done.stderr
    return folder, done


def test_every_command_is_shown_and_the_end_is_a_table_and_a_path(finished):
    folder, done = finished
    names = shown(done.stdout)
    # The baselines had been evaluated before the interruption.
    assert names == ["train", "export", "embed", "eval", "eval", "report"]
    for row in ("raw pixels", "untrained network", "ce"):
        assert re.search(rf"^ *{row} +\d\d\.\d\d +\d\d\.\d\d +\d\d\.\d\d", done.stdout, re.M), row
    assert done.stdout.splitlines()[-1] == str((folder / "demo" / "report.html").resolve())
    assert (folder / "demo" / "report.html").stat().st_size > 10_000


def test_finished_steps_are_kept(finished):
    folder, first = finished
    done = run(folder)
    assert done.exit_code == 0, done.stderr
    assert shown(done.stdout) == []
    assert first.stdout.endswith(done.stdout.lstrip("\n"))  # the same table


def test_what_is_missing_is_made_again_by_a_process_of_its_own(finished):
    folder, first = finished
    (folder / "demo" / "ce" / "shop.json").unlink()
    command = [DMLTOOL, *options(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert shown(done.stdout) == ["eval"]
    step, table = re.split(r"^ +Recall@1 l2.*$", done.stdout, flags=re.M)
    assert "Recall@20" in step
    assert first.stdout.endswith(table)


def test_what_is_damaged_gone_or_older_is_made_again(finished):
    folder, _ = finished
    run_folder = folder / "demo" / "ce"
    (run_folder / "metrics.json").write_text("{")
    done = run(folder)
    assert done.exit_code == 0, done.stderr
    assert shown(done.stdout) == ["eval"]
    (run_folder / "embeddings.h5").unlink()
    done = run(folder)
    assert done.exit_code == 0, done.stderr
    # The other files are older than what is made.
    assert shown(done.stdout) == ["export", "embed", "eval", "eval", "report"]
    assert (run_folder / "embeddings.h5").exists()


def test_numbers_of_other_epochs_are_not_shown_as_its_own(finished):
    folder, _ = finished
    done = call("demo", "--quick", "--out", folder / "demo")
    assert done.exit_code == 1
    assert "was begun with --epochs 1, not without --epochs" in done.stderr


def test_files_that_are_not_the_demos_stay_as_they_are(tmp_path):
    page = tmp_path / "demo" / "report.html"
    page.parent.mkdir()
    page.write_text("mine")
    done = call(*options(tmp_path))
    assert done.exit_code == 1
    assert "holds files that are not the demo's" in done.stderr
    assert [p.name for p in page.parent.iterdir()] == ["report.html"]
    assert page.read_text() == "mine"


def test_a_training_killed_before_its_first_checkpoint_begins_again(tmp_path):
    step = next(s for s in steps(tmp_path, ("ce",), 1) if s.args[0] == "train")
    run_folder = tmp_path / "ce"
    run_folder.mkdir()
    (run_folder / "config.toml").touch()
    step.clear()
    assert not run_folder.exists()
    run_folder.mkdir()
    (run_folder / "last.pt").touch()
    step.clear()
    assert (run_folder / "last.pt").exists()
    assert step.command()[:2] == ("train", "--resume")
    (run_folder / "result.json").write_text("{}")
    assert not step.finished()  # best.pt is gone
    step.clear()
    assert not run_folder.exists()


def test_a_step_goes_on_where_it_was(tmp_path):
    source, made = tmp_path / "best.pt", tmp_path / "export.json"
    source.touch()
    step = Step(("export", "run"), made, (source,))
    assert not step.finished()
    assert step.command() == ("export", "run")
    model = tmp_path / "model.onnx"
    model.touch()
    assert step.command() == ("export", "run", "--resume")
    os.utime(source, (model.stat().st_mtime + 5, model.stat().st_mtime + 5))
    assert step.command() == ("export", "run", "--force")  # of another checkpoint
    made.write_text("{}")
    os.utime(made, (source.stat().st_mtime + 5, source.stat().st_mtime + 5))
    assert step.finished()


def test_training_is_resumed(tmp_path):
    step = Step(("train", "--out", str(tmp_path)), tmp_path / "result.json")
    assert step.command() == step.args
    (tmp_path / "last.pt").touch()
    assert step.command() == ("train", "--resume", str(tmp_path))


def test_all_losses_are_trained_exported_evaluated_and_compared(tmp_path):
    names = [step.args[0] for step in steps(tmp_path, ("ce", "spce", "group"), None)]
    assert [names.count(n) for n in ("train", "export", "embed", "compare", "report")] == [
        3,
        3,
        3,
        2,
        1,
    ]
    assert names[-1] == "report"


def test_a_folder_that_is_called_as_a_command_is_not_removed(tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "demo.json").touch()
    for step in steps(folder, ("ce",), 1):
        step.clear()
    assert (folder / "demo.json").exists()


def test_a_baseline_that_fails_says_why_without_a_traceback(tmp_path, monkeypatch):
    step = steps(tmp_path, ("ce",), 1)[0]
    step.made.touch()  # the other file is missing, so both are written again
    assert not step.finished()
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(main, step.command())
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: This command needs torch.")
    assert step.args[0] not in CliRunner().invoke(main, ["--help"]).stdout
