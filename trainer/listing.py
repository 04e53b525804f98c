"""What `dmltool list` shows: the tables of losses, data sets, backbones and presets."""

from __future__ import annotations

from trainer.config import Config


def check_names(config: Config) -> None:
    """Raises for losses, backbones, data sets and options of theirs that do not exist.

    torch is loaded only where options of a loss, or names of another library, are to be checked.
    """
    from trainer import losses
    from trainer.data import datasets
    from trainer.networks import backbones

    losses.check(config.loss.name, config.loss.options)
    backbones.check(config.network.backbone, config.input.crop)
    datasets.check(config.data.dataset, config.data.options)


def listing(kind: str) -> dict[str, str]:
    """Name -> summary. Nothing heavy is imported."""
    if kind == "presets":
        from trainer.resolve import preset_names, preset_summary

        return {name: preset_summary(name) for name in preset_names()}
    if kind == "losses":
        from trainer.losses import LOSSES as table
    elif kind == "datasets":
        from trainer.data.datasets import DATASETS as table
    else:
        from trainer.networks.backbones import BACKBONES as table
    return {entry.name: entry.summary for entry in table}
