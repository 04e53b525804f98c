"""Which files of a folder hold its embeddings."""

import gzip
import hashlib
import json
import os

import numpy as np
import pytest

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading.load import load
from retrieval.loading.sources import locate
from tests.retrieval.shards import NAMES, PARTS, X, Y, write


def named(place):
    return [file.name for file in place.files]


def test_rows_follow_the_natural_order_of_names(tmp_path):
    for name in ("part-10", "part-9", "part-2", "part-02", "part-1b", "part-1a"):
        np.save(tmp_path / f"{name}.npy", np.ones((1, 2)))
    stems = ["part-1a", "part-1b", "part-02", "part-2", "part-9", "part-10"]
    wanted = [f"{name}.npy" for name in stems]
    assert named(locate(tmp_path)) == wanted
    assert named(locate(tmp_path / "*.npy")) == wanted
    assert locate(f"{tmp_path}/*.npy::key").key == "key"


def test_other_files_in_a_folder_are_passed_over_and_other_formats_an_error(tmp_path):
    for name in ("_SUCCESS", ".part-0.parquet.crc", "_meta.parquet", "readme.md", "names.txt"):
        (tmp_path / name).write_text("x")
    np.save(tmp_path / "1.npy", np.ones((1, 2)))
    assert named(locate(tmp_path)) == ["1.npy"]
    (tmp_path / "1.csv").write_text("1,2\n")
    with pytest.raises(DmlError, match=r"several formats: \.csv, \.npy") as error:
        locate(tmp_path)
    assert f"'{tmp_path}/*.csv'" in error.value.fix


def test_a_half_written_file_is_no_part_of_a_set(tmp_path):
    write(tmp_path / "1.h5", PARTS[0])
    (tmp_path / "2.h5.partial").write_bytes(b"x")
    with pytest.raises(DmlError, match=r"2\.h5\.partial is half-written") as error:
        load(tmp_path)
    assert "--resume" in error.value.fix
    write(tmp_path / "2.h5", PARTS[1])  # and is being made again
    assert len(load(tmp_path).splits["test"].vectors) == 10


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
    for name, rows in (("train", slice(0, 20)), ("test", slice(20, 60))):
        for train in (True, False):
            alone = load(f"{tmp_path}::{name}", train=train).splits
            np.testing.assert_array_equal(alone["test"].vectors, X[rows])
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["validation"]}))
    with pytest.raises(DmlError, match="splits validation"):
        load(tmp_path)


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
    for packed in (["metadata.tsv"], [name], [name, "metadata.tsv"]):
        folder = tmp_path / f"packed {' '.join(packed)}"
        folder.mkdir()
        for file in (name, "metadata.tsv"):
            content = (tmp_path / file).read_bytes()
            target = folder / (f"{file}.gz" if file in packed else file)
            target.write_bytes(gzip.compress(content) if file in packed else content)
        found = load(folder).splits["test"]
        np.testing.assert_array_equal(found.vectors, X.astype(float))
        np.testing.assert_array_equal(found.labels, NAMES)
    np.save(tmp_path / "y.npy", Y)
    given = load(tmp_path, labels=tmp_path / "y.npy").splits["test"]
    np.testing.assert_array_equal(given.labels, Y)
    (tmp_path / "metadata.tsv").write_text("a\nb\n")
    with pytest.raises(DmlError, match="2 labels for 60 vectors"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "age", "noted"), [("new", 9, 1), ("old", 9, 0), ("new", -9, 0)]
)
def test_embeddings_of_a_run_that_was_trained_on_get_a_note(tmp_path, content, age, noted):
    file, network = tmp_path / "embeddings.h5", tmp_path / "best.pt"
    made_with = hashlib.sha256(b"old").hexdigest()
    hdf5.write(file, {"test": Split(X, Y)}, attrs={"checkpoint_sha256": made_with})
    network.write_text(content)
    when = file.stat().st_mtime + age
    os.utime(network, (when, when))
    for name in (file, tmp_path):
        notes = load(name).notes
        assert len(notes) == noted
        assert all(f"dmltool export {tmp_path} --force" in text for text in notes)
