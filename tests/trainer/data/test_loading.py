"""Images reach the network whole, in order, and the same bits whoever reads them."""

import errno
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from PIL import Image

from retrieval.errors import DmlError
from trainer.config import Input
from trainer.data import image_cache, images, loading, sampling, transforms
from trainer.data.datasets.records import build
from trainer.data.loading import Loader, make_batch, open_images

SPEC = Input(resize=40, crop=32, jitter=(0.2, 0.2, 0.2, 0.1), rotate=8.0, shift=0.05)
STILL = Input(resize=40, crop=32, train_crop="center", flip=False)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "dmltool"


@pytest.fixture
def data(tmp_path, rng):
    """24 JPEGs and PNGs of several sizes, 4 training classes and 2 test classes."""
    rows = []
    for number in range(24):
        kind = ("jpg", "png")[number % 2]
        path = f"{number % 6}/{number}.{kind}"
        (tmp_path / str(number % 6)).mkdir(exist_ok=True)
        width, height = rng.integers(50, 200, 2)
        coarse = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.BICUBIC).save(tmp_path / path)
        rows.append((path, str(number % 6), "train" if number % 6 < 4 else "test"))
    return build("folder", tmp_path, rows)


@dataclass(frozen=True)
class Squares:
    """Pictures that are not files, of one size."""

    side: int = 36

    def __call__(self, path, short_side=None):
        return np.random.default_rng(int(path)).integers(
            0, 256, (self.side, self.side, 3), dtype=np.uint8
        )


@pytest.fixture
def squares():
    rows = [(str(n), str(n % 5), "train" if n % 5 < 3 else "test") for n in range(30)]
    return build("squares", None, rows, Squares())


def epochs(source, spec=SPEC, workers=0, count=2, size=4):
    """All images and targets of some epochs, and the worker processes."""
    rows, targets = source.data.rows("train"), source.data.targets("train")
    out = []
    with Loader(source, spec, rows, targets, workers) as loader:
        for epoch in range(count):
            plan = sampling.random_batches(len(rows), size, 0, epoch)
            out += list(loader.epoch(plan, sampling.keys(0, epoch, *plan.shape)))
    return torch.cat([batch for batch, _ in out]), torch.cat([labels for _, labels in out])


def spoil(data, *rows):
    for row in rows:
        file = data.root / data.paths[row]
        file.write_bytes(file.read_bytes()[:60])


def forbid_reading(monkeypatch):
    def forbidden(*_):
        raise AssertionError("an image was read")

    monkeypatch.setattr(images, "_read", forbidden)


# The same bits


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
    with Loader(source, SPEC, rows, targets, 0) as loader:
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
            expected = transforms.for_training(raw, SPEC, loading.Random(key))
            assert (image.permute(1, 2, 0).numpy() == expected).all()


def test_two_ranks_see_the_columns_of_one(data):
    source = open_images(data, SPEC, cache="ram")
    rows, targets = data.rows("train"), data.targets("train")
    plan = sampling.random_batches(len(rows), 8, 0, 0)
    keys = sampling.keys(0, 0, *plan.shape)
    with Loader(source, SPEC, rows, targets, 0) as loader:
        whole = torch.cat([b for b, _ in loader.epoch(plan, keys)]).reshape(-1, 8, 3, 32, 32)
        right = torch.cat([b for b, _ in loader.epoch(plan[:, 4:], keys[:, 4:])])
    assert torch.equal(right.reshape(-1, 4, 3, 32, 32), whole[:, 4:])


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_batches_come_in_order(data, workers):
    source = open_images(data, SPEC, cache="none")
    rows = data.rows("test")[::-1]
    batches = list(loading.testing_batches(source, rows, SPEC, 3, workers))
    assert [len(batch) for batch in batches] == [3, 3, 2]
    found = torch.cat(batches).permute(0, 2, 3, 1).numpy()
    expected = [transforms.for_testing(data.image(row, SPEC.short_side), SPEC) for row in rows]
    assert (found == np.stack(expected)).all()
    assert list(loading.testing_batches(source, rows[:0], SPEC, 3, workers)) == []


