"""Files of the same items side by side: matched by path or position, refused where they differ."""

import hashlib
import json
from contextlib import suppress

import h5py
import numpy as np
import pytest

from retrieval import merging
from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.evaluation import evaluate
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading.load import load, save
from retrieval.merging import merge
from retrieval.resources import slices
from tests.retrieval.shards import D, sharded, write

N = 30
LABELS = np.arange(N) % 5
NAMES = np.array(["ant", "bee", "cat", "dog", "elk"])
PATHS = np.array([f"{n:02d}.png" for n in range(N)])


def vectors(seed, dim):
    return np.random.default_rng(seed).standard_normal((N, dim)).astype(np.float32)


A, B = vectors(1, 4), vectors(2, 6) * 50


def put(path, x, labels=LABELS, paths=PATHS, names=NAMES, split="test", **attrs):
    hdf5.write(path, {split: Split(x, labels, paths)}, names, attrs)
    return path


def unit(x):
    return x / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)


def test_rows_are_normalised_and_set_side_by_side(tmp_path):
    a = put(tmp_path / "a.h5", A, model="one", model_sha256="1", dataset="animals")
    b = put(
        tmp_path / "b.h5", B, model="two", model_sha256="2", dataset="animals", recall_at=[1, 5]
    )
    done = merge([a, b], tmp_path / "c.h5")
    assert (done.path, done.splits, done.dims) == (tmp_path / "c.h5", {"test": N}, (4, 6))
    assert done.matched == {"test": "paths"}
    found = load(tmp_path / "c.h5")
    part = found.splits["test"]
    assert part.vectors.dtype == np.float32
    np.testing.assert_allclose(part.vectors, np.hstack([unit(A), unit(B)]), atol=1e-7)
    np.testing.assert_array_equal(part.labels, LABELS)
    np.testing.assert_array_equal(part.paths, PATHS)
    np.testing.assert_array_equal(found.label_names, NAMES)
    assert (found.attrs["dataset"], found.attrs["recall_at"]) == ("animals", "[1, 5]")
    assert found.attrs["model"] == "one + two"
    assert not found.attrs["normalized"]
    assert json.loads(found.attrs["merged"])[1] == {
        "file": "b.h5",
        "sha256": hashlib.sha256(b.read_bytes()).hexdigest(),
        "dim": 6,
        "model": "two",
        "model_sha256": "2",
        "dataset": "animals",
    }


def test_metadata_of_other_programs_may_be_of_any_type(tmp_path):
    a = put(tmp_path / "a.h5", A, model="one", dataset="animals")
    b = put(tmp_path / "b.h5", B)
    with h5py.File(b, "r+") as file:
        file.attrs["model"] = np.arange(3)
        file.attrs["dataset"] = file.attrs["arrays"] = np.array([b"x", b"y"])
    merge([b, a], tmp_path / "c.h5")
    attrs = load(tmp_path / "c.h5").attrs
    assert (attrs["model"], attrs["dataset"]) == ("b.h5 + one", "animals")
    save(tmp_path / "copy.h5", load(b))
    attrs = load(tmp_path / "copy.h5").attrs
    assert (attrs["model"], attrs["arrays"]) == ("[0, 1, 2]", '["x", "y"]')


def test_images_are_found_from_the_folder_of_the_merged_file(tmp_path):
    photos = str(tmp_path / "photos")
    places = {"run/1/a.h5": "../../photos", "b.h5": "photos", "c.h5": "photos"}
    (tmp_path / "run" / "1").mkdir(parents=True)
    for name, relative in places.items():
        images = {"files": True, "absolute": photos, "relative": relative, "root": relative}
        put(tmp_path / name, A, images=images)
    put(tmp_path / "other.h5", A, images={"files": True, "absolute": str(tmp_path / "other")})
    put(tmp_path / "odd.h5", A, images="[1]")
    (tmp_path / "new").mkdir()
    for names, root in (
        (["run/1/a.h5", "b.h5"], "../photos"),
        (["b.h5", "c.h5", "odd.h5"], "../photos"),
        (["b.h5", "other.h5"], None),
    ):
        target = tmp_path / "new" / "merged.h5"
        merge([tmp_path / name for name in names], target, force=True)
        found = json.loads(load(target).attrs.get("images", "{}"))
        assert found.get("relative") == root, names
        assert found.get("absolute") == (photos if root else None)


def test_cosines_are_the_means_of_the_cosines(tmp_path):
    merge([put(tmp_path / "a.h5", A), put(tmp_path / "b.h5", B)], tmp_path / "c.h5")
    x = unit(load(tmp_path / "c.h5").splits["test"].vectors)
    a, b = unit(A), unit(B)
    np.testing.assert_allclose(x @ x.T, (a @ a.T + b @ b.T) / 2, atol=1e-6)


