"""Shards: the same arrays and the same scores, to the last bit, as the one file with all rows."""

import json
import re
import shlex
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from retrieval.embeddings import Embeddings, Split
from retrieval.errors import DmlError
from retrieval.evaluation import Settings, run
from retrieval.formats import shards
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading.load import load, save
from retrieval.problem import from_embeddings
from tests.retrieval.shards import NAMES, PARTS, N, X, Y, sharded, write


def scores(data):
    """All that `eval` computes, as JSON with every digit."""
    found = run(from_embeddings(data), Settings(recall_at=(1, 2, 4), nmi=False))
    return json.dumps(found.result, sort_keys=True)


@pytest.mark.parametrize(
    "suffix", [".npz", ".parquet", ".csv", ".csv.gz", ".jsonl", ".h5", ".arrow"]
)
def test_a_folder_and_a_pattern_equal_the_one_file(tmp_path, suffix):
    folder = sharded(tmp_path / "shards", suffix)
    write(tmp_path / f"whole{suffix}", slice(None))
    whole = load(tmp_path / f"whole{suffix}")
    for source in (folder, folder / f"*{suffix}", f"{folder}/part-*"):
        found = load(source)
        for role in ("vectors", "labels", "paths"):
            have, want = (getattr(d.splits["test"], role) for d in (found, whole))
            assert have.dtype == want.dtype
            assert have.tobytes() == want.tobytes()
        assert str(found.source) == str(source)
    assert scores(found) == scores(whole)
    if suffix == ".h5":
        np.testing.assert_array_equal(found.label_names, whole.label_names)


def test_vectors_and_labels_in_shards_of_npy(tmp_path):
    for n, rows in enumerate(PARTS):
        np.save(tmp_path / f"x{n}.npy", X[rows])
        np.save(tmp_path / f"y{n}.npy", Y[rows])
    np.save(tmp_path / "all.npy", Y)
    for labels in (tmp_path / "y*.npy", tmp_path / "all.npy"):
        found = load(tmp_path / "x*.npy", labels=labels).splits["test"]
        np.testing.assert_array_equal(found.vectors, X)
        np.testing.assert_array_equal(found.labels, Y)
    assert isinstance(found.vectors, np.memmap)
    assert not found.vectors.flags.writeable


def test_files_of_labels_are_compared_with_the_files_of_vectors(tmp_path):
    for n, rows in enumerate(PARTS):
        np.save(tmp_path / f"x{n}.npy", X[rows])
        np.save(tmp_path / f"y{n}.npy", Y[rows])
    np.save(tmp_path / "y3.npy", Y[:4])
    np.save(tmp_path / "y7.npy", Y[:6])
    with pytest.raises(DmlError) as error:
        load(tmp_path / "x*.npy", labels=tmp_path / "y*.npy")
    files = f"{tmp_path / 'y3.npy'} has 4 labels for the 5 vectors of {tmp_path / 'x3.npy'}."
    assert error.value.what == files
    (tmp_path / "y3.npy").unlink()  # files of other numbers of rows need not be as many
    np.save(tmp_path / "y7.npy", np.concatenate([Y[:6], Y[:4]]))
    assert len(load(tmp_path / "x*.npy", labels=tmp_path / "y*.npy").splits["test"].labels) == N


@pytest.mark.parametrize(
    "names", [("x.npy", "x.npy.gz"), ("x.csv.gz", "x.csv.zst"), ("X.1.npz", "X.1.H5")]
)
def test_two_forms_of_one_file_are_not_read_as_two_shards(tmp_path, names):
    np.save(tmp_path / "vectors.npy", X)
    (tmp_path / "twins").mkdir()
    for name in names:
        (tmp_path / "twins" / name).write_bytes(b"never read")
    both = tmp_path / "twins" / "*"
    for source, labels in ((both, None), (tmp_path / "vectors.npy", both)):
        with pytest.raises(DmlError, match="the same file") as error:
            load(source, labels=labels)
        assert all(str(tmp_path / "twins" / name) in error.value.what for name in names)


