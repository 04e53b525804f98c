"""What `save` writes, `load` reads."""

import numpy as np
import pytest

from retrieval import DmlError, Split, load, save


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
    with pytest.raises(DmlError, match="It is not overwritten"):
        save(tmp_path / "a.h5", Split(*clustered))
    save(tmp_path / "a.h5", Split(*clustered), force=True)


def test_a_name_that_is_not_of_hdf5_is_refused(clustered, tmp_path):
    with pytest.raises(DmlError, match="is not the name of an embedding file"):
        save(tmp_path / "a.npy", Split(*clustered))
    assert not list(tmp_path.iterdir())
