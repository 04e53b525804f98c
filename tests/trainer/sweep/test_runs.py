"""`dmltool train --seeds N`: run folders, mean and spread, and going on."""

import json
import statistics

from tests.commands import call
from tests.trainer.small import SMALL
from trainer.commands import _run_seeds
from trainer.options import Start
from trainer.sweep import runs, tables


def test_seeds_are_runs_of_their_own_with_mean_and_spread(pictures, tmp_path):
    out = tmp_path / "runs"
    words = ("train", *SMALL, "--epochs=1", "--threads=1", "--data", pictures, "--seed", 3)
    found = json.loads(call(*words, "--seeds", 2, "--out", out, "--json").stdout)
    assert found["seeds"] == [3, 4]
    results = [json.loads((out / f"seed-{s}" / "result.json").read_text()) for s in (3, 4)]
    recalls = [result["test"]["distances"]["cos"]["recall"]["1"] for result in results]
    shown = found["rows"][0]["test"]["cos"]["recall@1"]
    assert shown == {"mean": statistics.fmean(recalls), "std": statistics.stdev(recalls)}
    alone = tmp_path / "alone"
    assert call(*words, "--out", alone).exit_code == 0
    assert json.loads((alone / "result.json").read_text())["test"] == results[0]["test"]

    before = (out / "seed-3" / "last.pt").stat().st_mtime_ns
    again = call(*words, "--seeds", 3, "--out", out)
    assert "seeds 3 to 5" in again.stdout
    assert (out / "seed-3" / "last.pt").stat().st_mtime_ns == before
    other = call(*words, "--seeds", 2, "--out", out, "--lr", 0.5)
    assert other.exit_code == 1
    assert "optimizer.lr" in other.stderr


def test_runs_whose_table_is_gone_have_no_next_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "train_all_seeds", lambda *_: {"rows": []})
    monkeypatch.setattr(tables, "seeds_table", lambda _: "the table")
    _run_seeds(Start(), 2, tmp_path, as_json=False)
    told = capsys.readouterr()
    assert told.out == "the table\n"
    assert "Next" not in told.err