def test_a_file_with_two_names_in_a_set_is_an_error(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("a", "b"):
        np.save(tmp_path / "run" / f"{name}.npy", X)
    (tmp_path / "last").symlink_to("run")
    with pytest.raises(DmlError, match=r"last/a\.npy and .*run/a\.npy are the same file") as error:
        load(tmp_path / "**" / "*.npy")
    found = load(shlex.split(error.value.fix.rpartition(": ")[2])[0])
    assert len(found.splits["test"].vectors) == 2 * len(X)
    (tmp_path / "sides").mkdir()
    for side in ("query", "gallery"):  # each has the rows once
        (tmp_path / "sides" / f"{side}.npy").symlink_to(tmp_path / "run" / "a.npy")
    splits = load(tmp_path / "sides").splits
    assert [len(split.vectors) for split in splits.values()] == [len(X), len(X)]


def test_the_vectors_of_one_shard_at_a_time_are_held():
    held = []

    def read(file):
        assert not any(vectors() is not None for vectors in held), "those of the shard before"
        vectors = X.copy()
        held.append(weakref.ref(vectors))
        return Embeddings(file, "x", {"test": Split(vectors)})

    found = shards.join("set", [Path("a.npy"), Path("b.npy")], read)
    assert len(found.splits["test"].vectors) == 2 * len(X)


def test_keys_choose_an_array_in_every_shard(tmp_path):
    for n, rows in enumerate(PARTS):
        np.savez(tmp_path / f"{n}.npz", a=X[rows], b=-X[rows], y=Y[rows])
    found = load(f"{tmp_path}/*.npz::b,y").splits["test"]
    np.testing.assert_array_equal(found.vectors, -X)
    np.testing.assert_array_equal(found.labels, Y)
    assert found.taken == {"vectors": "b", "labels": "y"}


def test_a_set_may_be_the_gallery(tmp_path):
    folder = sharded(tmp_path / "shards", ".npz")
    found = load(folder / "part-0.npz", gallery=folder)
    assert {name: len(split.vectors) for name, split in found.splits.items()} == {
        "query": 5,
        "gallery": N,
    }


@pytest.mark.parametrize(
    ("other", "words"),
    [(X[:, :4], "5 dimensions .* the second of 4"), (X.astype(np.float16), "float32, .* float16")],
)
def test_shards_that_differ_are_both_named(tmp_path, other, words):
    np.save(tmp_path / "1.npy", X)
    np.save(tmp_path / "2.npy", other)
    with pytest.raises(DmlError, match=r"1\.npy and .*2\.npy do not belong") as error:
        load(tmp_path)
    assert re.search(words, error.value.why)


def test_labels_in_some_shards_only_are_an_error(tmp_path):
    np.savez(tmp_path / "1.npz", x=X, y=Y)
    np.savez(tmp_path / "2.npz", x=X)
    with pytest.raises(DmlError, match=r"1\.npz has labels and .*2\.npz has none"):
        load(tmp_path)
    np.savez(tmp_path / "2.npz", x=X, y=NAMES)
    with pytest.raises(DmlError, match=r"2\.npz are text, those of .*1\.npz are numbers"):
        load(tmp_path)


def test_label_names_that_differ_give_labels_by_name(tmp_path):
    for n, names in enumerate((["a", "b"], ["b", "c"])):
        split = {"test": Split(X[:4], np.array([0, 1, 1, 0]))}
        hdf5.write(tmp_path / f"{n}.h5", split, np.array(names))
    found = load(tmp_path)
    assert found.label_names is None
    assert found.splits["test"].labels.tolist() == list("abba") + list("bccb")


def test_large_integers_are_not_joined_as_floats(tmp_path):
    np.savez(tmp_path / "1.npz", x=X[:2], y=np.array([2**63 + 1, 2**63 + 2], np.uint64))
    np.savez(tmp_path / "2.npz", x=X[:2], y=np.array([1, 2**62 + 1]))
    labels = load(tmp_path).splits["test"].labels
    assert labels.tolist() == [2**63 + 1, 2**63 + 2, 1, 2**62 + 1]
    np.savez(tmp_path / "2.npz", x=X[:2], y=np.array([-1, 2**62 + 1]))
    labels = load(tmp_path).splits["test"].labels
    assert labels.tolist() == [str(2**63 + 1), str(2**63 + 2), "-1", str(2**62 + 1)]


def test_one_long_label_does_not_widen_those_of_the_other_shards(tmp_path):
    many = np.array(["a", "b"] * 5000)
    np.savez(tmp_path / "1.npz", x=np.ones((10_000, 1), np.float32), y=many)
    np.savez(tmp_path / "2.npz", x=np.ones((1, 1), np.float32), y=np.array(["c" * 3000]))
    labels = load(tmp_path).splits["test"].labels
    assert labels.nbytes < 200_000
    assert labels[-1] == "c" * 3000


def test_files_of_train_are_not_read_where_only_others_are_scored(tmp_path):
    for name in ("query", "gallery"):
        write(tmp_path / f"{name}-0.npz", PARTS[0])
    (tmp_path / "train-0.npz").write_bytes(b"damaged")
    assert set(load(tmp_path, train=False).splits) == {"query", "gallery"}
    with pytest.raises(DmlError, match="train-0"):
        load(tmp_path)


def test_names_of_files_tell_splits(tmp_path):
    for name, rows in (("query-0", PARTS[0]), ("gallery-0", PARTS[1]), ("gallery-1", PARTS[2])):
        np.savez(tmp_path / f"{name}.npz", x=X[rows], y=Y[rows])
    found = load(tmp_path).splits
    np.testing.assert_array_equal(found["query"].vectors, X[:5])
    np.testing.assert_array_equal(found["gallery"].vectors, X[5:15])
    alone = load(f"{tmp_path}/*.npz::gallery").splits
    assert list(alone) == ["test"]
    np.testing.assert_array_equal(alone["test"].vectors, X[5:15])
    np.savez(tmp_path / "more.npz", x=X, y=Y)
    with pytest.raises(DmlError, match="files of one split and files of none"):
        load(tmp_path)


def test_a_remark_on_all_shards_is_made_once(tmp_path):
    for n in range(3):
        frame = pd.DataFrame({"d0": [0.5, 1.5], "d1": [1.0, 2.0], "label": [1, 2], "z": [0.1, 0.2]})
        frame.to_csv(tmp_path / f"{n}.csv", index=False)
    assert load(tmp_path).notes == (f"{tmp_path}: not used: z",)


@pytest.mark.parametrize("key", ["model_sha256", "preprocessing"])
def test_shards_of_different_models_are_no_set(key, tmp_path, rng):
    X, labels = rng.standard_normal((6, 3)).astype(np.float32), np.array([0, 0, 0, 1, 1, 1])
    for n, value in enumerate(("one", "one", "other")):
        found = Embeddings("x", "x", {"test": Split(X, labels)}, attrs={key: value})
        save(tmp_path / f"part-{n}.h5", found)
    with pytest.raises(DmlError, match=r"part-0\.h5 and .*part-2\.h5 do not belong to one set"):
        load(tmp_path)
    (tmp_path / "part-2.h5").unlink()
    assert len(load(tmp_path).splits["test"].vectors) == 12
