"""Batches of images as tensors, read by this process or by worker processes.

Neither the number of workers nor the cache changes a single bit of a batch.
"""

import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from retrieval.distributed.world import from_environment
from retrieval.errors import DmlError
from trainer.data import transforms
from trainer.data.source import Source

MOST_WORKERS = 8

Task = tuple[np.ndarray, np.ndarray | None]  # rows (B,), keys (B,); no keys: as in evaluation


class Pool:
    """Reads the batches of a list of tasks, in order, in this process or in workers that stay."""

    def __init__(
        self, source: Source, workers: int = -1, device: torch.device | str = "cpu"
    ) -> None:
        self.source, spec, device = source, source.spec, torch.device(device)
        self.workers = chosen_workers(source, device) if workers < 0 else workers
        self.pin = device.type == "cuda"
        self.tasks: list[Task] = []
        self.loader: DataLoader | None = None
        if self.workers:  # compiled here, once, where no folder can keep what was compiled
            for size in (spec.crop + 1, max(spec.resize, spec.crop)):
                transforms.for_training(np.zeros((size, size, 3), np.uint8), spec, Random(0))

    def read(self, tasks: list[Task]) -> Iterator[Tensor]:
        if not tasks:
            return
        self.tasks[:] = tasks
        try:
            for batch in self._iterator():
                if isinstance(batch, DmlError):
                    raise batch
                yield batch.permute(0, 3, 1, 2)
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error) and "killed by signal" not in str(error):
                raise
            raise DmlError(
                "A process that reads images was ended by the system.",
                "Most often memory has run out: that of the machine, or /dev/shm in a container.",
                "Use fewer of them, --workers 1, or none, --workers 0; docker takes --shm-size.",
            ) from error

    def _iterator(self) -> Iterator[Tensor | DmlError]:
        if self.loader is not None:
            return iter(self.loader)
        # A forked process shares the kept images; a spawned one would copy them.
        start = "fork" if sys.platform == "linux" else "spawn"
        with _same_handler(), _without_interrupts(), warnings.catch_warnings():
            # More processes than cores may be wanted where reading waits for a network.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            self.loader = DataLoader(
                _Batches(self.source),
                batch_size=None,
                sampler=self.tasks,
                num_workers=self.workers,
                pin_memory=self.pin,
                worker_init_fn=_start_worker,
                persistent_workers=self.workers > 0,
                generator=torch.Generator(),  # else it draws from the one that dropout uses
                multiprocessing_context=start if self.workers else None,
            )
            return iter(self.loader)

    def close(self) -> None:
        iterator = None if self.loader is None else self.loader._iterator
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()  # else they end whenever the iterator is collected
        self.loader = None


class Loader(Pool):
    """Training batches of a whole run."""

    def __init__(
        self,
        source: Source,
        rows: np.ndarray,
        targets: np.ndarray,
        workers: int = -1,
        device: torch.device | str = "cpu",
    ) -> None:
        """rows (n,) of the data set; targets (n,) beside them."""
        super().__init__(source, workers, device)
        self.rows, self.targets = rows, targets

    def epoch(self, plan: np.ndarray, keys: np.ndarray | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images uint8 (B, 3, H, W) in channels-last memory and targets (B,), step by step.

        plan (steps, B): places in rows; keys (steps, B), see `sampling`; None: as in evaluation.
        """
        each = [None] * len(plan) if keys is None else keys
        tasks = [(self.rows[places], own) for places, own in zip(plan, each, strict=True)]
        for places, batch in zip(plan, self.read(tasks), strict=True):
            yield batch, torch.from_numpy(self.targets[places])


def testing_batches(
    source: Source,
    rows: np.ndarray,
    batch_size: int,
    workers: int = -1,  # noqa: PT028 this is no test
    device: torch.device | str = "cpu",  # noqa: PT028
) -> Iterator[Tensor]:
    """Yield images as `Loader.epoch` does, in the order of rows and without random changes."""
    with closing(Pool(source, workers, device)) as pool:
        starts = range(0, len(rows), batch_size)
        yield from pool.read([(rows[start : start + batch_size], None) for start in starts])


def chosen_workers(source: Source, device: torch.device) -> int:
    """How many processes read images.

    None if the images are in memory and the processor trains as well, else one for each core.
    """
    in_memory = source.store is not None and source.store.file is None
    if in_memory and (device.type == "cpu" or sys.platform != "linux"):
        return 0
    return min(from_environment().processors, MOST_WORKERS)


class _Batches(Dataset):
    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, task: Task) -> Tensor | DmlError:
        """The batch, or its error: DataLoader would fold one that is raised into a text."""
        try:
            return torch.from_numpy(self.source.batch(*task))
        except DmlError as error:
            return error


def _start_worker(_: int) -> None:
    """Ignore Ctrl-C, which reaches the whole group of processes: the parent alone answers it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back: a process that is being forked would answer it like its parent."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _same_handler() -> Iterator[None]:
    """Undo the SIGCHLD handler of torch, which raises amid any statement of the main thread.

    The iterator itself looks for dead workers every few seconds.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
