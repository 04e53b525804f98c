"""List losses, data sets, backbones and presets for `dmltool list`."""

from __future__ import annotations

from typing import Any

from retrieval.registry import Registry


def listing(kind: str) -> dict[str, str]:
    """The summary of each entry of a table by its name. Nothing heavy is imported."""
    from trainer.data.datasets import DATASETS
    from trainer.losses import LOSSES
    from trainer.networks.backbones import BACKBONES
    from trainer.resolve import preset_names, preset_summary

    if kind == "presets":
        return {name: preset_summary(name) for name in preset_names()}
    tables: dict[str, Registry[Any]] = {
        "losses": LOSSES,
        "datasets": DATASETS,
        "backbones": BACKBONES,
    }
    return tables[kind].summaries()
