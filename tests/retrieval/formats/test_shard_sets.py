"""Sets of shards that know of each other: a part of a set gives an error and no scores."""

import json
import re

import numpy as np
import pytest

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.formats.shard_sets import PART, Shard, part_name, shard_of
from retrieval.loading.load import load
from tests.commands import call
from tests.retrieval.shards import X, Y

OF = 4


def put(path, number, of=OF, split="test", start=0, **changes):
    """Write a shard of fifteen rows."""
    said = {"rows": 60, "batch_size": 5, "list_sha256": "abc"} | changes
    rows = slice(start + 15 * (number - 1), start + 15 * number)
    attrs = Shard(number, of, **said).attribute() if of else {}
    hdf5.write(path, {split: Split(X[rows], Y[rows])}, attrs=attrs)


@pytest.fixture
def shards(tmp_path):
    for number in range(1, OF + 1):
        put(tmp_path / f"part-{number}.h5", number)
    return tmp_path


def failure(source):
    with pytest.raises(DmlError) as caught:
        load(source)
    return caught.value


def test_a_whole_set_is_read_as_one_file(shards):
    found = load(shards)
    np.testing.assert_array_equal(found.splits["test"].vectors, X)
    assert "shard" not in found.attrs
    assert found.notes == ()


def test_missing_shards_are_named_with_the_options_that_make_them(shards):
    (shards / "part-2.h5").unlink()
    for source in (shards, shards / "*.h5", shards / "part-?.h5"):
        error = failure(source)
        assert error.what == f"{source} is not a whole set."
        assert error.why == "Missing: shard 2 of 4."
        assert error.fix == "Run the command of the other shards with --shard 2/4."
    (shards / "part-4.h5").unlink()
    assert "--shard 2/4, --shard 4/4" in failure(shards).fix
    (shards / "part-3.h5").unlink()  # a single one, too, where a whole set was named
    assert failure(shards).why == "Missing: shard 2, 3, 4 of 4."
    assert failure(shards / "part*").why == "Missing: shard 2, 3, 4 of 4."


def test_of_many_missing_shards_some_are_named(tmp_path):
    put(tmp_path / "a.h5", 1, of=10**15)
    put(tmp_path / "b.h5", 2, of=10**15)
    assert "3, 4, 5, 6, 7 and 999,999,999,999,993 more" in failure(tmp_path).why


def test_a_half_written_shard_is_named(shards):
    left = shards / "part-2.h5.partial"
    (shards / "part-2.h5").rename(left)
    assert failure(shards).what == f"{left} is half-written."
    error = failure(shards / "*.h5")
    assert error.why == f"Missing: shard 2 of 4. {left} is half-written."
    assert error.fix.endswith("Add --resume to continue shard 2.")
    put(shards / "part-2.h5", 2)  # while it is made again
    assert len(load(shards).splits["test"].vectors) == 60


@pytest.mark.parametrize("suffix", [".h5", ".hdf5", ".he5"])
def test_of_half_written_files_only_missing_shards_of_the_set_are_named(shards, suffix):
    (shards / "part-2.h5").rename(shards / f"part-2{suffix}.partial")
    put(shards / "a.h5.partial", 2, list_sha256="of other images")
    put(shards / "b.h5.partial", 3)  # is being written again
    put(shards / "c.h5.partial", 1, of=0)
    (shards / "d.h5.partial").write_bytes(b"no HDF5")
    (shards / "e.h5.partial").write_bytes((shards / "part-1.h5").read_bytes()[:700])
    error = failure(shards / "*.h5")
    left = shards / f"part-2{suffix}.partial"
    assert error.why == f"Missing: shard 2 of 4. {left} is half-written."


