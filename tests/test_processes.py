"""Commands in two and three processes: the bytes of one process, and errors told once."""

import json
import signal
import sys
import time

import numpy as np
import pytest

from retrieval.embeddings import Split
from retrieval.formats.hdf5.writing import write
from tests.commands import call
from tests.forks import Forked
from tests.golden.cases import vectors, whole
from tests.ranks import finish, run_commands, slurm_variables, start, together, variables


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of several tiles: small classes and two large ones, ties, duplicates, zeros."""
    folder = tmp_path_factory.mktemp("embeddings")
    X, labels = vectors(rows=900, classes=80)
    labels[300:] %= 2
    write(folder / "a.h5", {"test": Split(X, labels)})
    write(folder / "b.h5", {"test": Split(X[:, ::-1] ** 3, labels)})
    np.savez(folder / "q.npz", embeddings=X[:300], labels=labels[:300])
    np.savez(folder / "g.npz", embeddings=X[300:], labels=labels[300:])
    ties, codes = whole(rows=600)
    np.savez(folder / "ties.npz", embeddings=ties, labels=codes)
    return folder


def commands(folder, out):
    a, b, q, g, ties = (folder / name for name in ("a.h5", "b.h5", "q.npz", "g.npz", "ties.npz"))
    result = ["--out", out / "result.json", "--per-class", out / "classes.csv"]
    return [
        ["eval", a, "--json", "--nmi", "--seeds", 1, "--kmeans-restarts", 1],
        ["eval", a, "--no-nmi", "--distance", "cos", "--queries", 500, *result],
        ["eval", q, "--gallery", g, "--no-nmi", "--json"],
        ["eval", ties, "--json", "--no-nmi", "--no-map"],
        ["compare", a, b, "--json"],
        ["compare", a, b, "--distance", "l2"],
    ]


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    return out, [call(*command) for command in commands(folder, out)]


def notes(result):
    """What it tells beside its progress, which a slow machine shows."""
    return [line for line in result.stderr.splitlines() if not line.endswith("s left")]


@pytest.mark.parametrize("size", [2, 3])
def test_scores_of_several_processes_are_byte_for_byte_those_of_one(size, folder, alone, tmp_path):
    out, wanted = alone
    found = run_commands(size, commands(folder, tmp_path), tmp_path)
    for ranks, one in zip(found, wanted, strict=True):
        first, *others = ranks
        assert (first.code, first.stdout) == (one.exit_code, one.stdout), first.stderr
        assert notes(first) == notes(one)
        assert all((rank.code, rank.stdout, rank.stderr) == (0, "", "") for rank in others)
    for name in ("result.json", "classes.csv"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()


LIMITED = """
import os, resource, sys
from cli import main
limit = int(sys.argv.pop())
if os.environ["RANK"] == "1":  # it cannot write a copy of the vectors
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="copies are shared on Linux only")
def test_one_copy_of_the_vectors_of_a_set_serves_all_processes_of_a_machine(tmp_path):
    X, labels = vectors(rows=900, classes=80)
    for n, rows in enumerate((slice(0, 500), slice(500, 900))):
        np.savez(tmp_path / f"query-{n}.npz", embeddings=X[rows], labels=labels[rows])
        np.savez(tmp_path / f"gallery-{n}.npz", embeddings=X[rows], labels=labels[rows])
    command = ["eval", tmp_path, "--no-nmi", "--json"]
    first, second = together(2, "-c", LIMITED, *command, X.nbytes // 2)
    assert (first.code, second.code) == (0, 0), second.stderr
    assert json.loads(first.stdout) == json.loads(call(*command).stdout)
    (tmp_path / "gallery-1.npz").write_bytes(b"damaged")
    first, second = together(2, "-m", "cli", *command)
    assert (first.code, second.code) == (1, 1)
    assert "gallery-1.npz" in first.stderr
    assert "Traceback" not in first.stderr + second.stderr


@pytest.mark.parametrize("number", [2, 4])
def test_tasks_of_slurm_work_together_without_torchrun(number, folder, alone, tmp_path):
    command = ["-m", "cli", *commands(folder, tmp_path)[number]]
    first, second = finish(start(2, *command, variables=slurm_variables))
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert (first.stdout, second.stdout) == (alone[1][number].stdout, "")


CLUSTERING = """
import sys, time
from pathlib import Path
from cli import main
from retrieval import clustering, signals

folder, add_nmi = Path(sys.argv.pop()), clustering.add_nmi

def slowly(*given):
    (folder / "begun").touch()
    while not (folder / "go on").exists():
        time.sleep(0.02)
    return add_nmi(*given)

clustering.add_nmi = slowly
signals.end_on_interrupt("__main__")
main()
"""


def clustering(folder, out, number=0):
    """Two processes: the first one is in k-means, and goes on when the file `go on` is there."""
    command = commands(folder, out)[number]
    ranks = start(2, "-c", CLUSTERING, *command, "--nmi", out)
    while not (out / "begun").exists():
        assert ranks[0].running()
        time.sleep(0.02)
    return ranks


@pytest.mark.parametrize("number", [0, 4], ids=["eval", "compare"])
def test_all_processes_are_there_until_the_first_has_clustered(number, folder, alone, tmp_path):
    ranks = clustering(folder, tmp_path, number)
    ranks[1].process.join(1)  # it would end at once
    assert ranks[1].running()
    (tmp_path / "go on").touch()
    first, second = finish(ranks)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert (second.stdout, second.stderr) == ("", "")
    if number == 0:
        assert first.stdout == alone[1][number].stdout
    else:
        assert json.loads(first.stdout)["distances"]["l2"]["nmi"]


def test_who_waits_for_k_means_ends_soon_if_the_first_process_is_killed(folder, tmp_path):
    ranks = clustering(folder, tmp_path)
    ranks[0].send(signal.SIGKILL)
    first, second = finish(ranks, timeout=20)
    assert (first.code, second.code) == (-signal.SIGKILL, 1)
    assert "Error: Rank 1 stops, because rank 0 on " in second.stderr
    assert "Traceback" not in second.stderr


@pytest.mark.parametrize("pressed", [[0], [1], [0, 1]])
def test_ctrl_c_during_k_means_ends_all_and_keeps_the_other_scores(pressed, folder, tmp_path):
    ranks = clustering(folder, tmp_path)
    for rank in pressed:
        ranks[rank].send(signal.SIGINT)
    first, second = finish(ranks, timeout=20)
    assert (first.code, second.code) == (130, 130), first.stderr + second.stderr
    assert "NMI was left out" in first.stderr
    assert json.loads(first.stdout)["distances"]["l2"]["recall"]
    assert (second.stdout, second.stderr) == ("", "")


def test_an_error_of_all_ranks_is_told_once(tmp_path):
    ranks = together(3, "-m", "cli", "eval", tmp_path / "missing.h5")
    assert [rank.code for rank in ranks] == [1, 1, 1]
    told = "".join(rank.stderr for rank in ranks)
    assert told.count("missing.h5") == 1
    assert told.count("stops, because rank") == 2
    assert "Traceback" not in told


def test_a_wrong_option_is_told_once():
    ranks = together(2, "-m", "cli", "eval", "x.h5", "--distance", "manhattan")
    assert [rank.code for rank in ranks] == [2, 2]
    assert "manhattan" in ranks[0].stderr
    assert ranks[1].stderr == ""


def test_ranks_with_different_options_end_with_an_error_that_names_them(folder):
    command = ("-m", "cli", "eval", folder / "q.npz", "--gallery", folder / "g.npz")
    ranks = [
        Forked(*command, *more, env=given)
        for more, given in zip(
            (("--threads", "1"), ("--distance", "cos")), variables(2), strict=True
        )
    ]
    ranks = finish(ranks)
    assert [rank.code for rank in ranks] == [1, 1]
    told = "".join(rank.stderr for rank in ranks)
    assert told.count("--distance is 'cos' for rank 1, and 'both' for rank 0") == 1
    assert "--threads" not in told.partition("may differ")[0].partition("only")[0]


@pytest.mark.parametrize("command", ["merge", "inspect", "report", "list", "doctor", "demo"])
def test_commands_of_one_process_refuse_several(command, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    done = call(command, "x")
    assert done.exit_code == 1
    assert f"`dmltool {command}` runs in one process." in done.stderr
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    told = call(command, "x").stderr.strip()
    assert told.count("\n") == 0
