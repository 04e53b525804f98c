"""Images to embedding files: streamed, killed and resumed, with bad images, on full disks."""

import json
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import onnx
import pytest

from exporter.onnx.metadata import Preprocessing
from retrieval.errors import DmlError
from retrieval.evaluation import Settings
from retrieval.loading.load import load
from retrieval.metrics import RECALL_AT
from tests.exporter.embedding.toy import (
    ATTRS,
    PREPARED,
    D,
    N,
    call,
    contents,
    draw,
    quarters,
    stop_after,
)
from tests.exporter.models import PROPERTIES, mean_model
from tests.forks import Forked
from tests.kills import Killed
from trainer.data.source import Source

ROOT = Path(__file__).parents[3]


def test_the_file_holds_the_embeddings_of_the_images_and_where_they_came_from(data, tmp_path):
    done = call(data, tmp_path / "x.h5")
    assert (done.path, done.splits, done.dim, done.dtype) == (
        tmp_path / "x.h5",
        {"test": N},
        D,
        "float32",
    )
    assert (done.computed, done.skipped, done.recall) == (N, (), None)
    found = load(tmp_path / "x.h5")
    pixels = Source(data, PREPARED.spec()).batch(np.arange(N))
    np.testing.assert_array_equal(found.splits["test"].vectors, quarters(pixels))
    np.testing.assert_array_equal(found.splits["test"].labels, data.labels)
    assert found.splits["test"].paths.tolist() == list(data.paths)
    assert found.label_names.tolist() == list(data.label_names)
    assert {key: found.attrs[key] for key in ATTRS} == ATTRS
    assert found.attrs["dataset"] == "toy"
    assert Preprocessing.from_dict(json.loads(found.attrs["preprocessing"])) == PREPARED
    assert len(found.attrs["paths_sha256"]) == 64
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images", "x.h5"]


@pytest.mark.parametrize("options", [{"workers": 3}, {"lanes": 3}, {"batch_size": 7}, {"lanes": 2}])
def test_threads_lanes_and_batch_size_change_nothing(data, tmp_path, options):
    call(data, tmp_path / "x.h5")
    call(data, tmp_path / "y.h5", **options)
    assert contents(tmp_path / "x.h5") == contents(tmp_path / "y.h5")


