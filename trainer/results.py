"""Types of the results of runs and sweeps, which become JSON."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from retrieval.results import Result, Scores

BASELINES = {"pixels": "raw pixels", "untrained": "untrained network"}
"""What training is compared with, by the keys of results."""

Recalls = dict[str, float]
"""Recall@1 by distance."""
FlatScores = dict[str, dict[str, float]]
"""Scores by distance and name, such as recall@1."""


class EpochMeans(TypedDict):
    """What training an epoch gives: the part of its record that no validation is needed for."""

    epoch: int
    loss: float | None
    parts: dict[str, float]
    monitor: dict[str, float]
    seconds: float
    images_per_second: float
    lr: float


class EpochRecord(EpochMeans):
    """A line of metrics.jsonl; epoch 0 is before training."""

    scores_of: str
    scores: Recalls
    pixels: NotRequired[Recalls]  # of epoch 0: those of raw images
    best: bool
    train_scores: NotRequired[Recalls]


class Best(TypedDict):
    """The best epoch so far."""

    epoch: int
    scores: Recalls


class RunResult(TypedDict):
    """The result of `train`, result.json."""

    run: str
    dataset: str
    loss: str
    select: str
    best_epoch: int
    epochs: int
    scores: Recalls
    baselines: dict[str, Recalls]
    counts: dict[str, list[int]]  # split -> images, classes
    test: Result | None


class Validation(TypedDict):
    """The scores of the best epoch on the split that picked it, validation.json."""

    split: str
    scores: FlatScores
    classes: list[str]
    queries: list[int]  # of each class
    hits: dict[str, list[int]]  # distance -> queries of each class with rank 1


class Outcome(TypedDict):
    """What a sweep keeps of a run."""

    seed: int
    run: str
    best_epoch: int
    validation: Validation | None
    test: dict[str, Scores] | None


class Spread(TypedDict):
    """Mean and standard deviation over seeds; of one seed without deviation."""

    mean: float
    std: float | None


Spreads = dict[str, dict[str, Spread]]
"""Mean and standard deviation by distance and name of the score."""


class Gap(TypedDict):
    """The difference of a setting to the best one."""

    difference: float
    ci: list[float] | None
    p: float | None


class SettingResult(TypedDict):
    """A setting of a sweep."""

    trial: int
    values: dict[str, str]
    error: str | None
    runs: list[Outcome]
    validation: Spreads | None
    test: Spreads | None
    difference: Gap | None


class SweepHead(TypedDict):
    """What a sweep was begun with."""

    name: str
    method: str
    trials: int
    settings: dict[str, Any]


class SweepResult(SweepHead):
    """The result of `sweep` and of `train --seeds`, sweep.json."""

    version: int
    parameters: list[str]
    seeds: list[int]
    split: str | None
    rows: list[SettingResult]
