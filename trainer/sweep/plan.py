"""What a sweep trains: settings, the parameters that vary, and seeds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from retrieval.errors import DmlError
from retrieval.settings import BadSettings
from trainer.config import Config
from trainer.options import OPTION_OF, Start
from trainer.resolve import ANY_TIME, resolve
from trainer.sweep import space as spaces
from trainer.sweep.space import Space

GRID, RANDOM, TPE = "grid", "random", "tpe"


@dataclass(frozen=True)
class Plan(Start):
    """All that a worker needs to know; the same command makes the same plan again."""

    space: Space = field(default_factory=dict)
    method: str = GRID
    trials: int = 1
    seeds: int = 1
    threads: int = 0  # of a run, unless the settings name a number
    test_all: bool = False

    def config(self, values: Mapping[str, str] | None = None) -> Config:
        """The settings with these values of the parameters."""
        changed = [f"{key}={text}" for key, text in (values or {}).items()]
        settings = (*self.settings, *changed)
        config, _ = resolve(self.preset, self.file, self.flags, settings, OPTION_OF)
        threads = config.run.threads or self.threads
        return replace(config, run=replace(config.run, threads=threads))

    def runs(self, values: Mapping[str, str]) -> dict[int, Config]:
        """The settings of a run for every seed: that of the settings, and those that follow."""
        config = self.config(values)
        first = config.run.seed
        return {
            seed: replace(config, run=replace(config.run, seed=seed))
            for seed in range(first, first + self.seeds)
        }

    def check(self) -> None:
        """Raise for settings that no run can have; of a grid, for those of every cell.

        Of settings that are drawn, each parameter is checked alone.
        """
        from trainer.run.setup import check_splits, load_data
        from trainer.validate import check_names

        for values in spaces.cells(self.space) if self.method == GRID else [{}]:
            config = self.config(values)
            check_names(config)
            if config.run.select == "last":
                raise DmlError(
                    "A sweep cannot compare settings with --select last.",
                    "It holds out no classes to compare them on.",
                    "Leave it out: --select val is the default.",
                )
        if self.method != GRID:
            self._check_parameters()
        config = self.config()
        check_splits(load_data(config), config.run.select)

    def _check_parameters(self) -> None:
        """Raise for keys that do not exist, and for values that are wrong with any others."""
        for key, parameter in self.space.items():
            for text in parameter if isinstance(parameter, tuple) else parameter.ends:
                try:
                    self.config({key: text})
                except BadSettings as error:
                    if any(problem.keys == (key,) for problem in error.problems):
                        raise

    def definition(self) -> dict[str, Any]:
        """The settings that a continued sweep must share with its start."""
        return {
            "settings": comparable(self.config()),
            "space": spaces.to_json(self.space),
            "method": self.method,
            "seeds": self.seeds,
        }


def comparable(config: Config) -> dict[str, Any]:
    """The settings that a result depends on, by dotted key."""
    found = {key: value for key, value in config.dotted().items() if key not in ANY_TIME}
    if config.batches.balance:  # chosen when the data set is known
        for key in ("classes", "images", "repeat"):
            del found[f"batches.{key}"]
    return found
