"""IDX files as MNIST and its family have them, whole and damaged."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from retrieval.errors import DmlError
from trainer.data.datasets import load
from trainer.data.datasets.idx import read_idx

IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def packed(array: np.ndarray) -> bytes:
    """Written from the format's description, not with the code under test."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", n) for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def write(path: Path, content: bytes, zipped: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if zipped:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def write_set(root: Path, prefix: str = "", test: str = "t10k", zipped: bool = False) -> dict:
    rng = np.random.default_rng(len(prefix))
    arrays = {}
    for split, stem, n in (("train", "train", 12), ("test", test, 5)):
        images, labels = rng.integers(0, 256, (n, 7, 9)), np.arange(n)[::-1] % 4
        write(root / f"{prefix}{stem}-{IMAGES}", packed(images), zipped)
        write(root / f"{prefix}{stem}-{LABELS}", packed(labels), zipped)
        arrays[split] = images, labels
    return arrays


@pytest.mark.parametrize("zipped", [False, True])
def test_images_and_labels_are_those_in_the_files(tmp_path, zipped):
    arrays = write_set(tmp_path, zipped=zipped)
    data = load("idx", tmp_path)
    assert data.label_names == ("0", "1", "2", "3")
    for split, (images, labels) in arrays.items():
        rows = data.rows(split)
        assert data.labels[rows].tolist() == labels.tolist()
        for row, image in zip(rows, images, strict=True):
            grey = data.image(row, short_side=4)
            assert grey.shape == (7, 9, 3)
            assert grey.dtype == np.uint8
            assert all((grey[..., c] == image).all() for c in range(3))
    assert data.files() is None
    assert "also trained on" in data.notes[0]


def test_the_reader_can_be_sent_to_a_worker(tmp_path):
    write_set(tmp_path, zipped=True)
    data = load("idx", tmp_path)
    again = pickle.loads(pickle.dumps(data))  # noqa: S301 what worker processes do
    assert (again.image(3) == data.image(3)).all()


def test_a_packed_file_beside_the_unpacked_one_is_not_read_twice(tmp_path):
    write_set(tmp_path)
    write_set(tmp_path, zipped=True)
    data = load("idx", tmp_path)
    assert len(data) == 17
    assert not any(".gz" in path for path in data.paths)


def test_several_sets_in_a_folder_must_be_told_apart(tmp_path):
    write_set(tmp_path, "emnist-letters-", "test")
    write_set(tmp_path, "emnist-digits-", "test")
    with pytest.raises(DmlError, match="does not hold one set") as caught:
        load("idx", tmp_path)
    assert "--set data.options.variant=" in caught.value.fix
    data = load("idx", tmp_path, variant="digits")
    assert all("digits" in path for path in data.paths)


def test_a_training_set_alone_is_enough(tmp_path):
    write_set(tmp_path)
    for file in tmp_path.glob("t10k*"):
        file.unlink()
    data = load("idx", tmp_path)
    assert data.counts() == {"train": (12, 4)}
    assert data.notes == ()


def test_missing_labels_are_an_error(tmp_path):
    write_set(tmp_path)
    (tmp_path / f"train-{LABELS}").unlink()
    with pytest.raises(DmlError, match="has no labels"):
        load("idx", tmp_path)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b + b"x",
        lambda b: b[:10],
        lambda b: b[:3],
        lambda b: b"",
        lambda b: b"\x01" + b[1:],
        lambda b: b[:2] + b"\x07" + b[3:],
        lambda b: b[:3] + b"\x00" + b[4:],
        lambda b: b[:4] + b"\xff\xff\xff\xff" * 3 + b[16:],
        lambda b: b[:4] + b"\x00\x00\x00\x00" * 3,
    ],
)
def test_a_damaged_file_is_an_error(tmp_path, damage, zipped):
    images, _ = write_set(tmp_path)["train"]
    (tmp_path / f"train-{IMAGES}").unlink()
    write(tmp_path / f"train-{IMAGES}", damage(packed(images)), zipped)
    with pytest.raises(DmlError, match="cannot be used"):
        load("idx", tmp_path)


def test_a_broken_gzip_file_is_an_error(tmp_path):
    write_set(tmp_path, zipped=True)
    file = tmp_path / f"train-{IMAGES}.gz"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:40] + b"\xff" * 40 + whole[80:]):
        file.write_bytes(content)
        with pytest.raises(DmlError, match="cannot be used"):
            load("idx", tmp_path)


def test_labels_of_another_length_are_an_error(tmp_path):
    write_set(tmp_path)
    (tmp_path / f"train-{LABELS}").write_bytes(packed(np.zeros(11)))
    with pytest.raises(DmlError, match="does not hold 12 whole numbers"):
        load("idx", tmp_path)


def test_a_file_that_changed_is_read_again(tmp_path):
    file = tmp_path / "x-idx1-ubyte"
    file.write_bytes(packed(np.array([1, 2])))
    assert read_idx(file).tolist() == [1, 2]
    file.write_bytes(packed(np.array([1, 2, 3])))
    assert read_idx(file).tolist() == [1, 2, 3]
