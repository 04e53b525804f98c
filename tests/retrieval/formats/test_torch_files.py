"""Files of torch.save: tensors are read, code in them never runs."""

import pickle
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given

from retrieval.formats import arrays
from retrieval.loading.load import load
from tests.retrieval.formats.samples import (
    BIG_X,
    NAMES,
    ROUND,
    Payload,
    X,
    Y,
    check,
    follow,
    items,
    measure,
    refused,
    same,
)
from trainer.run.checkpoint import FORMAT


@pytest.mark.usefixtures("tried")
@ROUND
@given(item=items(arrays.KEPT))
def test_torch_round_trip(tmp_path, item):
    x, y = item
    labels = y.tolist() if y.dtype.kind in "Uu" else torch.from_numpy(y)
    torch.save({"embeddings": torch.from_numpy(x), "labels": labels}, tmp_path / "x.pt")
    same(load(tmp_path / "x.pt"), x, y)


def test_torch_tensor_alone_tuples_and_old_files(tmp_path):
    x, y = torch.from_numpy(X).requires_grad_(), torch.from_numpy(Y)
    torch.save(x, tmp_path / "x.pt")
    torch.save(y, tmp_path / "y.pt")
    check(load(tmp_path / "x.pt", labels=tmp_path / "y.pt"))
    torch.save((x, y), tmp_path / "z.pth")
    check(load(tmp_path / "z.pth"))
    torch.save({"test": {"X": x.T.contiguous().T, "y": list(NAMES.tolist())}}, tmp_path / "d.pt")
    check(load(tmp_path / "d.pt"), NAMES)
    old = tmp_path / "old.pt"
    torch.save({"x": x, "y": y}, old, _use_new_zipfile_serialization=False)
    check(load(old))


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_classes_in_torch_files_never_run(tmp_path, zipped):
    trap = tmp_path / "trap"
    content = {"embeddings": torch.from_numpy(X), "extra": Payload(trap)}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    refused(tmp_path / "x.pt", "never done")
    (tmp_path / "y.pt").write_bytes(pickle.dumps(Payload(trap)))
    refused(tmp_path / "y.pt", "y.pt")
    assert not trap.exists()


def test_a_checkpoint_is_not_taken_for_embeddings(tmp_path):
    weights = {"head.weight": torch.zeros(6, 4)}
    torch.save({"format": FORMAT, "version": 1, "loss": weights}, tmp_path / "best.pt")
    error = refused(tmp_path / "best.pt", "a checkpoint of dmltool")
    assert error.fix == f"Export it: dmltool export {tmp_path}"


@pytest.mark.parametrize("count", [4, 40])
def test_a_torch_list_of_dicts_is_told_and_the_line_stacks_it(tmp_path, count):
    x = BIG_X[:count]
    rows = [{"embedding": torch.from_numpy(row), "label": n // 4} for n, row in enumerate(x)]
    torch.save(rows, tmp_path / "x.pt")
    follow(refused(tmp_path / "x.pt", f"a list of {count} dicts"), tmp_path)
    np.testing.assert_array_equal(load(tmp_path / "x.stacked.pt").splits["test"].vectors, x)


def torch_file(path, program):
    """A file as torch.save makes it, with a pickle program of our own."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, program if name.endswith("/data.pkl") else data)
    return path


@pytest.mark.usefixtures("tried")
def test_torch_files_that_grow(tmp_path):
    x = torch.zeros(4, 2)
    torch.save({"x": x}, tmp_path / "ok.pt")
    nest: dict = {"x": x}
    for _ in range(3):
        nest = {f"k{n}": nest for n in range(300)}
    torch.save(nest, tmp_path / "shared.pt")
    torch.save({"x": x[:1].expand(10**9, 2)}, tmp_path / "stride.pt")
    array = b"\x80\x02cbuiltins\nbytearray\n(J" + (2 * 10**9).to_bytes(4, "little") + b"tR."
    torch_file(tmp_path / "bytes.pt", array)
    key: tuple = ()
    for _ in range(60):
        key = (key, key)
    torch_file(tmp_path / "key.pt", pickle.dumps([key], 2))
    names = [tmp_path / f"{n}.pt" for n in ("shared", "stride", "bytes", "key")]
    shared, stride, array, key = measure(tmp_path / "ok.pt", *names)
    assert shared == ""  # one tensor, found once
    assert "not plausible" in stride
    assert "too much memory" in array
    assert "no 2-D array" in key
