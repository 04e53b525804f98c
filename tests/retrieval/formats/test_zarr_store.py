"""Zarr stores, also damaged and hostile ones."""

import json
import random
from contextlib import suppress

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.loading.load import load


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_arrays_and_groups_are_read(tmp_path, clustered, version):
    zarr = pytest.importorskip("zarr")
    X, labels = clustered
    one = zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(7, 3), zarr_format=version)
    assert one.shape == X.shape
    np.testing.assert_array_equal(load(tmp_path / "x.zarr").splits["test"].vectors, X)
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=version)
    group.create_array("embeddings", data=X.astype("float16"))
    group.create_array("labels", data=labels)
    found = load(tmp_path / "g").splits["test"]
    np.testing.assert_array_equal(found.vectors, X.astype("float16"))
    np.testing.assert_array_equal(found.labels, labels)
    assert load(tmp_path / "x.zarr", labels=tmp_path / "g::labels").splits["test"].labels[1] == 1
    both = load(tmp_path / "*.zarr")
    assert both.splits["test"].vectors.shape == X.shape


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dtype", ["U3", "S3"])
@pytest.mark.filterwarnings("ignore:The data type")  # version 3 has no name for it yet
def test_labels_of_fixed_width_are_read(tmp_path, version, dtype):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=version)
    group.create_array("embeddings", data=np.eye(3))
    group.create_array("labels", data=np.array(["cat", "dog", "ox"], dtype))
    assert load(tmp_path / "g").splits["test"].labels.tolist() == ["cat", "dog", "ox"]


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_that_are_not_stored_are_told(tmp_path, version):
    zarr = pytest.importorskip("zarr")
    options = {"shape": (60, 4), "chunks": (10, 4), "dtype": "f4", "fill_value": 0}
    array = zarr.create_array(tmp_path / "x.zarr", zarr_format=version, **options)
    array[:20] = 1
    (told,) = load(tmp_path / "x.zarr").notes
    assert told.endswith("x.zarr: 4 of its 6 chunks are not stored; they read as 0.0")
    array[20:] = 2
    assert not load(tmp_path / "x.zarr").notes


def test_zarr_codecs_that_are_not_listed_links_and_bombs_are_refused(tmp_path):
    zarr = pytest.importorskip("zarr")
    store = tmp_path / "x.zarr"
    zarr.create_array(store, data=np.ones((40, 3), np.float32), zarr_format=2)
    meta = json.loads((store / ".zarray").read_text())
    for change, what in (
        ({"compressor": {"id": "pickle"}}, "codec pickle"),
        ({"filters": [{"id": "pickle"}]}, "codec pickle"),
        ({"shape": [10**9, 3]}, "claims"),
        ({"chunks": [10**9, 3]}, "claims"),
    ):
        (store / ".zarray").write_text(json.dumps(meta | change))
        with pytest.raises(DmlError, match=what):
            load(store)
    (store / ".zarray").write_text(json.dumps(meta))
    (store / "link").symlink_to("/etc/hostname")
    with pytest.raises(DmlError, match="holds a link"):
        load(store)


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("version", [2, 3])
def test_damaged_zarr_stores_are_errors_or_arrays(tmp_path, clustered, version):
    zarr = pytest.importorskip("zarr")
    store = tmp_path / "x.zarr"
    zarr.create_array(store, data=clustered[0], chunks=(20, 8), zarr_format=version)
    files = sorted(path for path in store.rglob("*") if path.is_file())
    rng = random.Random(version)
    for _ in range(40):
        path = rng.choice(files)
        sound = path.read_bytes()
        damaged = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.randint(1, len(damaged))] if rng.random() < 0.3 else damaged)
        with suppress(DmlError):
            assert load(store).splits["test"].vectors.ndim == 2
        path.write_bytes(sound)
    np.testing.assert_array_equal(load(store).splits["test"].vectors, clustered[0])


def test_zarr_stores_behind_addresses(tmp_path, clustered, monkeypatch):
    zarr = pytest.importorskip("zarr")
    import fsspec

    monkeypatch.setenv("DMLTOOL_CACHE", str(tmp_path / "cache"))
    X, _ = clustered
    zarr.create_array(tmp_path / "x.zarr", data=X, chunks=(7, 3))
    server = fsspec.filesystem("memory")
    server.put(str(tmp_path / "x.zarr"), "/z/x.zarr", recursive=True)
    np.testing.assert_array_equal(load("memory://z/x.zarr").splits["test"].vectors, X)
