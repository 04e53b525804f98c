"""Scores of a network: the device that counts ranks during training."""

import pytest
import torch

from retrieval.ranking import ranks
from retrieval.ranking.backends import trial
from trainer.run.scoring import counting_device, recall


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
