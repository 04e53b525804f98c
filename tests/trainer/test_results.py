"""Results of runs and sweeps have the keys and values that their types name."""

import json

from tests.retrieval.typed import faults
from tests.trainer.sweep.outcomes import outcome, result
from trainer.config import Config
from trainer.results import EpochRecord, RunResult, SweepResult, Validation
from trainer.run.train import train
from trainer.sweep.results import of_seeds


def test_a_run_writes_what_the_types_say(change, tmp_path):
    config = change(run={"train_recall": 20})
    assert faults(train(config, tmp_path / "run"), RunResult) == []
    assert faults(json.loads((tmp_path / "run" / "result.json").read_text()), RunResult) == []
    validation = json.loads((tmp_path / "run" / "validation.json").read_text())
    assert faults(validation, Validation) == []
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [fault for line in lines for fault in faults(json.loads(line), EpochRecord)] == []


def test_a_sweep_is_as_its_type_says():
    assert faults(result("optimizer.lr", "loss.options.anchors"), SweepResult) == []
    runs = [outcome(seed, 0.5) for seed in range(2)]
    assert faults(of_seeds(runs, "seeds", Config()), SweepResult) == []
