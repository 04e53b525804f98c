"""Shards: the same arrays and the same scores, to the last bit, as the one file with all rows."""

import gzip
import json
import re

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import ipc

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.evaluation import Settings, run
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading import load
from retrieval.merging import merge
from retrieval.problem import from_embeddings

N, D = 60, 5
rng = np.random.default_rng(3)
Y = np.arange(N) % 10
X = (rng.standard_normal((10, D))[Y] + rng.standard_normal((N, D))).astype(np.float32)
NAMES = np.array([f"class {y}" for y in Y])
PATHS = np.array([f"{n}.png" for n in range(N)])
# Twelve parts, so that part-10 and part-11 come before part-2 in the order of letters.
PARTS = [slice(5 * n, 5 * n + 5) for n in range(12)]


def write(path, rows):
    """Some rows in the format that the suffix names."""
    table = pd.DataFrame({"label": NAMES[rows], "path": PATHS[rows]})
    table = table.join(pd.DataFrame(X[rows], columns=[f"d{n}" for n in range(D)]))
    suffix = "".join(path.suffixes)
    if suffix == ".npz":
        np.savez(path, embeddings=X[rows], labels=NAMES[rows], paths=PATHS[rows])
    elif suffix == ".parquet":
        table.to_parquet(path)
    elif suffix == ".csv":
        table.to_csv(path, index=False)
    elif suffix == ".csv.gz":
        path.write_bytes(gzip.compress(table.to_csv(index=False).encode()))
    elif suffix == ".jsonl":
        table.to_json(path, orient="records", lines=True, double_precision=15)
    elif suffix == ".h5":
        hdf5.write(path, {"test": Split(X[rows], Y[rows], PATHS[rows])}, np.unique(NAMES))
    elif suffix == ".arrow":
        lists = pa.array(X[rows].tolist(), pa.list_(pa.float32()))
        whole = pa.table({"embedding": lists, "label": NAMES[rows], "path": PATHS[rows]})
        with ipc.new_stream(path, whole.schema) as out:
            out.write_table(whole)


def sharded(folder, suffix):
    folder.mkdir()
    for n, rows in enumerate(PARTS):
        write(folder / f"part-{n}{suffix}", rows)
    return folder


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
    np.savez(tmp_path / "more.npz", x=X, y=Y)
    with pytest.raises(DmlError, match="files of one split and files of none"):
        load(tmp_path)


def test_a_folder_that_save_to_disk_wrote(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    files = []
    for n, rows in enumerate(PARTS):
        # As datasets names them; the order is that of state.json, not of the names.
        files.append({"filename": f"data-{(n + 3) % 12:05}-of-00012.arrow"})
        write(folder / files[-1]["filename"], rows)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": None}))
    found = load(folder).splits["test"]
    np.testing.assert_array_equal(found.vectors, X)
    np.testing.assert_array_equal(found.labels, NAMES)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../x.arrow"}]}))
    with pytest.raises(DmlError, match="does not list the files"):
        load(folder)


def test_a_dict_of_data_sets_gives_splits(tmp_path):
    for split, rows in (("train", slice(0, 20)), ("test", slice(20, 60))):
        (tmp_path / split).mkdir()
        write(tmp_path / split / "data-00000-of-00001.arrow", rows)
        listed = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (tmp_path / split / "state.json").write_text(json.dumps(listed))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    found = load(tmp_path).splits
    np.testing.assert_array_equal(found["train"].vectors, X[:20])
    np.testing.assert_array_equal(found["test"].vectors, X[20:])
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["validation"]}))
    with pytest.raises(DmlError, match="splits validation"):
        load(tmp_path)


def test_a_remark_on_all_shards_is_made_once(tmp_path):
    for n in range(3):
        frame = pd.DataFrame({"d0": [0.5, 1.5], "d1": [1.0, 2.0], "label": [1, 2], "z": [0.1, 0.2]})
        frame.to_csv(tmp_path / f"{n}.csv", index=False)
    assert load(tmp_path).notes == (f"{tmp_path}: not used: z",)


def test_merging_takes_sets(tmp_path):
    folder = sharded(tmp_path / "shards", ".npz")
    write(tmp_path / "whole.npz", slice(None))
    merge([folder, tmp_path / "whole.npz"], tmp_path / "merged.h5")
    with h5py.File(tmp_path / "merged.h5") as file:
        halves = file["test/embeddings"][:]
    np.testing.assert_array_equal(halves[:, :D], halves[:, D:])


@pytest.mark.parametrize("name", ["vectors.tsv", "tensors.tsv"])
def test_the_pair_of_files_of_tensorboards_projector(tmp_path, name):
    rows = ["\t".join(map(repr, row)) for row in X.astype(float).tolist()]
    (tmp_path / name).write_text("\n".join(rows) + "\n")
    one = "\n".join(NAMES)  # a single column has no header there
    several = "\n".join(["label\tnumber", *(f"{label}\t{n}" for n, label in enumerate(NAMES))])
    for metadata in (one, several):
        (tmp_path / "metadata.tsv").write_text(metadata + "\n")
        found = load(tmp_path).splits["test"]
        np.testing.assert_array_equal(found.vectors, X.astype(float))
        np.testing.assert_array_equal(found.labels, NAMES)
        assert found.taken["labels"] == str(tmp_path / "metadata.tsv")
    np.save(tmp_path / "y.npy", Y)
    given = load(tmp_path, labels=tmp_path / "y.npy").splits["test"]
    np.testing.assert_array_equal(given.labels, Y)
    (tmp_path / "metadata.tsv").write_text("a\nb\n")
    with pytest.raises(DmlError, match="2 labels for 60 vectors"):
        load(tmp_path)
