"""Images reach the network whole, in order, and the same bits whoever reads them."""

import os
import signal
import textwrap
import time
from contextlib import closing
from random import Random

import numpy as np
import pytest
import torch

from retrieval import resources
from retrieval.errors import DmlError
from tests import ranks
from tests.forks import Forked
from tests.trainer.data.pictures import SPEC, epochs
from trainer.data import loading, sampling, transforms
from trainer.data.loading import Loader
from trainer.data.source import open_images


@pytest.mark.parametrize("kept", ["none", "ram", "disk"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_do_not_depend_on_workers_or_cache(data, kept, workers):
    expected, labels = epochs(open_images(data, SPEC, cache="none"))
    found, found_labels = epochs(open_images(data, SPEC, cache=kept), workers=workers)
    assert torch.equal(found, expected)
    assert torch.equal(found_labels, labels)


def test_a_batch_is_the_transform_of_each_image_by_its_key(data):
    source = open_images(data, SPEC, cache="none")
    rows, targets = data.rows("train"), data.targets("train")
    plan = sampling.random_batches(len(rows), 5, 1, 2)
    keys = sampling.keys(1, 2, *plan.shape)
    with closing(Loader(source, rows, targets, 0)) as loader:
        steps = list(loader.epoch(plan, keys))
    assert len(steps) == len(plan)
    for (batch, labels), places, own in zip(steps, plan, keys, strict=True):
        assert batch.shape == (5, 3, 32, 32)
        assert batch.dtype == torch.uint8
        assert batch.is_contiguous(memory_format=torch.channels_last)
        assert labels.dtype == torch.int64
        assert labels.tolist() == targets[places].tolist()
        for image, place, key in zip(batch, places, own.tolist(), strict=True):
            raw = data.image(rows[place], SPEC.short_side)
            expected = transforms.for_training(raw, SPEC, Random(key))
            assert (image.permute(1, 2, 0).numpy() == expected).all()


def test_two_ranks_see_the_columns_of_one(data):
    source = open_images(data, SPEC, cache="ram")
    rows, targets = data.rows("train"), data.targets("train")
    plan = sampling.random_batches(len(rows), 8, 0, 0)
    keys = sampling.keys(0, 0, *plan.shape)
    with closing(Loader(source, rows, targets, 0)) as loader:
        whole = torch.cat([b for b, _ in loader.epoch(plan, keys)]).reshape(-1, 8, 3, 32, 32)
        right = torch.cat([b for b, _ in loader.epoch(plan[:, 4:], keys[:, 4:])])
    assert torch.equal(right.reshape(-1, 4, 3, 32, 32), whole[:, 4:])


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_batches_come_in_order(data, workers):
    source = open_images(data, SPEC, cache="none")
    rows = data.rows("test")[::-1]
    batches = list(loading.testing_batches(source, rows, 3, workers))
    assert [len(batch) for batch in batches] == [3, 3, 2]
    found = torch.cat(batches).permute(0, 2, 3, 1).numpy()
    expected = [transforms.for_testing(data.image(row, SPEC.short_side), SPEC) for row in rows]
    assert (found == np.stack(expected)).all()
    assert list(loading.testing_batches(source, rows[:0], 3, workers)) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_vanishes_is_named(data, workers):
    source = open_images(data, SPEC, cache="none")
    gone = data.root / data.paths[data.rows("train")[3]]
    gone.unlink()
    with pytest.raises(DmlError) as caught:
        epochs(source, workers=workers)
    assert caught.value.what == f"{gone} cannot be read as an image."
    assert caught.value.why == "There is no such file."


def workers_of(loader):
    return [worker.pid for worker in loader.loader._iterator._workers]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_worker_processes_stay_until_the_end(data):
    source = open_images(data, SPEC, cache="none")
    rows, targets = data.rows("train"), data.targets("train")
    plan = sampling.random_batches(len(rows), 4, 0, 0)
    keys = sampling.keys(0, 0, *plan.shape)
    with closing(Loader(source, rows, targets, 2)) as loader:
        first = [batch.clone() for batch, _ in loader.epoch(plan, keys)]
        pids = workers_of(loader)
        for _ in loader.epoch(plan, keys):  # an epoch that is left early
            break
        again = [batch for batch, _ in loader.epoch(plan, keys)]
        assert workers_of(loader) == pids
        assert all(alive(pid) for pid in pids)
        unfinished = loader.epoch(plan, keys)  # still held when the loader closes
        next(unfinished)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(alive(pid) for pid in pids)


def test_an_error_in_the_loop_leaves_no_process(data):
    source = open_images(data, SPEC, cache="none")
    rows, targets = data.rows("train"), data.targets("train")
    plan = sampling.random_batches(len(rows), 4, 0, 0)
    pids = []

    def run():
        with closing(Loader(source, rows, targets, 2)) as loader:
            for _ in loader.epoch(plan, sampling.keys(0, 0, *plan.shape)):
                pids.extend(workers_of(loader))
                raise ValueError("diverged")

    with pytest.raises(ValueError, match="diverged"):
        run()
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


def test_a_worker_that_the_system_ends_is_told(data):
    source = open_images(data, SPEC, cache="none")
    rows, targets = data.rows("train"), data.targets("train")
    plan = np.tile(np.arange(16), (200, 1))
    keys = sampling.keys(0, 0, *plan.shape)
    with closing(Loader(source, rows, targets, 1)) as loader:
        steps = loader.epoch(plan, keys)
        next(steps)
        (pid,) = workers_of(loader)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)  # nothing is raised here, amid other work
        with pytest.raises(DmlError, match="ended by the system") as caught:
            list(steps)
    assert "--workers 0" in caught.value.fix
    assert not alive(pid)


def test_ctrl_c_ends_all_processes_without_a_word(data, tmp_path):
    script = """
        import sys, time
        from contextlib import closing
        import numpy as np
        from trainer.data import sampling
        from trainer.config import Input
        from trainer.data.datasets.records import build
        from trainer.data.loading import Loader
        from trainer.data.source import open_images

        rows = [(path, path[0], "train") for path in sys.argv[2:]]
        from pathlib import Path
        data = build("folder", Path(sys.argv[1]), rows)
        spec = Input(resize=40, crop=32)
        plan = np.tile(np.arange(len(rows)), (1000, 1))
        source = open_images(data, spec)
        try:
            with closing(Loader(source, np.arange(len(rows)), data.labels, 2)) as loader:
                for step, _ in enumerate(loader.epoch(plan, sampling.keys(0, 0, *plan.shape))):
                    if step == 0:
                        workers = loader.loader._iterator._workers
                        print(*[worker.pid for worker in workers], flush=True)
                    time.sleep(0.05)
        except KeyboardInterrupt:
            print("interrupted")
    """
    process = Forked("-c", textwrap.dedent(script), data.root, *data.paths, lines=True)
    pids = [int(pid) for pid in process.line().split()]
    assert len(pids) == 2
    time.sleep(0.3)
    process.send(signal.SIGINT)
    assert process.end(60) == (0, "interrupted\n", "")
    assert not any(alive(pid) for pid in pids)


def test_ctrl_c_leaves_the_workers_to_a_parent_that_goes_on(data):
    source = open_images(data, SPEC, cache="none")
    rows, targets = data.rows("train"), data.targets("train")
    plan = np.tile(np.arange(16), (30, 1))
    with closing(Loader(source, rows, targets, 1)) as loader:
        steps = loader.epoch(plan, sampling.keys(0, 0, *plan.shape))
        next(steps)
        os.kill(workers_of(loader)[0], signal.SIGINT)
        assert len(list(steps)) == 29


def test_workers_are_chosen_by_device_and_cache(data, monkeypatch):
    monkeypatch.setattr(resources, "processors", lambda: 16)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    kept, plain, mapped = (open_images(data, SPEC, cache=c) for c in ("ram", "none", "disk"))
    assert loading.chosen_workers(kept, cpu) == 0
    assert loading.chosen_workers(plain, cpu) == 8
    assert loading.chosen_workers(mapped, cpu) == 8
    for name, value in ranks.variables(8)[0].items():
        monkeypatch.setenv(name, value)
    assert loading.chosen_workers(plain, cuda) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert loading.chosen_workers(plain, cuda) == 1
