"""`dmltool train --seeds N`: one setting with several seeds, the simplest sweep. No Optuna."""

from pathlib import Path
from typing import Any

from trainer.run.watch import Watch
from trainer.sweep import results
from trainer.sweep.plan import Plan
from trainer.sweep.runs import check_alone, train_seeds


def train_all_seeds(plan: Plan, folder: Path, watch: Watch) -> dict[str, Any]:
    """Train FOLDER/seed-0, seed-1, ..., each scored on the test set; what is finished is read."""
    check_alone()
    outcomes = train_seeds(plan.runs({}), folder, watch, test=True)
    found = results.of_seeds(outcomes, folder.name, plan.config())
    results.write(found, folder)
    return found