def test_a_shard_with_the_name_of_the_file_of_a_run_does_not_stand_for_a_set(shards):
    """As two shards of older versions, of which one was renamed when they were collected."""
    (shards / "part-1.h5").rename(shards / "embeddings.h5")
    error = failure(shards)
    assert error.what == f"{shards} is not read as a whole set."
    assert "is shard 1 of 4 only" in error.why
    whole = error.fix.partition("'")[2].strip("'")
    assert len(load(whole).splits["test"].vectors) == 60
    (shards / "part-3.h5").unlink()
    assert failure(whole).why == "Missing: shard 3 of 4."
    assert "shard 1 of 4" in load(shards / "embeddings.h5").notes[0]


def test_collected_shards_of_one_name_stay_apart():
    names = [part_name("embeddings.h5", number, 12) for number in (2, 10)]
    assert names == ["embeddings-2-of-12.h5", "embeddings-10-of-12.h5"]
    assert part_name("embeddings.h5", 1, 1) == "embeddings.h5"
    assert PART.fullmatch(names[1]).groups() == ("embeddings", "10", "12", ".h5")


def test_a_shard_that_is_there_twice_is_named(shards):
    put(shards / "again.h5", 3)
    error = failure(shards)
    files = f"{shards / 'again.h5'}, {shards / 'part-3.h5'}"
    assert error.why == f"Shard 3 of 4 is there 2 times: {files}."
    assert error.fix == "Keep one file of shard 3."
    (shards / "part-1.h5").unlink()
    error = failure(shards)
    assert error.why == f"Missing: shard 1 of 4. Shard 3 of 4 is there 2 times: {files}."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"list_sha256": "other", "rows": 61}, "lists of images differ, of 60 and of 61 images"),
        ({"batch_size": 15}, "with batches of 5 images, .* with batches of 15"),
        ({"of": 8}, "one of 4 shards .* one of 8"),
        ({"of": 0}, r"Only .*part-1\.h5 is a shard: 1 of 4"),
    ],
)
def test_shards_of_two_sets_are_no_set(shards, changes, words):
    (shards / "part-4.h5").unlink()
    put(shards / "part-4.h5", 4, **changes)
    error = failure(shards)
    assert error.what.startswith(f"{shards / 'part-1.h5'} and {shards / 'part-4.h5'} do not belong")
    assert re.search(words, error.why)


def test_queries_and_gallery_may_be_sets_of_their_own(tmp_path):
    for number in (1, 2):
        put(tmp_path / f"query-{number}.h5", number, 2, list_sha256="q", rows=30)
        put(tmp_path / f"gallery-{number}.h5", number, 2, list_sha256="g", rows=30, start=30)
    assert {name: len(s.vectors) for name, s in load(tmp_path).splits.items()} == {
        "query": 30,
        "gallery": 30,
    }
    (tmp_path / "query-1.h5").unlink()
    assert failure(tmp_path).why == "Missing: shard 1 of 2."


def test_a_shard_alone_is_read_with_a_note(shards):
    file = shards / "part-2.h5"
    note = f"{file} is shard 2 of 4: 15 rows of a set of 60"
    assert load(file).notes == (note,)
    for command in (["inspect"], ["eval", "--no-nmi"]):
        assert "shard 2 of 4" in call(command[0], file, *command[1:]).stderr


@pytest.mark.parametrize("text", ["2/4", "[1]", "{}", '{"number": 5}', "[" * 10_000])
def test_other_attributes_of_this_name_mean_nothing(tmp_path, text):
    assert shard_of({"shard": text}) is None
    hdf5.write(tmp_path / "x.h5", {"test": Split(X, Y)}, attrs={"shard": text})
    assert len(load(tmp_path).splits["test"].vectors) == 60


@pytest.mark.parametrize(
    "change",
    [{"number": 5}, {"number": 0}, {"of": "4"}, {"rows": None}, {"list_sha256": ["abc"]}],
)
def test_impossible_values_mean_nothing(change):
    said = vars(Shard(1, 4, 60, 5, "abc"))
    assert shard_of(Shard(**said).attribute()) is None  # not as JSON
    assert shard_of({"shard": json.dumps(said)}) == Shard(**said)
    assert shard_of({"shard": json.dumps(said | change)}) is None
