"""Files of numpy.save, also with false headers and pickled objects."""

import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.errors import DmlError
from retrieval.formats import arrays
from retrieval.loading.load import load
from tests.retrieval.formats.samples import (
    HUGE,
    ROUND,
    Payload,
    X,
    Y,
    items,
    npy_header,
    refused,
    same,
)


@ROUND
@given(item=items(arrays.KEPT), order=st.sampled_from("CF"))
def test_npy_round_trip(tmp_path, item, order):
    x, y = item
    np.save(tmp_path / "x.npy", np.asarray(x, order=order))
    np.save(tmp_path / "y.npy", y)
    same(load(tmp_path / "x.npy", labels=tmp_path / "y.npy"), x, y)


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        (f"({HUGE}, 512)", "claims"),
        ("(2, 1000)", "claims"),
        ("(-1, 4)", "header"),
        ("(nan, 4)", "header"),
        ("(1e3, 4)", "header"),
        (f"({2**80}, 4)", "claims|header"),
        ("(4,", "header"),
    ],
)
def test_npy_with_a_false_shape(tmp_path, shape, match):
    (tmp_path / "x.npy").write_bytes(npy_header(shape) + b"\0" * 64)
    refused(tmp_path / "x.npy", match)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("embeddings.npy", npy_header(shape) + b"\0" * 64)
    refused(tmp_path / "x.npz", match)


@pytest.mark.parametrize("descr", ["|S0", "<U0"])
def test_labels_of_no_length_are_refused(tmp_path, descr):
    (tmp_path / "y.npy").write_bytes(npy_header(f"({10**11},)", f"'{descr}'"))
    np.save(tmp_path / "v.npy", X)
    with pytest.raises(DmlError, match="header"):
        load(tmp_path / "v.npy", labels=tmp_path / "y.npy")


def test_pickled_arrays_are_never_unpickled(tmp_path):
    trap = tmp_path / "trap"
    objects = np.empty((2, 2), object)
    objects[:] = Payload(trap)
    np.save(tmp_path / "x.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=objects, allow_pickle=True)
    refused(tmp_path / "x.npy", "pickled")
    refused(f"{tmp_path / 'x.npz'}::x", "pickled")
    np.save(tmp_path / "v.npy", X)
    refused(tmp_path / "v.npy", "pickled", labels=tmp_path / "x.npy")
    assert not trap.exists()


def test_object_arrays_name_astype_str(tmp_path):
    names = np.array([f"c{y}" for y in Y], object)
    for key in ("labels", "breed"):
        np.savez(tmp_path / "x.npz", **{"embeddings": X, key: names})
        error = refused(tmp_path / "x.npz", "Python objects")
        assert f"{key}.astype(str)" in error.fix
    np.save(tmp_path / "v.npy", X)
    np.save(tmp_path / "y.npy", names)
    error = refused(tmp_path / "v.npy", "Python objects", labels=tmp_path / "y.npy")
    assert ".astype(str)" in error.fix
    np.savez(tmp_path / "x.npz", embeddings=X, labels=Y, extra=names)
    assert load(tmp_path / "x.npz").splits["test"].labels.tolist() == Y.tolist()