@pytest.mark.parametrize("crop", [36, 32, 31, 40])  # 40: larger than the images
def test_kept_images_of_one_size_are_taken_at_once(squares, crop):
    spec = replace(STILL, resize=0, crop=crop)
    kept, plain = (open_images(squares, spec, cache=c) for c in ("ram", "none"))
    assert kept.store.uniform
    rows = np.array([7, 3, 3, 29])
    assert torch.equal(make_batch(kept, spec, rows, None), make_batch(plain, spec, rows, None))


def test_drawn_images_are_kept_in_memory_and_files_are_not(squares, data):
    assert open_images(squares, STILL).store.file is None
    assert open_images(data, STILL).store is None


def test_a_source_can_be_sent_to_another_process(data):
    rows = np.arange(len(data))
    for kept in ("none", "ram", "disk"):
        source = open_images(data, SPEC, cache=kept)
        sent = pickle.dumps(source)
        assert kept == "ram" or len(sent) < 10_000
        copy = pickle.loads(sent)  # noqa: S301 our own
        keys = sampling.keys(0, 0, 1, len(rows))[0]
        expected = make_batch(source, SPEC, rows, keys)
        assert torch.equal(make_batch(copy, SPEC, rows, keys), expected)


# Bad images


@pytest.mark.parametrize("kept", ["none", "ram", "disk"])
def test_bad_images_are_listed_before_the_start(data, kept, cache):
    spoil(data, 3, 10)
    with pytest.raises(DmlError) as caught:
        open_images(data, SPEC, cache=kept)
    assert caught.value.what == "2 of 24 images cannot be read."
    assert str(data.root / data.paths[3]) in caught.value.why
    assert str(data.root / data.paths[10]) in caught.value.why
    assert "--skip-bad" in caught.value.fix


@pytest.mark.parametrize("kept", ["none", "ram", "disk"])
def test_bad_images_are_left_out_on_request(data, kept):
    spoil(data, 3, 10)
    good = np.setdiff1d(np.arange(24), [3, 10])
    for _ in range(2):  # the second time by what the first has found
        source = open_images(data, SPEC, cache=kept, skip_bad=True)
        assert source.data.paths == tuple(data.paths[row] for row in good)
        assert "2 images that cannot be read are left out" in source.data.notes[-1]
        assert data.paths[3] in source.data.notes[-1]
        for row, old in enumerate(good):
            expected = transforms.resized(data.image(old, SPEC.short_side), SPEC)
            assert (source.resized(row) == expected).all()


@pytest.mark.parametrize("kept", ["none", "ram"])
def test_a_class_without_a_good_image_is_an_error(data, kept):
    spoil(data, 5, 11, 17, 23)
    with pytest.raises(DmlError, match="1 classes of test are empty") as caught:
        open_images(data, SPEC, cache=kept, skip_bad=True)
    assert "read of 5" in caught.value.why


def test_the_check_refuses_what_the_loader_would_refuse(data, tmp_path):
    long = data.root / data.paths[1]
    Image.new("L", (9000, 1)).save(long, "PNG")  # 40 x 360,000 pixels
    open_images(data, SPEC, cache="none")
    Image.new("L", (2_500_000, 1)).save(long, "PNG")
    for kept in ("none", "ram", "none"):
        with pytest.raises(DmlError, match="1 of 24") as caught:
            open_images(data, SPEC, cache=kept)
        assert "are allowed" in caught.value.why
    Image.new("RGB", (8000, 6000)).save(long, "JPEG")
    open_images(data, SPEC, cache="none")
    assert data.image(1, SPEC.short_side).shape == (750, 1000, 3)
    full = replace(SPEC, draft=0)
    with pytest.raises(DmlError, match="1 of 24") as caught:
        open_images(data, full, cache="none")
    assert "are allowed" in caught.value.why
    with pytest.raises(DmlError, match="cannot be read"):
        data.image(1, full.short_side)


def test_a_check_is_remembered_until_a_file_changes(data, monkeypatch):
    open_images(data, SPEC, cache="none")
    with monkeypatch.context() as patch:
        forbid_reading(patch)
        open_images(data, SPEC, cache="none")
    spoil(data, 4)
    with pytest.raises(DmlError, match="1 of 24"):
        open_images(data, SPEC, cache="none")
    with pytest.raises(DmlError, match="1 of 24"):
        open_images(data, SPEC, cache="none")


