"""The commands as a user meets them: output, exit codes, messages."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import cli
from cli import main
from retrieval.console import ProgressBar, warn
from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.hdf5.file import write
from retrieval.options import Size
from retrieval.tables import evaluation_table

DMLTOOL = Path(sys.executable).parent / "dmltool"
QUICK = ("--no-nmi", "--no-map")


@pytest.fixture
def files(tmp_path, clustered):
    X, labels = clustered
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", labels)
    names = np.array([f"class {c}" for c in range(6)])
    write(tmp_path / "a.h5", {"test": Split(X, labels)}, names, {"model": "a"})
    write(tmp_path / "b.h5", {"test": Split(X[:, ::-1] ** 3, labels)}, names, {"model": "b"})
    write(
        tmp_path / "shop.h5",
        {"query": Split(X[:20], labels[:20]), "gallery": Split(X[20:], labels[20:])},
    )
    return tmp_path


def call(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


def test_eval_prints_a_table_with_both_distances(files):
    result = call("eval", files / "a.h5", "--seeds", 1)
    assert result.exit_code == 0
    for word in ("60 queries", "l2", "cos", "Recall@1", "Recall@8", "MRR", "MAP@R", "NMI"):
        assert word in result.stdout


def test_eval_json_is_the_only_thing_on_stdout(files):
    result = call("eval", files / "x.npy", "--labels", files / "y.npy", "--json", *QUICK)
    parsed = json.loads(result.stdout)
    assert parsed["distances"].keys() == {"cos", "l2"}
    assert parsed["source"]["format"] == "npy"


def test_eval_asks_the_gallery_of_a_file_that_has_one(files):
    result = json.loads(call("eval", files / "shop.h5", "--json", *QUICK).stdout)
    assert (result["protocol"], result["queries"]) == ("query-gallery", 20)


def test_eval_takes_the_gallery_from_another_file(files):
    args = ("eval", files / "a.h5", "--gallery", files / "b.h5", "--json", *QUICK)
    result = json.loads(call(*args, "--distance", "l2", "--recall-at", "1,7").stdout)
    assert (result["protocol"], result["gallery"]) == ("query-gallery", 60)
    assert list(result["distances"]["l2"]["recall"]) == ["1", "7"]


def test_warnings_go_to_stderr(files):
    np.save(files / "equal.npy", np.ones((60, 3)))
    result = call("eval", files / "equal.npy", "--labels", files / "y.npy", *QUICK)
    assert "counted against them: 60 of 60" in result.stderr
    assert "exactly as near" not in result.stdout
    assert " 0.00" in result.stdout


def test_out_and_per_class_files_are_written_and_not_overwritten(files):
    out, classes = files / "r.json", files / "c.csv"
    args = ("eval", files / "a.h5", "--out", out, "--per-class", classes, *QUICK)
    assert call(*args).exit_code == 0
    recall = json.loads(out.read_text())["distances"]["cos"]["recall"]["1"]
    rows = list(csv.DictReader(classes.read_text().splitlines()))
    assert [row["name"] for row in rows] == [f"class {c}" for c in range(6)]
    mean = sum(int(r["queries"]) * float(r["recall@1_cos"]) for r in rows) / 60
    assert mean == pytest.approx(recall)
    again = call(*args)
    assert again.exit_code == 1
    assert "exists already" in again.stderr
    assert call(*args, "--force").exit_code == 0


def test_inputs_devices_and_twin_outputs_are_not_overwritten(files):
    before = (files / "a.h5").read_bytes()
    (files / "link.h5").symlink_to(files / "a.h5")
    for out in ("a.h5", "link.h5"):
        result = call("eval", files / "a.h5", *QUICK, "--out", files / out, "--force")
        assert result.exit_code == 1
        assert "read and written" in result.stderr
    assert (files / "a.h5").read_bytes() == before
    os.mkfifo(files / "pipe")
    result = call("eval", files / "a.h5", *QUICK, "--out", files / "pipe", "--force")
    assert "not a regular file" in result.stderr
    twins = ("--out", files / "same", "--per-class", files / "same")
    assert call("eval", files / "a.h5", *QUICK, *twins).exit_code == 2


def test_a_file_that_changes_while_it_is_read_gives_no_score(files, monkeypatch):
    from retrieval import evaluation

    def slow(*args):
        os.utime(files / "x.npy", ns=(1, 1))
        return score(*args)

    score = evaluation.score
    monkeypatch.setattr(evaluation, "score", slow)
    result = call("eval", files / "x.npy", "--labels", files / "y.npy", *QUICK)
    assert result.exit_code == 1
    assert "changed while it was read" in result.stderr
    assert result.stdout == ""


def test_a_full_standard_output_is_not_called_a_bug(files):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [DMLTOOL, "eval", files / "a.h5", *QUICK],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "bug" not in done.stderr


def test_a_narrow_terminal_gets_the_scores_without_intervals(files):
    result = json.loads(call("eval", files / "a.h5", "--json", *QUICK).stdout)
    console = Console(width=40, record=True, file=io.StringIO())
    console.print(evaluation_table(result, 40))
    line = next(line for line in console.export_text().splitlines() if "Recall@1" in line)
    assert line.split() == [
        "Recall@1",
        *(f"{100 * result['distances'][d]['recall']['1']:.2f}" for d in ("l2", "cos")),
    ]


def test_kernels_compile_where_no_folder_can_be_written(files):
    code = (
        "import numba.core.caching as c\n"
        "c.CompileResultCacheImpl._locator_classes = []\n"
        "from cli import main\n"
        f"main(['eval', {str(files / 'a.h5')!r}, '--no-nmi', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["queries"] == 60


def test_rows_with_nan_are_refused_or_dropped(files, clustered):
    X, labels = clustered
    X[5] = np.nan
    np.savez(files / "nan.npz", embeddings=X, labels=labels)
    refused = call("eval", files / "nan.npz", *QUICK)
    assert refused.exit_code == 1
    assert "--drop-nonfinite" in refused.stderr
    dropped = call("eval", files / "nan.npz", "--drop-nonfinite", *QUICK)
    assert dropped.exit_code == 0
    assert "rows with NaN or Inf, left out: 1" in dropped.stderr


def test_labels_of_queries_and_gallery_come_from_files_of_their_own(files):
    sides = ("eval", files / "x.npy", "--gallery", files / "x.npy", "--labels", files / "y.npy")
    missing = call(*sides)
    assert missing.exit_code == 1
    assert "--gallery-labels" in missing.stderr
    result = call(*sides, "--gallery-labels", files / "y.npy", "--json", *QUICK)
    parsed = json.loads(result.stdout)
    assert parsed["distances"]["l2"]["recall"]["1"] == 1.0  # every query is in the gallery
    assert parsed["checks"]["queries_in_gallery"] == 60


def test_the_table_shows_what_the_json_says(files):
    scores = json.loads(call("eval", files / "a.h5", "--json", "--no-nmi").stdout)["distances"]
    table = call("eval", files / "a.h5", "--no-nmi").stdout
    for name, key in (("MRR", "mrr"), ("MAP@R", "map_at_r"), ("R-precision", "r_precision")):
        cells = next(line for line in table.splitlines() if name in line).split()
        values = [f"{100 * scores[d][key]:.2f}" for d in ("l2", "cos")]
        assert [cells[1], cells[5]] == values
    assert f"{100 * scores['cos']['recall']['2']:.2f}" in table


def test_metadata_that_json_cannot_hold_is_written_as_text(files):
    import h5py

    with h5py.File(files / "a.h5", "r+") as file:
        file.attrs["loss"] = np.nan
        file.attrs["nothing"] = h5py.Empty("f")
        file.attrs["words"] = np.array([b"a", b"b"])
    attrs = json.loads(call("inspect", files / "a.h5", "--json").stdout)["attrs"]
    assert attrs["loss"] == "nan"
    assert attrs["words"] == ["a", "b"]
    np.save(files / "huge.npy", np.full((4, 2), 1e200))
    assert call("inspect", files / "huge.npy", "--json").exit_code == 0


def test_progress_of_long_work_is_told_on_stderr(monkeypatch, capsys):
    clock = iter(range(0, 1000, 11))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with ProgressBar() as report:
        report("ranks", 1, 4)
        report("ranks", 2, 4)
    captured = capsys.readouterr()
    assert "ranks: 25%" in captured.err
    assert "ranks: 50%, about 22 s left" in captured.err
    assert captured.out == ""


def test_inspect_tells_what_is_inside(files):
    result = call("inspect", files / "a.h5")
    for word in ("60", "float32", "no", "class", "model"):
        assert word in result.stdout
    parsed = json.loads(call("inspect", files / "shop.h5", "--json").stdout)
    assert parsed["splits"]["gallery"]["rows"] == 40
    assert parsed["splits"]["query"]["labels"]["classes"] == 6


def test_inspect_works_without_labels_and_with_nan(files):
    np.save(files / "nan.npy", np.array([[1.0, np.nan], [3.0, 4.0]]))
    parsed = json.loads(call("inspect", files / "nan.npy", "--json").stdout)
    split = parsed["splits"]["test"]
    assert split["labels"] is None
    assert split["checks"]["nonfinite_rows"] == 1
    assert split["norms"]["max"] == 5.0


def test_compare_shows_differences_and_flips(files):
    result = call("compare", files / "a.h5", files / "b.h5", "--distance", "cos", "--no-map")
    assert "B - A" in result.stdout
    assert "B gains" in result.stdout
    out = files / "compare.json"
    parsed = json.loads(
        call("compare", files / "a.h5", files / "b.h5", "--json", "--out", out).stdout
    )
    assert json.loads(out.read_text()) == parsed
    assert parsed["version"] == 1
    assert set(parsed["distances"]["l2"]["mrr"]) == {"a", "b", "difference", "ci", "p"}


def test_labels_that_look_like_markup_are_shown_as_text(tmp_path, clustered):
    X, labels = clustered
    np.savez(
        tmp_path / "[red]x.npz", embeddings=X, labels=np.char.add("[bold]", labels.astype(str))
    )
    result = call("inspect", tmp_path / "[red]x.npz")
    assert "[red]x.npz" in result.stdout.replace("\n", "")
    assert result.exit_code == 0


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


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 << 30), ("512mb", 512 << 20), ("1.5G", 3 << 29), ("1GiB", 1 << 30)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert Size().convert(text, None, None) == size


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


def test_a_command_loads_no_other_package():
    """`dmltool eval` must not pay for, or need, what training and exporting need."""
    for layer, names in {
        "retrieval": ("trainer", "exporter"),
        "trainer": ("exporter",),
        "exporter": (),
    }.items():
        code = f"import sys, {layer}.commands; sys.exit(any(n in sys.modules for n in {names}))"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0


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


def test_eval_shows_the_scores_before_k_means_and_keeps_them_when_that_is_interrupted(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2000, 64), dtype=np.float32)
    np.savez(tmp_path / "x.npz", embeddings=X, labels=np.arange(2000) % 500)
    endless = ("--nmi", "--seeds", "100000", "--no-map", "--out", "out.json")
    process = subprocess.Popen(
        [DMLTOOL, "eval", "x.npz", *endless, "--per-class", "classes.csv"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    shown = [process.stdout.readline() for _ in range(8)]
    assert any("Recall@8" in line for line in shown), shown
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "NMI" not in rest
    assert "takes about" in told
    assert "NMI was left out: k-means was interrupted" in told
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["settings"]["nmi"] is False
    assert "nmi" not in result["distances"]["cos"]
    assert result["notes"] == ["NMI was left out: k-means was interrupted"]
    assert (tmp_path / "classes.csv").exists()


def test_an_interrupted_k_means_still_prints_the_json(files, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("retrieval.clustering.cluster_scores", interrupted)
    result = call("eval", files / "a.h5", "--json", "--no-map")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["distances"]["l2"]["recall"]["1"] > 0


def test_long_k_means_is_left_out_unless_it_is_wanted(files, monkeypatch):
    pytest.importorskip("faiss")
    monkeypatch.setattr("retrieval.clustering.SPEED", 1000)
    result = call("eval", files / "a.h5", "--no-map")
    assert "NMI" not in result.stdout
    assert "would take about" in result.stderr
    assert "--nmi computes it" in result.stderr
    found = json.loads(call("eval", files / "a.h5", "--no-map", "--json").stdout)
    assert "NMI was left out" in found["notes"][0]
    forced = call("eval", files / "a.h5", "--no-map", "--nmi", "--seeds", 1)
    assert "NMI" in forced.stdout
    assert "k-means for NMI takes about" in forced.stderr


def test_a_k_beyond_the_candidates_is_said(files):
    result = call("eval", files / "a.h5", "--recall-at", "1,59,500", *QUICK)
    assert "Recall@59, Recall@500: a query has only 59 candidates" in result.stderr
    shop = call("eval", files / "shop.h5", "--recall-at", "1,40", "--json", *QUICK)
    assert "Recall@40: a query has only 40 candidates" in json.loads(shop.stdout)["notes"][0]
    assert "Recall@40" in shop.stderr
    assert json.loads(call("eval", files / "a.h5", "--json", *QUICK).stdout)["notes"] == []


@pytest.mark.parametrize("command", ["eval", "compare"])
def test_any_number_of_threads_works(files, command):
    names = [files / "a.h5"] if command == "eval" else [files / "a.h5", files / "b.h5"]
    options = ("--threads", 100_000, "--nmi", "--seeds", 1, "--json")
    few, many = (
        json.loads(call(command, *names, *options, *more).stdout)["distances"]
        for more in (("--threads", 1), ())
    )
    assert few == many


@pytest.mark.parametrize("width", [40, 60, 80])
def test_comparisons_show_whole_numbers_in_narrow_terminals(files, width, monkeypatch):
    args = ("compare", files / "a.h5", files / "b.h5", "--recall-at", "1,1000")
    wide = call(*args).stdout
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    lines = [line.rstrip() for line in click.unstyle(call(*args).stdout).splitlines()]
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines if line.startswith((" Recall@1 ", " MAP@R"))]
    assert len(rows) == 4
    whole = wide.split()
    assert all(cell in whole for row in rows for cell in row)
    assert not any("…" in line for line in lines)


def test_tables_name_percent_and_show_l2_before_cos(files):
    table = call("eval", files / "a.h5", *QUICK).stdout
    assert table.index("l2, %") < table.index("cos, %")
    both = call("compare", files / "a.h5", files / "b.h5", *QUICK).stdout
    assert both.index(" l2 ") < both.index(" cos ")
    assert "A, %" in both
    found = json.loads(call("eval", files / "a.h5", "--json", *QUICK).stdout)
    assert list(found["distances"]) == found["settings"]["distances"] == ["l2", "cos"]


def test_help_is_quick_and_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['dmltool', '--help']\n"
        "from cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'numba', 'torch', 'h5py', 'rich', 'faiss'} & set(sys.modules)\n"
        "sys.exit(f'loads {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "Interrupted" in stderr
    assert "Traceback" not in stderr
    assert stdout == ""
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.parquet", "x.csv", "x", "x.h5.gz"])
def test_merge_writes_only_to_names_of_hdf5_files(tmp_path, name):
    """HDF5 under another name would be refused, or misread, by whoever opens it."""
    done = CliRunner().invoke(main, ["merge", "a.h5", "b.h5", "--out", str(tmp_path / name)])
    assert done.exit_code == 1
    assert f"{name} is not the name of an embedding file" in done.stderr
    assert ".h5, .hdf5, .he5" in done.stderr
    assert not list(tmp_path.iterdir())