def test_splits_are_rows_of_the_data_set(data, tmp_path):
    splits = {name: data.rows(name) for name in ("query", "gallery")}
    done = call(data, tmp_path / "x.h5", splits=splits)
    assert done.splits == {"query": N // 2, "gallery": N // 2}
    found = load(tmp_path / "x.h5").splits
    assert found["gallery"].paths.tolist() == list(data.paths[1::2])
    np.testing.assert_array_equal(found["gallery"].labels, data.labels[1::2])


def test_progress_counts_images(data, tmp_path):
    heard = []
    call(data, tmp_path / "x.h5", progress=lambda *told: heard.append(told))
    assert heard[0] == ("embedding", 8, N)
    assert heard[-1] == ("embedding", N, N)
    assert [done for _, done, _ in heard] == sorted(done for _, done, _ in heard)


# Interrupted


def test_resume_computes_only_what_is_missing(data, tmp_path):
    call(data, tmp_path / "whole.h5")
    with pytest.raises(Killed):
        call(data, tmp_path / "x.h5", stop_after(24)[0])
    assert not (tmp_path / "x.h5").exists()
    with pytest.raises(DmlError, match="--resume to continue"):
        call(data, tmp_path / "x.h5")
    run, seen = stop_after(1000)
    done = call(data, tmp_path / "x.h5", run, resume=True)
    assert seen[0] == done.computed == N - 24
    assert contents(tmp_path / "x.h5") == contents(tmp_path / "whole.h5")


def test_resumed_batches_are_those_of_an_uninterrupted_run(data, tmp_path):
    """Some models round differently when an image is among others."""

    def biased(images):
        return quarters(images) + np.float32(images.mean())

    def breaking(images):
        stop(images)
        return biased(images)

    (Path(data.root) / data.paths[3]).unlink()  # leaves a hole in the first batch
    call(data, tmp_path / "whole.h5", biased, skip_bad=True)
    stop, _ = stop_after(23)
    with pytest.raises(Killed):
        call(data, tmp_path / "x.h5", breaking, skip_bad=True)
    assert call(data, tmp_path / "x.h5", biased, skip_bad=True, resume=True).computed == N - 24
    assert contents(tmp_path / "x.h5") == contents(tmp_path / "whole.h5")


def test_another_model_or_preprocessing_does_not_resume(data, tmp_path):
    with pytest.raises(Killed):
        call(data, tmp_path / "x.h5", stop_after(8)[0])
    darker = replace(PREPARED, mean=(0.5, 0.5, 0.5)).to_dict()  # as --mean of a foreign model
    for attrs in ({"model_sha256": "other"}, {"normalized": True}, {"preprocessing": darker}):
        with pytest.raises(DmlError, match=next(iter(attrs))):
            call(data, tmp_path / "x.h5", resume=True, attrs=ATTRS | attrs)


def test_an_existing_file_needs_force(data, tmp_path):
    call(data, tmp_path / "x.h5")
    before = (tmp_path / "x.h5").read_bytes()
    with pytest.raises(DmlError, match="exists"):
        call(data, tmp_path / "x.h5")
    with pytest.raises(DmlError, match="exists"):
        call(data, tmp_path / "x.h5", resume=True, attrs=ATTRS | {"model_sha256": "other"})
    assert (tmp_path / "x.h5").read_bytes() == before
    call(data, tmp_path / "x.h5", lambda x: quarters(x) + 1, force=True)
    assert (tmp_path / "x.h5").read_bytes() != before


KILLED = """
import json, sys, time
from pathlib import Path
import numpy as np
from exporter.embedding.engine import Engine
from exporter.embedding.writing import EmbedSettings, embed
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from trainer.data.datasets.records import build
model, root, target, half = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "half"
session = Session(describe(model), "cpu", threads=1)
data = build("toy", root, [(p.name, "abc"[n % 3], "test") for n, p in
                           enumerate(sorted(root.iterdir()))])
def run(images):
    time.sleep(0.002)  # long enough for the killer to come in between
    return session.run(images)
print("start", flush=True)
engine = Engine(run, 3, session.preprocessing, {"model_sha256": session.model.sha256})
settings = EmbedSettings(batch_size=8, resume=True, half=half, skip_bad=True)
done = embed(engine, data, {"test": np.arange(len(data))}, target, settings,
             progress=lambda *told: print(*told, flush=True))
print(json.dumps(done.computed), flush=True)
"""


def marked(partial):
    """How many rows a file that is being written holds."""
    if not partial.exists():
        return 0
    with h5py.File(partial) as file:
        if "progress" not in file:
            return len(file["test/labels"])
        return int(file["progress/test"][:].sum())


@pytest.mark.parametrize("kind", ["plain", "half"])
def test_killed_at_random_moments_resumes_to_the_same_file(tmp_path, kind):
    images, model, target = tmp_path / "images", tmp_path / "m.onnx", tmp_path / "killed.h5"
    images.mkdir()
    draw(images, 400)
    if kind == "half":
        (images / "0017.jpg").write_bytes(b"no image")
    model.write_bytes(mean_model(properties=PROPERTIES).SerializeToString())
    onnx.checker.check_model(str(model))

    def start(path):
        return Forked("-c", KILLED, model, images, path, kind, lines=True)

    chance, kills = random.Random(kind), 0
    while not target.exists():
        there = marked(Path(f"{target}.partial"))
        process = start(target)
        told = [process.line()]
        if kills < 5:  # the laying out of the file, amid the rows, and the last steps
            last = "embedding 400 400" if kills == 4 else ""
            lines = chance.choice([0, chance.randrange(1, 12)])
            while told[-1].strip() != last if last else len(told) <= lines:
                told.append(process.line())
            time.sleep(chance.uniform(0.0, 0.01))
            process.send(signal.SIGKILL)
        code, rest, _ = process.end()
        told += rest.splitlines()
        kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL)
        assert marked(Path(f"{target}.partial")) >= there or target.exists()
    if code == 0:
        assert int(told[-1]) == 400 - (kind == "half") - there
    assert kills >= 4
    start(tmp_path / "whole.h5").end()
    assert contents(target) == contents(tmp_path / "whole.h5")
    if kind == "half":
        assert load(target).attrs["skipped"] == 1
    # What a kill left behind goes when it is resumed.
    assert start(target).end()[1].splitlines()[-1] == "0"
    assert {p.name for p in tmp_path.iterdir()} == {"images", "m.onnx", "killed.h5", "whole.h5"}


