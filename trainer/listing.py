"""The tables of losses, data sets, backbones and presets together, for `dmltool list`."""

from __future__ import annotations

from trainer.config import Config


def check_names(config: Config) -> None:
    """Raise for losses, backbones, data sets and options of theirs that do not exist.

    torch is loaded only where options of a loss, or names of another library, are to be checked.
    """
    from trainer import losses
    from trainer.data import datasets
    from trainer.networks import backbones

    losses.check(config.loss.name, config.loss.options)
    backbones.check(config.network.backbone, config.input.crop)
    datasets.check(config.data.dataset, config.data.options)


def listing(kind: str) -> dict[str, str]:
    """The summary of each entry of a table by its name. Nothing heavy is imported."""
    from trainer.data.datasets import DATASETS
    from trainer.losses import LOSSES
    from trainer.networks.backbones import BACKBONES
    from trainer.resolve import preset_names, preset_summary

    if kind == "presets":
        return {name: preset_summary(name) for name in preset_names()}
    return {"losses": LOSSES, "datasets": DATASETS, "backbones": BACKBONES}[kind].summaries()