def test_a_check_needs_no_place_to_be_remembered_in(data, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_images(data, SPEC, cache="none").data is data


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_vanishes_is_named(data, workers):
    source = open_images(data, SPEC, cache="none")
    gone = data.root / data.paths[data.rows("train")[3]]
    gone.unlink()
    with pytest.raises(DmlError) as caught:
        epochs(source, workers=workers)
    assert caught.value.what == f"{gone} cannot be read as an image."
    assert caught.value.why == "there is no such file"


# Files of resized images


def test_a_second_run_reads_the_file_of_the_first(data, monkeypatch):
    expected = epochs(open_images(data, SPEC, cache="disk"))[0]
    forbid_reading(monkeypatch)
    seen = []
    source = open_images(data, SPEC, cache="disk", progress=lambda *done: seen.append(done))
    assert torch.equal(epochs(source)[0], expected)
    assert seen[-1] == (24, 24)


@pytest.mark.parametrize(
    "change", ["resize", "file", "keep_ratio", "interpolation", "draft", "rows"]
)
def test_other_images_have_another_file(data, cache, change):
    open_images(data, SPEC, cache="disk")
    spec = SPEC
    if change == "file":
        os.utime(data.root / data.paths[0], ns=(0, 0))
    elif change == "rows":
        data = data.take(np.arange(23))
    else:
        other = {"resize": 44, "keep_ratio": False, "interpolation": "bicubic", "draft": 0}
        value = other[change]
        spec = replace(SPEC, **{change: value})
    source = open_images(data, spec, cache="disk")
    assert len(list(cache.glob("*.images"))) == 2
    assert (source.resized(2) == transforms.resized(data.image(2, spec.short_side), spec)).all()


def test_random_changes_do_not_need_another_file(data, cache):
    open_images(data, SPEC, cache="disk")
    open_images(data, replace(SPEC, flip=False, crop=30, rotate=1.0), cache="disk")
    assert len(list(cache.glob("*.images"))) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-1],
        lambda whole: whole[:1000],
        lambda whole: b"",
        lambda whole: whole + b"x",
        lambda whole: b"something else" + whole[14:],
        lambda whole: whole[:16] + b"\x63" + whole[17:],  # the version
    ],
)
def test_a_damaged_file_is_made_anew(data, cache, damage):
    expected = epochs(open_images(data, SPEC, cache="disk"))[0]
    (file,) = cache.glob("*.images")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert torch.equal(epochs(open_images(data, SPEC, cache="disk"))[0], expected)
    assert file.read_bytes() == whole


def test_a_full_disk_is_told_and_nothing_is_left(data, cache, monkeypatch):
    class Full:
        def __init__(self, path):
            self.file, self.name = path.open("wb"), path

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, content):
            if self.file.tell() > 20_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(content)

    with monkeypatch.context() as patch:
        patch.setattr(
            image_cache, "open", lambda p, m: Full(p) if "w" in m else p.open(m), raising=False
        )
        with pytest.raises(DmlError) as caught:
            open_images(data, SPEC, cache="disk")
    assert "No space left on device" in caught.value.why
    assert str(cache) in caught.value.what
    assert "--cache none" in caught.value.fix
    assert list(cache.iterdir()) == []
    open_images(data, SPEC, cache="disk")


