"""The command sweep. What it calls is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrieval.console import (
    RUN_AGAIN,
    next_step,
    on_interrupt,
    print_json,
    stdout_console,
    tell,
)
from retrieval.options import PATH, json_option, whole_option
from trainer.options import Start, resolved, settings_options, start_of

if TYPE_CHECKING:
    from trainer.sweep.plan import Plan


@click.command()
@settings_options
@click.option(
    "--grid",
    multiple=True,
    metavar="KEY=V,V,...",
    help="Values of a setting. If the option is repeated, all combinations are trained.",
)
@whole_option("--random", "Draw N settings at random.")
@whole_option("--tpe", "Draw N settings with Optuna's TPE sampler.")
@click.option(
    "--space",
    type=PATH,
    metavar="FILE",
    help="TOML file with ranges and choices for --random and --tpe.",
)
@whole_option(
    "--seeds", "Number of runs per setting, with the seeds --seed, --seed + 1, ...", default=3
)
@whole_option("--workers", "Number of processes that train settings at the same time.", default=1)
@click.option(
    "--storage", metavar="URL", help="Database of the sweep.  [default: SQLite in the folder]"
)
@click.option(
    "--test-all", is_flag=True, help="Score all settings on the test set, not only the best one."
)
@click.option(
    "--out", type=PATH, metavar="DIR", help="Folder of the sweep.  [default: runs/PRESET-sweep]"
)
@json_option
def sweep(
    grid: tuple[str, ...],
    random: int | None,
    tpe: int | None,
    space: str | None,
    seeds: int,
    workers: int,
    storage: str | None,
    test_all: bool,
    out: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Train many settings with several seeds each, and compare them.

    Settings are compared on the validation classes; only the best one is scored on the test set.
    The same command continues an interrupted sweep, or joins a sweep that is still running. It
    writes sweep.html, sweep.csv and sweep.json next to the run folders.

    \b
    Examples:
      dmltool sweep --grid optimizer.lr=0.001,0.003 --seeds 2 --epochs 2
      dmltool sweep --preset glyphs-group --grid loss.options.anchors=0,1,2
      dmltool sweep --preset glyphs-ce --tpe 50 --space space.toml --workers 2
    """
    from retrieval.loading.folders import best_run
    from retrieval.resources import processors

    start = start_of(**given)
    threads = max(1, processors() // workers)
    plan = _plan(start, grid, space, random, tpe, seeds=seeds, threads=threads, test_all=test_all)
    _, name = resolved(start)
    folder = Path(out) if out else Path("runs") / f"{name}-sweep"
    with on_interrupt(lambda: RUN_AGAIN):
        from trainer.sweep.page import PAGE
        from trainer.sweep.sweep import sweep as run_sweep
        from trainer.sweep.tables import SweepDisplay, sweep_table

        with SweepDisplay() as watch:
            found = run_sweep(plan, folder, storage, workers, watch, SweepDisplay)
    if as_json:
        print_json(found)
        return
    console = stdout_console()
    console.print(sweep_table(found, console))
    tell(f"To see more, open {folder / PAGE} in a browser")
    if run := best_run(folder):
        best = (f"{key}={text}" for key, text in found["rows"][0]["values"].items())
        tell(f"Best setting: {' '.join(best)}")
        next_step("export", run)


def _plan(
    start: Start,
    grid: tuple[str, ...],
    space: str | None,
    random: int | None,
    tpe: int | None,
    **others: Any,
) -> Plan:
    """Return the plan of a sweep; others: fields of Plan that need no choice."""
    if random and tpe:
        raise click.UsageError("--random and --tpe exclude each other.")
    if space and not (random or tpe):
        raise click.UsageError("--space is for --random N or --tpe N.")
    if not grid and not space:
        raise click.UsageError("Name the settings to vary: --grid KEY=V,V,... or --space FILE.")
    from trainer.sweep import space as spaces
    from trainer.sweep.plan import GRID, RANDOM, TPE, Plan

    parameters = spaces.from_grid(grid)
    if space:
        parameters = spaces.from_file(Path(space), parameters)
    return Plan(
        **vars(start),
        space=parameters,
        method=TPE if tpe else RANDOM if random else GRID,
        trials=tpe or random or len(spaces.cells(parameters)),
        **others,
    )
