"""The trials of a sweep in Optuna's storage: create, claim, take over and finish them.

A trial is one setting with all its seeds. What is drawn for a trial depends on the sweep and the
trial's number, so that it is drawn again where a worker was killed before it wrote it down.
"""

import json
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from retrieval import files
from retrieval.errors import DmlError, install
from retrieval.remote.address import without_secrets
from trainer.results import Outcome
from trainer.sweep import space as spaces
from trainer.sweep.plan import GRID, TPE, Plan

try:
    import optuna
    from optuna.samplers import BaseSampler, PartialFixedSampler, RandomSampler, TPESampler
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError as error:
    raise DmlError("A sweep needs Optuna.", f"{error}.", install("sweep")) from error

optuna.logging.set_verbosity(optuna.logging.ERROR)

DATABASE = "study.db"
DEFINITION, ALIVE, PLACE, OUTCOMES, ERROR = "definition", "alive", "place", "outcomes", "error"
BEAT = 30.0  # seconds between signs of life
GRACE = 300.0  # seconds without one, after which a trial of another machine is taken over


class Busy(DmlError):
    """Another process holds the folder."""


@dataclass
class Claim:
    """A trial that this process works on."""

    number: int
    values: dict[str, str]
    trial: Trial


class Trials:
    """The trials of one sweep; several processes and machines may have it open."""

    def __init__(self, plan: Plan, folder: Path, storage: str | None) -> None:
        self.plan, self.folder, self.storage = plan, folder, storage
        url = storage or f"sqlite:///{(folder / DATABASE).resolve()}"
        try:
            self.study = optuna.create_study(
                storage=url, study_name=folder.name, direction="maximize", load_if_exists=True
            )
        except Exception as error:  # whatever the driver of a database raises
            raise DmlError(
                f"The storage {without_secrets(url)} cannot be opened.",
                without_secrets(f"{type(error).__name__}: {str(error).splitlines()[0]}."),
                "Name a database that Optuna takes, such as postgresql://user@host/name, and "
                "install its driver."
                if storage
                else "Choose another --out, where a new sweep has its own.",
            ) from error
        self.place = f"{socket.gethostname()}:{folder.resolve()}"
        order = self._defined()  # a continued sweep numbers the cells of a grid as it began
        in_order = {key: plan.space[key] for key in order}
        self.cells = spaces.cells(in_order) if plan.method == GRID else []

    def _defined(self) -> list[str]:
        """The parameters in the order of the stored definition of this sweep, which is made here.

        Raise if the storage holds another sweep of this name.
        """
        definition, saved = self.plan.definition(), self.study.user_attrs.get(DEFINITION)
        if saved is None:
            self.study.set_user_attr(DEFINITION, definition)
            return list(self.plan.space)
        ours = definition.pop("settings") | definition
        theirs = saved.pop("settings") | saved
        ours, theirs = json.loads(json.dumps([ours, theirs]))
        names = [
            "the parameters that vary" if key == "space" else key
            for key in ours | theirs
            if ours.get(key) != theirs.get(key)
        ]
        if names:
            raise DmlError(
                f"{self.folder} holds another sweep.",
                f"It differs in: {', '.join(names)}.",
                "Choose another --out, or repeat the command that began it.",
            )
        return list(saved["space"])

    @contextmanager
    def claimed(self) -> Iterator[Claim | None]:
        """Hold a trial that nobody works on: an abandoned one, or a new one; None if there is none.

        While it is held, signs of life are written to the storage.
        """
        with ExitStack() as stack:
            claim = self._abandoned(stack) or self._new(stack)
            if claim is not None:
                claim.trial.set_user_attr(PLACE, self.place)
                stack.enter_context(self._beating(claim.trial))
            yield claim

    def _abandoned(self, stack: ExitStack) -> Claim | None:
        for frozen in self.all():
            if frozen.state == TrialState.RUNNING and (lock := self._locked(frozen)) is not None:
                stack.push(lock)
                now = self.study.trials[frozen.number].state
                if now == TrialState.RUNNING:  # else finished in the meantime
                    return self._claim(Trial(self.study, frozen._trial_id))
                stack.pop_all().close()
        return None

    def _new(self, stack: ExitStack) -> Claim | None:
        while len(self.all()) < self.plan.trials:
            trial = self.study.ask()
            if trial.number >= self.plan.trials:  # another machine was faster
                self.study.tell(trial, state=TrialState.FAIL)
                return None
            frozen = self.study.trials[trial.number]
            lock = self._locked(frozen, new=True)
            if lock is not None:  # else another process of this folder has taken it over
                stack.push(lock)
                return self._claim(trial)
        return None

    def _locked(self, frozen: FrozenTrial, new: bool = False) -> ExitStack | None:
        """The lock of a trial's folder if its worker is gone, or if the trial is new."""
        folder = self.folder_of(frozen.number)
        folder.mkdir(parents=True, exist_ok=True)
        stack = ExitStack()
        try:
            held = stack.enter_context(files.locked_folder(folder, Busy(f"{folder} is locked.")))
        except Busy:
            return None
        started = frozen.datetime_start.timestamp() if frozen.datetime_start else 0.0
        silent = time.time() - frozen.user_attrs.get(ALIVE, started)
        here = self.storage is None or frozen.user_attrs.get(PLACE) == self.place
        if new or (here and held) or silent > GRACE:
            return stack
        stack.close()
        return None

    def _claim(self, trial: Trial) -> Claim:
        """Draw the values of a trial, or read those that are written down."""
        self.study.sampler = self._sampler(trial.number)
        values = {}
        for key, parameter in self.plan.space.items():
            if isinstance(parameter, tuple):
                values[key] = str(trial.suggest_categorical(key, parameter))
            elif parameter.whole:
                low, high = int(parameter.low), int(parameter.high)
                values[key] = str(trial.suggest_int(key, low, high, log=parameter.log))
            else:
                found = trial.suggest_float(key, parameter.low, parameter.high, log=parameter.log)
                values[key] = repr(found)
        return Claim(trial.number, values, trial)

    def _sampler(self, number: int) -> BaseSampler:
        if self.plan.method == GRID:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                return PartialFixedSampler(self.cells[number], RandomSampler())
        if self.plan.method == TPE:
            return TPESampler(seed=number, constant_liar=True)
        return RandomSampler(seed=number)

    @contextmanager
    def _beating(self, trial: Trial) -> Iterator[None]:
        """Write heartbeats until the end of the block."""
        ended = threading.Event()

        def beat() -> None:
            while True:
                try:
                    trial.set_user_attr(ALIVE, time.time())
                except Exception:  # finished, or the database is away for a moment
                    if ended.is_set():
                        return
                if ended.wait(BEAT):
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def complete(self, claim: Claim, outcomes: list[Outcome], value: float) -> None:
        """Write the outcome of a trial; value: the score by which samplers draw further trials."""
        claim.trial.set_user_attr(OUTCOMES, outcomes)
        self.study.tell(claim.number, value, skip_if_finished=True)

    def fail(self, claim: Claim, why: str) -> None:
        """Write that a setting cannot be trained."""
        claim.trial.set_user_attr(ERROR, why)
        self.study.tell(claim.number, state=TrialState.FAIL, skip_if_finished=True)

    def all(self) -> list[FrozenTrial]:
        """The trials so far, in order, without surplus ones."""
        return self.study.get_trials(deepcopy=False)[: self.plan.trials]

    def unfinished(self) -> int:
        """How many trials have been begun and are not finished."""
        return sum(frozen.state == TrialState.RUNNING for frozen in self.all())

    def folder_of(self, number: int) -> Path:
        return self.folder / f"trial-{number:03d}"