# Bad images


def test_an_image_that_vanished_is_named_and_the_rest_can_be_resumed(data, tmp_path):
    lost = Path(data.root) / data.paths[30]
    pixels = lost.read_bytes()
    lost.unlink()
    with pytest.raises(DmlError, match=lost.name) as caught:
        call(data, tmp_path / "x.h5")
    assert "no such file" in caught.value.why
    assert "--resume --skip-bad" in caught.value.fix
    assert not (tmp_path / "x.h5").exists()
    lost.write_bytes(pixels)
    assert call(data, tmp_path / "x.h5", resume=True).computed == N - 24
    call(data, tmp_path / "whole.h5")
    assert contents(tmp_path / "x.h5") == contents(tmp_path / "whole.h5")


def test_a_whole_batch_of_bad_images_is_skipped_but_not_a_whole_split(data, tmp_path):
    for place in range(8, 16):
        (Path(data.root) / data.paths[place]).unlink()
    assert call(data, tmp_path / "x.h5", skip_bad=True).splits == {"test": N - 8}
    with pytest.raises(DmlError, match="No image of query"):
        call(data, tmp_path / "y.h5", splits={"query": np.arange(8, 16)}, skip_bad=True)


def test_embeddings_of_another_length_are_refused(data, tmp_path):
    with pytest.raises(DmlError, match="gave embeddings of 3 numbers, not 12"):
        call(data, tmp_path / "y.h5", lambda images: quarters(images)[:, :3])


# Full disks

FULL = """
import os, resource, sys
import numpy as np
from pathlib import Path
from exporter.embedding.engine import Engine
from exporter.embedding.writing import EmbedSettings, embed
from exporter.onnx.metadata import Preprocessing
from retrieval.errors import DmlError
from trainer.data.datasets.records import build
root, target = Path(sys.argv[1]), sys.argv[2]
os.posix_fallocate = lambda *_: None  # blocks that the disk promises and does not have
data = build("toy", root, [(p.name, "a", "test") for p in sorted(root.iterdir())])
prepared = Preprocessing(0, True, 16, "bilinear", (0.0,) * 3, (1.0,) * 3)
def run(images):
    if run.calls == 3:  # from here on the file system has no more room
        size = os.path.getsize(target + ".partial")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, size))
    run.calls += 1
    return images[:, :4, :4].reshape(len(images), -1).repeat(100, 1).astype("f4")
run.calls = 0 if sys.argv[3] == "full" else 10
try:
    engine, settings = Engine(run, 4800, prepared, {}), EmbedSettings(batch_size=4, resume=True)
    done = embed(engine, data, {"test": np.arange(50)}, target, settings)
    print("computed", done.computed)
except DmlError as error:
    print(error)
"""


def test_a_full_disk_is_told_and_leaves_nothing_that_looks_whole(data, tmp_path):
    def start(target, how):
        code, printed, errors = Forked("-c", FULL, data.root, target, how).end()
        assert (code, errors) == (0, "")
        return printed

    told = start(tmp_path / "x.h5", "full")
    assert "the disk is full" in told
    assert "--resume" in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images", "x.h5.partial"]
    there = marked(tmp_path / "x.h5.partial")
    assert 0 < there < N
    assert start(tmp_path / "x.h5", "room") == f"computed {N - there}\n"
    start(tmp_path / "whole.h5", "room")
    assert contents(tmp_path / "x.h5") == contents(tmp_path / "whole.h5")


@pytest.mark.parametrize("name", ["toy", "sop"])
def test_a_file_records_the_k_that_papers_give_for_its_data_set(name, data, tmp_path):
    call(replace(data, name=name), tmp_path / "x.h5")
    found = load(tmp_path / "x.h5")
    assert found.attrs.get("recall_at") == ("[1, 10, 100, 1000]" if name == "sop" else None)
    assert Settings().of(found).recall_at == ((1, 10, 100, 1000) if name == "sop" else RECALL_AT)
