"""NumPy arrays inside files of torch.save."""

import os
import zipfile

import numpy as np
import pytest
import torch

from retrieval.errors import DmlError
from retrieval.loading.load import load

X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
Y = np.array([5, 5, 6, 6, 7, 7])
NAMES = np.array(["a", "b", "b", "ü", "a", "c"])


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("labels", [Y, NAMES, NAMES.astype(object), torch.from_numpy(Y), list(Y)])
def test_numpy_arrays_in_torch_files_are_read(tmp_path, labels, zipped):
    content = {"embeddings": X, "labels": labels, "acc": np.float64(0.5), "n": np.int64(3)}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found = load(tmp_path / "x.pt").splits["test"]
    np.testing.assert_array_equal(found.vectors, X, strict=True)
    np.testing.assert_array_equal(found.labels, np.asarray(labels).astype(found.labels.dtype))


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "f2", "f8", "i1", "u1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_dtypes_and_orders_of_numpy_arrays(tmp_path, dtype, order):
    array = np.asarray((X * 3).astype(dtype), order=order)
    torch.save(array, tmp_path / "x.pt")
    found = load(tmp_path / "x.pt").splits["test"].vectors
    np.testing.assert_array_equal(found, array)


def test_dates_records_and_damaged_arrays_are_left_out_or_refused(tmp_path):
    torch.save({"x": X, "y": Y, "day": np.array(["2020-01-01"] * 6, "M8[D]")}, tmp_path / "x.pt")
    np.testing.assert_array_equal(load(tmp_path / "x.pt").splits["test"].labels, Y)
    record = np.zeros(6, [("a", "f4"), ("b", "i4")])
    torch.save({"x": X, "y": Y, "record": record}, tmp_path / "x.pt")
    np.testing.assert_array_equal(load(tmp_path / "x.pt").splits["test"].labels, Y)
    torch.save(X, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as archive:
        for name, data in members.items():
            # The shape (6, 4) becomes (6, 200).
            archive.writestr(name, data.replace(b"K\x06K\x04\x86", b"K\x06K\xc8\x86"))
    with pytest.raises(DmlError, match=r"shape \(6, 200\)"):
        load(tmp_path / "y.pt")


class Trap:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_no_function_of_numpy_runs_from_a_torch_file(tmp_path):
    np.save(tmp_path / "secret.npy", X)
    for trap in (
        Trap(np.load, str(tmp_path / "secret.npy")),
        Trap(os.mkdir, str(tmp_path / "made")),
        Trap(np.fromfile, str(tmp_path / "secret.npy")),
    ):
        torch.save({"x": X, "trap": trap}, tmp_path / "x.pt")
        with pytest.raises(DmlError, match="never done"):
            load(tmp_path / "x.pt")
    assert not (tmp_path / "made").exists()


def test_hostile_states_of_arrays_and_dtypes_are_harmless(tmp_path):
    from retrieval.formats.torch_numpy import Array, Dtype

    states = [None, (), 7, (1, 2, 3, 4, 5), (1, (2,), Dtype("O8"), False, 5)]
    for name in ("f4f4", "V8", 3, "S0", "f3", "f4,f4", "M8", "U99999999999"):
        states.append((1, (1,), Dtype(name), False, b""))
    states.append((1, (-1,), Dtype("f4"), False, b""))
    for state in states:
        assert Array(state).value() is None