def test_rows_are_matched_by_path_whatever_their_order(tmp_path):
    one, two = (np.random.default_rng(seed).permutation(N) for seed in (0, 1))
    a = put(tmp_path / "a.h5", A[one], LABELS[one], PATHS[one])
    b = put(tmp_path / "b.h5", B[two], LABELS[two], PATHS[two])
    merge([a, b], tmp_path / "c.h5")
    found = load(tmp_path / "c.h5").splits["test"]
    np.testing.assert_allclose(found.vectors, np.hstack([unit(A), unit(B)])[one], atol=1e-7)
    np.testing.assert_array_equal(found.paths, PATHS[one])
    np.testing.assert_array_equal(found.labels, LABELS[one])


def test_labels_are_compared_by_name(tmp_path):
    a = put(tmp_path / "a.h5", A)
    b = put(tmp_path / "b.h5", B, 4 - LABELS, names=NAMES[::-1])
    merge([a, b], tmp_path / "c.h5")
    np.testing.assert_array_equal(load(tmp_path / "c.h5").splits["test"].labels, LABELS)
    wrong = put(tmp_path / "w.h5", B, LABELS, names=NAMES[::-1])
    with pytest.raises(DmlError, match=r"24 labels of test differ.\n00.png: ant in .*elk in"):
        merge([a, wrong], tmp_path / "d.h5")


def test_without_paths_position_and_labels_decide(tmp_path):
    a = put(tmp_path / "a.h5", A, paths=None)
    b = put(tmp_path / "b.h5", B)
    assert merge([a, b], tmp_path / "c.h5").matched == {"test": "position"}
    assert merge([b, a], tmp_path / "d.h5").matched == {"test": "position"}
    shuffled = put(tmp_path / "s.h5", A[::-1], LABELS[::-1], None)
    with pytest.raises(DmlError, match="labels of test differ"):
        merge([b, shuffled], tmp_path / "e.h5")
    with pytest.raises(DmlError, match=r"30 items .* 29"):
        merge([a, put(tmp_path / "f.h5", A[1:], LABELS[1:], None)], tmp_path / "e.h5")
    bare = put(tmp_path / "n.h5", A, None, None, None)
    for files in ([a, bare], [bare, a]):
        with pytest.raises(DmlError, match="cannot be matched") as error:
            merge(files, tmp_path / "e.h5")
        assert error.value.what.startswith(f"{files[0]} and {files[1]} ")
    assert not (tmp_path / "e.h5").exists()


def test_different_items_are_named(tmp_path):
    other = PATHS.copy()
    other[[3, 7, 8, 9, 10]] = ["xx.png", *PATHS[[8, 7, 10, 9]]]
    b = put(tmp_path / "b.h5", B, paths=other)
    with pytest.raises(DmlError) as caught:
        merge([put(tmp_path / "a.h5", A), b], tmp_path / "c.h5")
    assert f"Only in {tmp_path / 'a.h5'}: 03.png" in caught.value.why
    assert f"Only in {b}: xx.png" in caught.value.why
    less = put(tmp_path / "l.h5", B[6:], LABELS[6:], PATHS[6:])
    with pytest.raises(DmlError, match=r"Only in .*: 00.png, 01.png, 02.png and 3 more"):
        merge([tmp_path / "a.h5", less], tmp_path / "c.h5")


def test_paths_that_repeat_are_refused_unless_the_order_is_the_same(tmp_path):
    twice = PATHS.copy()
    twice[5] = twice[10]
    a, b = put(tmp_path / "a.h5", A, paths=twice), put(tmp_path / "b.h5", B, paths=twice)
    merge([a, b], tmp_path / "c.h5")
    back = put(tmp_path / "back.h5", B[::-1], LABELS[::-1], twice[::-1])
    with pytest.raises(DmlError, match=r"10.png more than once"):
        merge([a, back], tmp_path / "d.h5")


def test_splits_must_agree(tmp_path):
    a, b = put(tmp_path / "a.h5", A), put(tmp_path / "b.h5", B, split="train")
    with pytest.raises(DmlError, match="different splits"):
        merge([a, b], tmp_path / "c.h5")
    for name, x in (("d", A), ("e", B)):
        sides = {"query": Split(x[:10], LABELS[:10]), "gallery": Split(x[10:], LABELS[10:])}
        hdf5.write(tmp_path / f"{name}.h5", sides)
    done = merge([tmp_path / "d.h5", tmp_path / "e.h5"], tmp_path / "f.h5")
    assert done.splits == {"query": 10, "gallery": 20}
    found = load(tmp_path / "f.h5").splits["gallery"].vectors
    np.testing.assert_allclose(found, np.hstack([unit(A), unit(B)])[10:], atol=1e-7)


def test_zero_rows_stay_and_nan_is_refused(tmp_path):
    x = A.copy()
    x[3], x[4] = 0, 1e30
    merge([put(tmp_path / "a.h5", x), put(tmp_path / "b.h5", B)], tmp_path / "c.h5")
    found = load(tmp_path / "c.h5").splits["test"].vectors[:, :4]
    assert found[3].tolist() == [0, 0, 0, 0]
    assert found[4].tolist() == [0.5] * 4
    x[5, 1] = np.nan
    with pytest.raises(DmlError, match="row 5 of test"):
        merge([put(tmp_path / "n.h5", x), tmp_path / "b.h5"], tmp_path / "d.h5")
    assert not (tmp_path / "d.h5").exists()


