"""Files behind addresses: which of them are taken. fsspec's memory is the server."""

import gzip
import io
import json

import numpy as np
import pytest

from retrieval import evaluate
from retrieval.embeddings import Embeddings, Split
from retrieval.errors import DmlError
from retrieval.formats.arrays import files_in
from retrieval.formats.hdf5.writing import write
from retrieval.loading.inputs import Inputs
from retrieval.loading.load import load, save
from retrieval.loading.sources import locate
from tests.commands import call
from tests.retrieval.remote.copies import npy


@pytest.fixture
def shards(server, clustered):
    """60 vectors and labels in shards whose names sort otherwise than their numbers."""
    X, labels = clustered
    for n, name in ((0, "2"), (20, "9"), (40, "10")):
        server.pipe(f"/b/x/part-{name}.npy", npy(X[n : n + 20]))
        server.pipe(f"/b/y/part-{name}.txt.gz", gzip.compress(lines(labels[n : n + 20])))
    server.pipe("/b/x/_SUCCESS", b"")
    return X, labels


def lines(labels):
    return "\n".join(map(str, labels)).encode()


def test_patterns_and_folders_behind_addresses_have_the_scores_of_one_file(shards, server):
    X, labels = shards
    wanted = evaluate(X, labels, nmi=False)["distances"]
    for name in ("memory://b/x/*.npy", "memory://b/x"):
        found = evaluate(name, labels="memory://b/y/part-*.txt.gz", nmi=False)
        assert found["distances"] == wanted
    server.pipe("/b/z/part-1.txt", lines(labels))
    assert evaluate(name, labels="memory://b/z", nmi=False)["distances"] == wanted


def test_results_and_notes_name_the_address_and_not_the_copy(shards, folder):
    out = call("eval", "memory://b/x", "--labels", "memory://b/y/*.gz", "--no-nmi", "--json")
    source = json.loads(out.stdout)["source"]
    assert source["file"] == "memory://b/x"
    assert source["taken"]["test"] == {"labels": "memory://b/y/*.gz"}
    assert str(folder) not in out.output


def test_a_key_a_run_folder_and_a_gallery_are_found_behind_addresses(server, clustered, tmp_path):
    X, labels = clustered
    np.savez(tmp_path / "x.npz", a=X, b=2 * X, y=labels)
    server.put(str(tmp_path / "x.npz"), "/b/x.npz")
    np.testing.assert_array_equal(load("memory://b/x.npz::b").splits["test"].vectors, 2 * X)
    write(tmp_path / "run.h5", {"test": load(tmp_path / "x.npz::a,y").splits["test"]})
    server.put(str(tmp_path / "run.h5"), "/run/embeddings.h5")
    server.pipe("/run/config.toml", b"")
    assert load("memory://run").source == "memory://run/embeddings.h5"
    both = load("memory://b/x.npz::a,y", gallery="memory://run")
    assert len(both.splits["gallery"].vectors) == 60


def test_the_pair_of_the_projector_and_a_hugging_face_folder_are_found(server, clustered):
    pa = pytest.importorskip("pyarrow")
    X, labels = clustered
    server.pipe("/p/vectors.tsv", "\n".join("\t".join(map(str, row)) for row in X).encode())
    server.pipe("/p/metadata.tsv", lines(labels))
    np.testing.assert_array_equal(load("memory://p").splits["test"].labels, labels)
    table = pa.table({"embedding": list(X), "label": labels})
    for split in ("test", "train"):
        out = io.BytesIO()
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
        server.pipe(f"/hf/{split}/data-0.arrow", out.getvalue())
        state = {"_data_files": [{"filename": "data-0.arrow"}]}
        server.pipe(f"/hf/{split}/state.json", json.dumps(state).encode())
    server.pipe("/hf/dataset_dict.json", b'{"splits": ["train", "test"]}')
    found = load("memory://hf").splits
    assert set(found) == {"train", "test"}
    np.testing.assert_array_equal(found["test"].vectors, X)
    server.rm("/hf/test/data-0.arrow")
    with pytest.raises(DmlError, match=r"hf lists test/data-0\.arrow, which is not there"):
        load("memory://hf")


def test_files_of_train_are_downloaded_only_if_they_are_read_and_then_kept(
    server, downloads, clustered
):
    X, _ = clustered
    for n, name in ((0, "train"), (20, "test")):
        server.pipe(f"/b/{name}-0.npy", npy(X[n : n + 20]))
        server.pipe(f"/b/{name}/0.npy", npy(X[n : n + 20]))
    for name in ("memory://b", "memory://b/*.npy", "memory://b/**/0.npy"):
        found = load(name, train=False).splits
        np.testing.assert_array_equal(found["test"].vectors, X[20:40])
    assert downloads == ["test-0.npy", "test-0.npy", "test/0.npy"]
    assert set(load("memory://b").splits) == {"train", "test"}
    load("memory://b", train=False)
    (copy,) = Inputs("memory://b", train=False).files
    assert copy.with_name("train-0.npy").exists()


