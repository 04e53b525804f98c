"""`load`: queries and galleries from several files, labels that mean the same in both. `save`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval.comparison import compare
from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.evaluation import Settings, run
from retrieval.formats.hdf5 import writing as hdf5
from retrieval.loading.load import load, save
from retrieval.merging import merge
from retrieval.problem import from_embeddings

ROOT = Path(__file__).parents[3]
X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
Y = np.array([0, 0, 1, 1, 2, 2])


@pytest.fixture
def files(tmp_path):
    np.savez(tmp_path / "q.npz", x=X[:2], y=Y[:2])
    np.savez(tmp_path / "g.npz", x=X[2:], y=Y[2:])
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    return tmp_path


def test_a_gallery_makes_the_source_the_queries(files):
    found = load(files / "q.npz", gallery=files / "g.npz")
    assert list(found.splits) == ["query", "gallery"]
    np.testing.assert_array_equal(found.splits["query"].vectors, X[:2])
    np.testing.assert_array_equal(found.splits["gallery"].labels, Y[2:])
    assert found.source == files / "q.npz"


def test_the_file_of_the_gallery_is_named_with_its_array(files):
    splits = load(files / "q.npz", gallery=files / "g.npz").splits
    assert splits["query"].taken["vectors"] == "x"
    assert splits["gallery"].taken["vectors"] == f"{files / 'g.npz'}::x"


def test_queries_and_a_gallery_of_different_models_get_a_note(files):
    told = []
    for name, model in (("q", "1"), ("g", "1"), ("g2", "2")):
        save(files / f"{name}.h5", Split(X, Y), attrs={"model_sha256": model})
    for gallery in ("g.h5", "g2.h5", "g.npz"):
        told.append(load(files / "q.h5", gallery=files / gallery).notes)
    assert told == [(), ("queries and gallery were embedded by different models",), ()]


def test_labels_of_another_file_have_no_names_of_the_first(files):
    save(files / "named.h5", Split(X, Y), label_names=np.array(list("abcdef")))
    assert load(files / "named.h5", labels=files / "y.npy").label_names is None


def test_keys_work_for_every_argument(files):
    np.savez(files / "all.npz", a=X[:2], b=X[2:], qy=Y[:2], gy=Y[2:])
    name = f"{files / 'all.npz'}::"
    found = load(name + "a", gallery=name + "b", labels=name + "qy", gallery_labels=name + "gy")
    np.testing.assert_array_equal(found.splits["query"].labels, Y[:2])
    np.testing.assert_array_equal(found.splits["gallery"].vectors, X[2:])
    np.testing.assert_array_equal(found.splits["gallery"].labels, Y[2:])


def test_without_labels_loading_succeeds(files):
    assert load(files / "x.npy").splits["test"].labels is None


def test_a_wrong_number_of_labels_names_both_lengths(files):
    np.save(files / "short.npy", Y[:5])
    with pytest.raises(DmlError, match="5 labels for 6 vectors"):
        load(files / "x.npy", labels=files / "short.npy")


def test_gallery_labels_without_a_gallery_are_an_error(files):
    with pytest.raises(DmlError, match="has none"):
        load(files / "x.npy", gallery_labels=files / "y.npy")


def test_two_galleries_are_an_error(files):
    hdf5.write(files / "x.h5", {"query": Split(X, Y), "gallery": Split(X, Y)})
    with pytest.raises(DmlError, match="gallery of its own"):
        load(files / "x.h5", gallery=files / "g.npz")
    found = load(f"{files / 'x.h5'}::query", gallery=files / "g.npz")
    assert len(found.splits["gallery"].vectors) == 4


def test_labels_that_count_through_different_names_are_compared_by_name(files):
    hdf5.write(files / "q.h5", {"test": Split(X[:3], np.array(["b", "c", "b"]))})
    hdf5.write(files / "g.h5", {"test": Split(X[:2], np.array(["c", "d"]))})
    found = load(files / "q.h5", gallery=files / "g.h5")
    assert found.splits["query"].labels.tolist() == ["b", "c", "b"]
    assert found.splits["gallery"].labels.tolist() == ["c", "d"]
    assert found.label_names is None


NAMES = np.array(["oak", "elm", "ash"])


@pytest.fixture
def named(tmp_path, rng):
    """Two files of the same items: text labels, and integers through a list of names."""
    X, codes = rng.standard_normal((30, 4)).astype(np.float32), np.arange(30) % 3
    np.savez(tmp_path / "text.npz", embeddings=X, labels=NAMES[codes])
    hdf5.write(tmp_path / "named.h5", {"test": Split(X, codes)}, NAMES)
    np.savez(tmp_path / "numbers.npz", embeddings=X, labels=codes)
    return tmp_path


@pytest.mark.parametrize("order", [1, -1])
def test_text_labels_match_the_names_of_another_file(named, order):
    files = [named / "text.npz", named / "named.h5"][::order]
    found = load(files[0], gallery=files[1])
    for split in ("query", "gallery"):
        assert found.splits[split].labels.tolist() == NAMES[np.arange(30) % 3].tolist()
    both = [load(named / "numbers.npz", gallery=named / "numbers.npz"), found]
    numbers, texts = (run(from_embeddings(data), Settings(nmi=False)).result for data in both)
    assert texts["distances"]["l2"]["recall"] == numbers["distances"]["l2"]["recall"]
    result = compare(load(files[0]), load(files[1]), Settings(nmi=False))
    assert result["flipped"]["cos"] == {"gained": [], "lost": []}
    assert merge(files, named / "both.h5").splits == {"test": 30}


def test_text_labels_from_a_file_of_their_own_match_names_too(named):
    (named / "labels.txt").write_text("\n".join(NAMES[np.arange(30) % 3]))
    labels = named / "labels.txt"
    found = load(named / "numbers.npz", labels=labels, gallery=named / "named.h5")
    assert (found.splits["query"].labels == found.splits["gallery"].labels).all()
    found = load(named / "named.h5", gallery=named / "numbers.npz", gallery_labels=labels)
    assert (found.splits["query"].labels == found.splits["gallery"].labels).all()


def test_names_and_plain_numbers_are_not_matched_by_guess(named):
    with pytest.raises(DmlError, match="names and the others are numbers"):
        load(named / "text.npz", gallery=named / "numbers.npz")
    with pytest.raises(DmlError, match="names and the others are numbers"):
        compare(load(named / "numbers.npz"), load(named / "text.npz"))
    with pytest.raises(DmlError, match="names and the others are numbers"):
        merge([named / "text.npz", named / "numbers.npz"], named / "both.h5")


def test_comparing_digits_with_numbers_is_mirrored_too(named, rng):
    codes = np.arange(30) % 3 * 9 + 1  # 1, 10, 19: texts sort otherwise
    for name, labels in (("digits", codes.astype(str)), ("ints", codes)):
        np.savez(named / f"{name}.npz", embeddings=rng.standard_normal((30, 4)), labels=labels)
    files = [load(named / "digits.npz"), load(named / "ints.npz")]
    there, back = (
        compare(*pair, Settings(nmi=False))["distances"]["l2"]["mrr"]
        for pair in (files, files[::-1])
    )
    assert there["ci"] == [-x for x in back["ci"][::-1]]
    assert there["p"] == back["p"]


def test_huge_labels_of_two_files_stay_exact(files):
    np.savez(files / "a.npz", x=X[:2], y=np.array([2**63, 1], np.uint64))
    found = load(files / "a.npz", gallery=files / "g.npz").splits
    assert found["query"].labels.dtype == found["gallery"].labels.dtype == np.uint64
    np.savez(files / "b.npz", x=X[:2], y=np.array([-1, 1]))
    found = load(files / "a.npz", gallery=files / "b.npz").splits
    assert found["query"].labels.tolist() == [str(2**63), "1"]
    assert found["gallery"].labels.tolist() == ["-1", "1"]


def test_a_name_with_colons_that_exists_is_a_name(files):
    np.save(files / "odd::name.npy", X)
    assert load(files / "odd::name.npy").splits["test"].vectors.shape == (6, 4)


def test_reading_npy_imports_no_optional_library(files):
    code = f"""