def test_existing_files_need_force_and_inputs_are_never_overwritten(tmp_path):
    a, b, c = put(tmp_path / "a.h5", A), put(tmp_path / "b.h5", B), tmp_path / "c.h5"
    merge([a, b], c)
    with pytest.raises(DmlError, match="exists"):
        merge([b, a], c)
    merge([b, a], c, force=True)
    assert load(c).splits["test"].vectors.shape == (N, 10)
    (tmp_path / "link.h5").symlink_to(a)
    (tmp_path / "twin.h5").hardlink_to(a)
    for same in ("a.h5", "link.h5", "twin.h5"):
        with pytest.raises(DmlError, match="both an input and the output"):
            merge([a, b], tmp_path / same, force=True)
    with pytest.raises(DmlError, match="At least two"):
        merge([a], tmp_path / "d.h5")
    with pytest.raises(DmlError, match="does not exist"):
        merge([a, tmp_path / "none.h5"], tmp_path / "d.h5")


def test_a_killed_merge_goes_on_and_another_does_not(tmp_path, monkeypatch):
    a, b, c = put(tmp_path / "a.h5", A), put(tmp_path / "b.h5", B), tmp_path / "c.h5"
    calls, given = [], merging._units
    monkeypatch.setattr(merging, "file_blocks", lambda rows, _: slices(rows, 10))

    def stop(data, split, part, order):
        if part.start == 20 and len(calls) < 5:
            raise KeyboardInterrupt
        calls.append(part.start)
        return given(data, split, part, order)

    monkeypatch.setattr(merging, "_units", stop)
    with suppress(KeyboardInterrupt):
        merge([a, b], c)
    assert not c.exists()
    with pytest.raises(DmlError, match="model_sha256"):
        merge([b, a], c)
    calls += [-1]
    merge([a, b], c)
    assert calls == [0, 0, 10, 10, -1, 20, 20]
    merge([a, b], tmp_path / "d.h5")
    np.testing.assert_array_equal(
        load(c).splits["test"].vectors, load(tmp_path / "d.h5").splits["test"].vectors
    )


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks_do_not_matter(tmp_path, monkeypatch, size):
    order = np.random.default_rng(0).permutation(N)
    a = put(tmp_path / "a.h5", A)
    b = put(tmp_path / "b.h5", B[order], LABELS[order], PATHS[order])
    monkeypatch.setattr(merging, "file_blocks", lambda rows, _: slices(rows, size))
    merge([a, b, a], tmp_path / "c.h5")
    found = load(tmp_path / "c.h5").splits["test"].vectors
    np.testing.assert_allclose(found, np.hstack([unit(A), unit(B), unit(A)]), atol=1e-7)


def test_an_ensemble_can_be_evaluated(tmp_path):
    rng = np.random.default_rng(5)
    centres = rng.standard_normal((5, 8))
    for name in "ab":
        x = centres[LABELS] + 0.9 * rng.standard_normal((N, 8))
        put(tmp_path / f"{name}.h5", x.astype(np.float32))
    merge([tmp_path / "a.h5", tmp_path / "b.h5"], tmp_path / "c.h5")
    scores = {}
    for name in "abc":
        part = load(tmp_path / f"{name}.h5").splits["test"]
        found = evaluate(part.vectors, part.labels, nmi=False, distances="cos")
        scores[name] = found["distances"]["cos"]["map_at_r"]
    assert scores["c"] > max(scores["a"], scores["b"])


def test_merging_takes_sets(tmp_path):
    folder = sharded(tmp_path / "shards", ".npz")
    write(tmp_path / "whole.npz", slice(None))
    merge([folder, tmp_path / "whole.npz"], tmp_path / "merged.h5")
    halves = load(tmp_path / "merged.h5").splits["test"].vectors
    np.testing.assert_array_equal(halves[:, :D], halves[:, D:])
    first = load(tmp_path / "merged.h5").attrs["model_sha256"]
    part = np.load(folder / "part-11.npz")
    np.savez(folder / "part-11.npz", **dict(part) | {"embeddings": 2 * part["embeddings"]})
    merge([folder, tmp_path / "whole.npz"], tmp_path / "other.h5")
    assert load(tmp_path / "other.h5").attrs["model_sha256"] != first


def test_files_are_merged_where_no_open_file_can_be_renamed(tmp_path, as_on_windows):
    a, b = put(tmp_path / "a.h5", A), put(tmp_path / "b.h5", B)
    merge([a, b], tmp_path / "c.h5")
    merge([a, b], tmp_path / "c.h5", force=True)
    assert len(load(tmp_path / "c.h5").splits["test"].vectors) == N
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "b.h5", "c.h5"]
