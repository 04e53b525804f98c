"""What `dmltool list` shows: the tables of losses, data sets, backbones and presets."""

from __future__ import annotations


def listing(kind: str) -> dict[str, str]:
    """Name -> summary. Nothing heavy is imported."""
    if kind == "presets":
        from trainer.resolve import preset_names, preset_summary

        return {name: preset_summary(name) for name in preset_names()}
    if kind == "losses":
        from trainer.losses import LOSSES as table
    elif kind == "datasets":
        from trainer.datasets import DATASETS as table
    else:
        from trainer.backbones import BACKBONES as table
    return {entry.name: entry.summary for entry in table}
