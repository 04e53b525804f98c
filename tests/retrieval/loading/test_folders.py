"""Which files of a folder hold its embeddings."""

import errno
import gzip
import hashlib
import json
import os

import numpy as np
import pytest

from retrieval.distributed.world import World
from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.formats.shard_sets import Shard
from retrieval.loading import folders
from retrieval.loading.load import load
from retrieval.loading.sources import locate
from tests.commands import call
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
    (tmp_path / "old.npy").mkdir()
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
    for split, what in (("validation", "lists the split validation"), ("mine", "splits mine")):
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": [split]}))
        with pytest.raises(DmlError, match=what):
            load(tmp_path)


def test_a_bracket_in_a_pattern_is_explained(tmp_path):
    (tmp_path / "x[0]").mkdir()
    np.save(tmp_path / "x[0]" / "a.npy", X)
    with pytest.raises(DmlError, match=r"\[\[\] for a bracket itself"):
        load(tmp_path / "x[0]" / "*.npy")
    np.testing.assert_array_equal(load(tmp_path / "x[[]0]" / "*.npy").splits["test"].vectors, X)


def test_a_folder_of_labels_is_one_set(tmp_path):
    folder = tmp_path / "labels"
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    np.save(tmp_path / "x.npy", X)
    for part, rows in ((2, slice(0, 40)), (10, slice(40, 60))):
        (folder / f"part-{part}.txt").write_text("\n".join(NAMES[rows]))
    found = load(tmp_path / "x.npy", labels=folder).splits["test"]
    np.testing.assert_array_equal(found.labels, NAMES)
    assert call("eval", tmp_path / "x.npy", "--labels", folder, "--json").exit_code == 0
    with pytest.raises(DmlError, match="without embedding files"):
        load(folder)
    (folder / "part-3.json").write_text("[1]")
    with pytest.raises(DmlError, match=r"several formats: \.json, \.txt"):
        load(tmp_path / "x.npy", labels=folder)


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
    columns = "\n".join(["word\tsort", *(f"w{n}\t{label}" for n, label in enumerate(NAMES))])
    (tmp_path / "metadata.tsv").write_text(columns)
    with pytest.raises(DmlError, match="several columns and none called label") as error:
        load(tmp_path)
    labels = error.value.fix.partition("--labels ")[2].strip("'")
    assert len(load(tmp_path, labels=labels).splits["test"].labels) == len(NAMES)
    (tmp_path / "metadata.tsv").write_text("a\nb\n")
    with pytest.raises(DmlError, match="2 labels for 60 vectors"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["vectors.tsv", "tensors.tsv"])
def test_the_first_vector_of_the_projector_is_no_header(tmp_path, name):
    (tmp_path / name).write_text("0\t1\n2\t3\n4\t5\n")  # pandas would call its columns 0 and 1
    (tmp_path / "metadata.tsv").write_text("a\nb\na\n")
    found = load(tmp_path).splits["test"]
    assert found.vectors.tolist() == [[0, 1], [2, 3], [4, 5]]
    (tmp_path / "metadata.tsv").write_text("a\nb\n")
    with pytest.raises(DmlError, match="2 labels for 3 vectors"):
        load(tmp_path)
    (tmp_path / name).write_text("0\t1\n2\t3.5\n4\t5\n")  # as pandas writes by default
    assert load(tmp_path).splits["test"].vectors.tolist() == [[2, 3.5], [4, 5]]


def test_quotes_in_the_files_of_the_projector_are_characters(tmp_path):
    (tmp_path / "vectors.tsv").write_text("1\t2\n3\t4\n5\t6\n")
    (tmp_path / "metadata.tsv").write_text('"\nit"s\n"\n')
    assert load(tmp_path).splits["test"].labels.tolist() == ['"', 'it"s', '"']
    (tmp_path / "metadata.tsv").write_text('word\tlabel\n"\ta\nx\tb\ny\ta\n')
    assert load(tmp_path).splits["test"].labels.tolist() == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("left", "options"),
    [("embeddings.h5", ""), ("embeddings-2-of-8.h5", " --shard 2/8"), ("train.h5", None)],
)
def test_a_run_whose_export_was_interrupted_is_explained_as_a_run(tmp_path, left, options):
    (tmp_path / "config.toml").touch()
    (tmp_path / "best.pt").write_bytes(b"x")
    (tmp_path / f"{left}.partial").write_bytes(b"x")
    with pytest.raises(DmlError, match="is a run") as error:
        load(tmp_path)
    again = f"dmltool export {tmp_path}"
    again = f"Export it: {again}" if options is None else f"{again}{options} --resume"
    assert error.value.fix.endswith(again)


def test_the_shards_that_were_exported_into_a_run_are_its_embeddings(tmp_path):
    for name in ("config.toml", "best.pt", "last.pt"):
        (tmp_path / name).write_bytes(b"x")
    write(tmp_path / "train.h5", PARTS[5])
    write(tmp_path / "others-1-of-2.h5", PARTS[5])
    for number in (1, 2):
        attrs = Shard(number, 2, 10, 5, "abc").attribute()
        split = Split(X[PARTS[number]], Y[PARTS[number]])
        hdf5.write(tmp_path / f"embeddings-{number}-of-2.h5", {"test": split}, attrs=attrs)
    np.testing.assert_array_equal(load(tmp_path).splits["test"].vectors, X[5:15])
    (tmp_path / "embeddings-1-of-2.h5").unlink()
    with pytest.raises(DmlError, match="not a whole set"):
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


def test_only_the_first_process_reads_the_network_of_a_run(tmp_path, monkeypatch):
    file, network = tmp_path / "embeddings.h5", tmp_path / "best.pt"
    hdf5.write(file, {"test": Split(X, Y)}, attrs={"checkpoint_sha256": "0" * 64})
    network.write_text("new")
    when = file.stat().st_mtime + 9
    os.utime(network, (when, when))
    told = []
    progress = lambda *stage: told.append(stage)  # noqa: E731
    assert len(load(file, progress=progress).notes) == 1
    assert told == [("reading best.pt", 3, 3)]
    assert load(file, progress=progress, world=World(rank=1, size=2)).notes == ()
    assert len(told) == 1

    def unreadable(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folders, "sha256", unreadable)
    assert load(file).notes == ()
    network.unlink()
    network.mkdir()
    assert load(file).notes == ()
    network.rmdir()
    assert load(file).notes == ()