def test_a_pattern_stands_for_the_same_names_as_on_a_disk(server, tmp_path):
    """Those that begin with a dot are copies which macOS and Jupyter make."""
    for name in ("1.npy", "._1.npy", ".old/1.npy", "in/2.npy", "in/.3.npy"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "d" / name, np.ones((1, 2)))
    server.put(str(tmp_path / "d"), "/b/.c", recursive=True)
    for pattern in ("*.npy", "**/*.npy", ".*.npy", ".old/*.npy", "in/.*"):
        there, here = (locate(f"{root}/{pattern}") for root in ("memory://b/.c", tmp_path / "d"))
        assert [file.name for file in there.files] == [file.name for file in here.files]


def test_a_key_chooses_files_of_one_split_as_in_a_local_folder(server, clustered, tmp_path):
    X, _ = clustered
    for n, name in ((0, "train"), (20, "test")):
        np.save(tmp_path / f"{name}-0.npy", X[n : n + 20])
    server.put(str(tmp_path / "t*"), "/b/c")
    for where in (str(tmp_path), f"{tmp_path}/*.npy", "memory://b/c", "memory://b/c/*.npy"):
        for n, name in ((0, "train"), (20, "test")):
            found = load(f"{where}::{name}", train=False).splits["test"]
            np.testing.assert_array_equal(found.vectors, X[n : n + 20])
        names = [f"{where}::test", f"{where}::train"]
        both = Inputs(*names, train=False)
        for n, name in ((20, names[0]), (0, names[1])):
            np.testing.assert_array_equal(both.load(name).splits["test"].vectors, X[n : n + 20])


@pytest.mark.parametrize("names", [("train-0", "train-1"), ("train-0", "test-1"), ("train-0",)])
def test_a_key_chooses_the_split_inside_files_that_are_named_after_a_split(names, tmp_path):
    """Such as files of dmltool, of which each holds `train` and `test`."""
    rng = np.random.default_rng(0)
    whole = {
        name: {split: rng.standard_normal((n, 4)) for split, n in (("train", 6), ("test", 4))}
        for name in names
    }
    for name, splits in whole.items():
        data = {split: Split(rows, np.arange(len(rows)) // 2) for split, rows in splits.items()}
        save(tmp_path / f"{name}.h5", Embeddings("made", "hdf5", data))
    for where in (tmp_path, f"{tmp_path}/*.h5"):
        [(split, found)] = load(f"{where}::train").splits.items()
        named = [name for name in names if name.startswith("train")]
        assert split == "train"
        rows = np.concatenate([whole[name]["train"] for name in named])
        np.testing.assert_array_equal(found.vectors, rows)


def test_a_key_names_an_array_of_the_only_file(server, clustered, tmp_path):
    X, _ = clustered
    np.savez(tmp_path / "test.npz", train=X[:20], test=X[20:40], gallery=X[40:])
    server.put(str(tmp_path / "test.npz"), "/b/test.npz")
    for where in (tmp_path / "test.npz", "memory://b/test.npz"):
        [(split, found)] = load(f"{where}::test").splits.items()
        assert split == "test"
        np.testing.assert_array_equal(found.vectors, X[20:40])


def test_all_files_of_a_set_of_labels_are_downloaded_whatever_their_names(
    server, downloads, clustered
):
    X, labels = clustered
    for n, name in ((0, "train"), (20, "test")):
        server.pipe(f"/b/y/{name}-0.npy", npy(labels[n : n + 20]))
    server.pipe("/all.npy", npy(X[:40]))
    found = load("memory://all.npy", labels="memory://b/y", train=False).splits["test"]
    assert found.labels.tolist() == [*labels[20:40], *labels[:20]]
    assert sorted(downloads) == ["all.npy", "test-0.npy", "train-0.npy"]
    out = call("eval", "memory://all.npy", "--labels", "memory://b/y", "--no-nmi")
    assert out.exit_code == 0, out.output
    both = Inputs("memory://b/y::a", labels=["memory://b/y::b"], train=False)
    assert [len(place.files) for place in both.places.values()] == [2, 2]


def test_files_of_train_are_left_out_only_if_the_others_mean_the_same_without_them(
    server, clustered, tmp_path
):
    for name in ("test/query-0", "test/gallery-0", "train/0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / f"{name}.npy", clustered[0])
    server.put(str(tmp_path / "t*"), "/b", recursive=True)
    for where in (tmp_path, "memory://b"):
        assert list(load(f"{where}/**/*.npy", train=False).splits) == ["test"]


@pytest.mark.parametrize("version", [2, 3])
def test_of_a_zarr_store_only_the_arrays_whose_addresses_are_given_are_downloaded(
    server, downloads, clustered, tmp_path, version
):
    zarr = pytest.importorskip("zarr")
    X, labels = clustered
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    for name, array in (("a", X), ("b", 2 * X), ("y", labels)):
        group.create_array(name, data=array)
    server.put(str(tmp_path / "x.zarr"), "/b/x.zarr", recursive=True)
    files = {name: len(files_in(tmp_path / "x.zarr" / name)) for name in ("", "b", "y")}
    found = load("memory://b/x.zarr/b", labels="memory://b/x.zarr/y").splits["test"]
    np.testing.assert_array_equal(found.vectors, 2 * X)
    np.testing.assert_array_equal(found.labels, labels)
    assert len(downloads) == files["b"] + files["y"]
    load("memory://b/x.zarr::b")  # all arrays, as docs/files.md says
    assert len(downloads) == files["b"] + files["y"] + files[""]