def test_an_interrupt_leaves_no_part_of_a_file(data, cache):
    def progress(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_images(data, SPEC, cache="disk", progress=progress)
    assert list(cache.iterdir()) == []


def test_what_a_killed_run_has_left_is_removed(data, cache):
    open_images(data, SPEC, cache="disk")
    (file,) = cache.glob("*.images")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = image_cache.socket.gethostname()
    left = [file.with_name(f"{file.name}.partial-{host}-{pid}") for pid in (dead.pid, os.getpid())]
    for path in left:
        path.write_bytes(b"part")
    file.unlink()
    open_images(data, SPEC, cache="disk")
    assert not left[0].exists()


@pytest.mark.parametrize("kept", ["ram", "disk"])
def test_too_many_images_are_refused_before_all_are_read(squares, kept, monkeypatch, cache):
    data = squares.take(np.zeros(5000, np.int64))
    free = 36 * 36 * 3 * 1000
    monkeypatch.setattr(image_cache, "available_memory", lambda: free)
    usage = image_cache.shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(image_cache.shutil, "disk_usage", lambda _: usage)
    seen = []
    with pytest.raises(DmlError, match=r"fit into memory|cannot be kept") as caught:
        open_images(data, STILL, cache=kept, progress=lambda done, _: seen.append(done))
    assert "0.0 GB" in caught.value.why
    assert max(seen) < 400
    assert kept == "disk" or "--cache disk" in caught.value.fix


def test_an_unevenly_sized_set_is_kept_whole(tmp_path):
    """Later images larger than the first ones foretold."""

    @dataclass(frozen=True)
    class Growing:
        def __call__(self, path, short_side=None):
            side = 8 if int(path) < 600 else 64
            return np.full((side, side, 3), int(path) % 251, np.uint8)

    data = build("growing", None, [(str(n), str(n % 3), "train") for n in range(1000)], Growing())
    kept = open_images(data, replace(STILL, resize=0), cache="ram").store
    assert kept.image(599).shape == (8, 8, 3)
    assert [int(kept.image(n)[-1, -1, -1]) for n in (0, 599, 600, 999)] == [0, 97, 98, 246]
    assert not kept.uniform


def test_progress_reaches_the_end(data):
    for kept in ("none", "ram", "disk"):
        seen = []
        open_images(data, SPEC, cache=kept, progress=lambda *done, seen=seen: seen.append(done))
        assert seen[-1] == (24, 24)
        assert seen == sorted(seen)


# Processes


def workers_of(loader):
    return [worker.pid for worker in loader.pool.loader._iterator._workers]


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
    with Loader(source, SPEC, rows, targets, 2) as loader:
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
        with Loader(source, SPEC, rows, targets, 2) as loader:
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
    with Loader(source, SPEC, rows, targets, 1) as loader:
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
        import numpy as np
        from trainer.data import sampling
        from trainer.config import Input
        from trainer.data.datasets.records import build
        from trainer.data.loading import Loader, open_images

        rows = [(path, path[0], "train") for path in sys.argv[2:]]
        from pathlib import Path
        data = build("folder", Path(sys.argv[1]), rows)
        spec = Input(resize=40, crop=32)
        plan = np.tile(np.arange(len(rows)), (1000, 1))
        source = open_images(data, spec)
        try:
            with Loader(source, spec, np.arange(len(rows)), data.labels, 2) as loader:
                for step, _ in enumerate(loader.epoch(plan, sampling.keys(0, 0, *plan.shape))):
                    if step == 0:
                        workers = loader.pool.loader._iterator._workers
                        print(*[worker.pid for worker in workers], flush=True)
                    time.sleep(0.05)
        except KeyboardInterrupt:
            print("interrupted")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(data.root), *data.paths]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)
    assert not any(alive(pid) for pid in pids)


def test_ctrl_c_leaves_the_workers_to_a_parent_that_goes_on(data):
    source = open_images(data, SPEC, cache="none")
    rows, targets = data.rows("train"), data.targets("train")
    plan = np.tile(np.arange(16), (30, 1))
    with Loader(source, SPEC, rows, targets, 1) as loader:
        steps = loader.epoch(plan, sampling.keys(0, 0, *plan.shape))
        next(steps)
        os.kill(workers_of(loader)[0], signal.SIGINT)
        assert len(list(steps)) == 29


def test_workers_are_chosen_by_device_and_cache(data, monkeypatch):
    monkeypatch.setattr(loading, "processors", lambda: 16)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    kept, plain, mapped = (open_images(data, SPEC, cache=c) for c in ("ram", "none", "disk"))
    assert loading.chosen_workers(kept, cpu) == 0
    assert loading.chosen_workers(plain, cpu) == 8
    assert loading.chosen_workers(mapped, cpu) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert loading.chosen_workers(plain, cuda) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert loading.chosen_workers(plain, cuda) == 1
