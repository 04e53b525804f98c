"""Scores of a network: the device that counts ranks, and the verdict on the best epoch."""

import pytest
import torch

from retrieval.ranking import ranks
from retrieval.ranking.backends import trial
from tests.trainer.run.runs import fit, told_by
from trainer.run.scoring import counting_device, recall, verdict


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda:1", "cuda:1"), ("cuda", "cuda:3"), ("cuda:0", "cpu"), ("cpu", "cpu"), ("mps", "cpu")],
)
def test_the_gpu_of_a_training_counts_ranks_if_its_trial_is_right(device, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(trial, "fault_of", lambda name, dim: "is off" if name == "cuda:0" else None)
    assert counting_device(torch.device(device), 8) == expected


def test_recall_is_counted_on_the_device_of_the_training(clustered, monkeypatch):
    asked, count = [], ranks.count_ranks

    def counted(problem, device):
        asked.append(device)
        return count(problem)

    monkeypatch.setattr(ranks, "count_ranks", counted)
    monkeypatch.setattr(trial, "fault_of", lambda name, dim: None)
    found = recall(*clustered, device=torch.device("cuda:2"))
    assert found == recall(*clustered)
    assert asked == ["cuda:2", "cpu"]


def test_a_run_that_learns_nothing_says_so(change, tmp_path):
    texts = []
    config = change(optimizer={"lr": 1e-7}, schedule={"epochs": 1})
    result = fit(config, tmp_path / "run", told_by(texts))
    assert result["scores"]["cos"] < result["baselines"]["pixels"]["cos"]
    assert any(
        text.startswith("No epoch is better than the baseline, raw pixels") for text in texts
    )


def test_a_best_epoch_that_is_the_first_is_told():
    scores = {"cos": 0.5, "l2": 0.5}
    best = {"epoch": 1, "scores": scores}
    assert "is the first" in verdict(best, {"pixels": scores, "untrained": scores}, 3)
    assert verdict(best, {"pixels": scores, "untrained": scores}, 1) == ""
    assert verdict(best | {"epoch": 2}, {"pixels": scores, "untrained": scores}, 3) == ""
    better = {"cos": 0.6, "l2": 0.4}
    told = verdict(best | {"epoch": 2}, {"pixels": scores, "untrained": better}, 3)
    assert "No epoch is better than the baseline, untrained network: Recall@1 50.00" in told
