"""Run a sweep: workers train its trials, then the settings are compared."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from retrieval.errors import DmlError
from retrieval.files import make_folder, waited_lock, write_text
from trainer.results import Outcome, SettingResult, SweepResult
from trainer.run.checkpoint import causes
from trainer.run.folder import FolderTaken
from trainer.run.setup import check_place
from trainer.run.watch import Watch
from trainer.sweep import page, results
from trainer.sweep.plan import Plan
from trainer.sweep.runs import SweepWatch, check_alone, train_seeds
from trainer.sweep.study import Trials

POLL = 1.0  # seconds between looks at what other workers do


def sweep(
    plan: Plan,
    folder: Path,
    storage: str | None = None,
    workers: int = 1,
    watch: SweepWatch | None = None,
    make_watch: Callable[[], SweepWatch] = SweepWatch,
) -> SweepResult:
    """Train all trials of a plan, score the chosen setting on the test set, write the results.

    A sweep that was killed continues. make_watch: a function at the top of a module that gives each
    further worker process its own watch.
    """
    watch = watch or SweepWatch()
    check_alone()
    plan.check()
    check_place(plan.config(), folder)
    make_folder(folder)
    trials = Trials(plan, folder, storage)
    with helpers(trials, workers - 1, make_watch):
        work(trials, watch)
        while trials.unfinished():  # by other workers; some may die
            time.sleep(POLL)
            work(trials, watch)
    return conclude(trials, watch)


def work(trials: Trials, watch: SweepWatch) -> None:
    """Train trials until none is left that nobody works on."""
    while True:
        with trials.claimed() as claim:
            if claim is None:
                return
            watch.trial(claim.number, trials.plan.trials, claim.values)
            try:
                runs, folder = trials.plan.runs(claim.values), trials.folder_of(claim.number)
                outcomes = train_seeds(runs, folder, watch, trials.plan.test_all)
            except (DmlError, torch.OutOfMemoryError) as error:
                if any(isinstance(each, OSError | FolderTaken) for each in causes(error)):
                    raise  # a file, a folder or the disk is at fault, not the settings
                why = "Out of GPU memory."
                if isinstance(error, DmlError):
                    why = " ".join(f"{error.what} {error.why}".split())
                trials.fail(claim, why)
                watch.trained(claim.values, why)
                continue
            recalls = list(map(results.recall_of, outcomes))
            trials.complete(claim, outcomes, sum(recalls) / len(recalls))
            watch.trained(claim.values, outcomes)


@contextmanager
def helpers(trials: Trials, count: int, make_watch: Callable[[], SweepWatch]) -> Iterator[None]:
    """Run further workers, each in a process of its own.

    What one of them fails at is left to the others, so that the first process meets the error too.
    """
    context = multiprocessing.get_context("spawn")
    given = (trials.plan, trials.folder, trials.storage, make_watch)
    processes = [context.Process(target=_helper, args=given) for _ in range(count)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _helper(
    plan: Plan, folder: Path, storage: str | None, make_watch: Callable[[], SweepWatch]
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work(Trials(plan, folder, storage), make_watch())
    except (DmlError, OSError, KeyboardInterrupt):
        os._exit(1)


def _end_with_parent() -> None:
    """End this process when the one that started it is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def conclude(trials: Trials, watch: SweepWatch) -> SweepResult:
    """Compare the settings, score the best or all on the test set, and write the files.

    Raise if all settings have failed.
    """
    found = results.gather(trials)
    with waited_lock(trials.folder, POLL):
        trained = [row for row in found["rows"] if row["runs"]]
        for row in trained if trials.plan.test_all else trained[:1]:
            results.add_test(row, _tested(trials, row, watch))
        results.write(found, trials.folder)
        write_text(trials.folder / page.PAGE, page.render(found), force=True)
    if found["rows"] and not trained:
        raise DmlError(
            f"No setting of the sweep {trials.folder} could be trained.",
            found["rows"][0]["error"] or "",
            "Change the settings or the values that vary, and choose another --out.",
        )
    return found


def _tested(trials: Trials, row: SettingResult, watch: Watch) -> list[Outcome] | None:
    """The runs of a setting with test scores; None if they are on another machine."""
    if all(run["test"] for run in row["runs"]):
        return row["runs"]
    folder = trials.folder_of(row["trial"])
    if not all((folder / Path(run["run"]).name).exists() for run in row["runs"]):
        return None
    return train_seeds(trials.plan.runs(row["values"]), folder, watch, test=True)