import sys
from retrieval.loading.load import load
load({str(files / "x.npy")!r}, labels={str(files / "y.npy")!r})
sys.exit(bool({{"torch", "pyarrow", "pandas", "safetensors", "h5py"}} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_column_of_splits_gives_train_only_if_it_is_wanted(tmp_path):
    (tmp_path / "x.csv").write_text(
        "label,split,d0,d1\n0,train,1,2\n0,test,3,4\n1,Test,5,6\n1,train,7,8\n"
    )
    found = load(tmp_path / "x.csv").splits
    assert {name: split.vectors[:, 0].tolist() for name, split in found.items()} == {
        "test": [3, 5],
        "train": [1, 7],
    }
    assert list(load(tmp_path / "x.csv", train=False).splits) == ["test"]


def test_embeddings_come_back_as_they_were(clustered, tmp_path):
    X, labels = clustered
    names = np.array([f"class {c}" for c in range(6)])
    halves = {"query": Split(X[:20], labels[:20]), "gallery": Split(X[20:], labels[20:])}
    save(tmp_path / "a.h5", halves, label_names=names, attrs={"model": "a"})
    first = load(tmp_path / "a.h5")
    save(tmp_path / "b.h5", first)
    second = load(tmp_path / "b.h5")
    for name, split in halves.items():
        assert np.array_equal(second.splits[name].vectors, split.vectors)
        assert np.array_equal(second.splits[name].labels, split.labels)
    assert second.label_names.tolist() == names.tolist()
    assert second.attrs["model"] == "a"


def test_a_split_alone_is_the_test_split_and_nothing_is_overwritten_unless_forced(
    clustered, tmp_path
):
    save(tmp_path / "a.h5", Split(*clustered))
    assert list(load(tmp_path / "a.h5").splits) == ["test"]
    with pytest.raises(DmlError, match="exists already"):
        save(tmp_path / "a.h5", Split(*clustered))
    save(tmp_path / "a.h5", Split(*clustered), force=True)


def test_a_name_that_is_not_of_hdf5_is_refused(clustered, tmp_path):
    with pytest.raises(DmlError, match="is not the name of an embedding file"):
        save(tmp_path / "a.npy", Split(*clustered))
    assert not list(tmp_path.iterdir())
