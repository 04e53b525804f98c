"""Configs: written and read again, frozen, and sound by default."""

import tomllib
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from retrieval.errors import DmlError
from trainer.config import Config, Input, Loss, Optimizer, Phase, Schedule
from trainer.resolve import preset_names, resolve
from trainer.validate import from_dict


def test_the_phase_has_the_other_settings_of_the_optimiser():
    settings = ["phase.epochs=2", "phase.optimizer.lr=1", "optimizer.weight_decay=0.5"]
    config, _ = resolve("glyphs-group", None, {}, settings)
    assert config.optimizer_in(1) == replace(config.optimizer, lr=1.0)
    assert config.optimizer_in(2) == config.optimizer
    assert isinstance(config.phase.optimizer["lr"], float)
    other, _ = resolve("cub-group", None, {"loss.name": "spce"})
    assert other.phase == Phase()  # no head to classify with


@pytest.mark.parametrize("name", preset_names())
def test_a_config_survives_being_written_as_toml(name):
    config, _ = resolve(name, None, {})
    assert from_dict(tomllib.loads(config.to_toml()), "it") == config


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Config().loss = Loss()


def test_every_field_has_a_default_that_is_sound():
    for part in fields(Config):
        assert list(getattr(Config(), part.name).problems()) == []
    assert [problem.text for problem in Input(crop=300).problems()] == [
        "input.crop = 300 does not fit into input.resize = 256."
    ]
    assert list(Optimizer(momentum=1.0).problems())


def test_a_phase_longer_than_the_training_says_what_to_change():
    with pytest.raises(DmlError) as error:
        Config(phase=Phase(epochs=10), schedule=Schedule(epochs=1))
    assert error.value.fix == "Use --set phase.epochs=0, or --epochs 11 or more."
