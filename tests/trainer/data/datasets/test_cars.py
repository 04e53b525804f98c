"""Cars196 in its two official layouts, with damaged annotations and hostile paths."""

from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from retrieval.errors import DmlError
from tests.trainer.data.datasets.trees import labels_in, picture
from trainer.data.datasets import cars, load


def structs(rows: list[dict]) -> np.ndarray:
    """A 1 x N struct array, as MATLAB writes it."""
    kinds = [(name, object) for name in rows[0]]
    table = np.empty((1, len(rows)), dtype=kinds)
    for place, row in enumerate(rows):
        table[0, place] = tuple(row.values())
    return table


def annotation(label: int, **name: str) -> dict:
    box = {f"bbox_{key}": np.uint16(9) for key in ("x1", "y1", "x2", "y2")}
    return {**name, **box, "class": np.uint8(label)}


def write_cars(root: Path, labels=(1, 98, 99, 196)) -> None:
    rows = []
    for number, label in enumerate(labels, 1):
        path = f"car_ims/{number:06}.jpg"
        rows.append({**annotation(label, relative_im_path=path), "test": np.uint8(number % 2)})
        picture(root / path)
    names = np.array([f"Car {n}" for n in range(1, 197)], dtype=object)
    savemat(root / "cars_annos.mat", {"annotations": structs(rows), "class_names": names})


def write_devkit(root: Path, place="devkit", nested=False) -> None:
    for part, file, labels in (
        ("cars_train", cars.TRAIN, (1, 99, 196)),
        ("cars_test", cars.TEST, (98, 1)),
    ):
        rows = []
        for number, label in enumerate(labels, 1):
            rows.append(annotation(label, fname=f"{number:05}.jpg"))
            folder = root / part / part if nested else root / part
            picture(folder / f"{number:05}.jpg", label)
        (root / place).mkdir(exist_ok=True)
        savemat(root / place / file, {"annotations": structs(rows)})
    names = np.array([f"Car {n}" for n in range(1, 197)], dtype=object)
    savemat(root / place / "cars_meta.mat", {"class_names": names})


def test_cars_are_split_by_class_and_not_by_the_test_column(tmp_path):
    write_cars(tmp_path)
    data = load("cars", tmp_path, allow_incomplete=True)
    assert labels_in(data, "train") == {"Car 1", "Car 98"}
    assert labels_in(data, "test") == {"Car 99", "Car 196"}
    assert data.paths[0] == "car_ims/000001.jpg"
    assert data.image(0).shape == (6, 8, 3)


@pytest.mark.parametrize("nested", [False, True])
def test_cars_of_the_later_devkit_are_split_by_class(tmp_path, nested):
    write_devkit(tmp_path, nested=nested)
    data = load("cars", tmp_path, allow_incomplete=True)
    assert labels_in(data, "train") == {"Car 1", "Car 98"}
    assert labels_in(data, "test") == {"Car 99", "Car 196"}
    assert data.counts() == {"train": (3, 2), "test": (2, 2)}
    assert abs(int(data.image(3)[0, 0, 0]) - 98) <= 3


def test_cars_labels_of_the_test_part_may_lie_beside_the_devkit(tmp_path):
    write_devkit(tmp_path)
    (tmp_path / "devkit" / cars.TEST).rename(tmp_path / cars.TEST)
    assert len(load("cars", tmp_path, allow_incomplete=True)) == 5


def test_cars_devkit_without_test_labels_says_what_to_get(tmp_path):
    write_devkit(tmp_path)
    (tmp_path / "devkit" / cars.TEST).unlink()
    with pytest.raises(DmlError) as caught:
        load("cars", tmp_path, allow_incomplete=True)
    assert cars.TEST in caught.value.fix


def test_cars_counts_are_asserted(tmp_path):
    write_cars(tmp_path)
    with pytest.raises(DmlError, match="train: expected 8,054 images of 98 classes, found 2 of 2"):
        load("cars", tmp_path)
    assert cars.EXPECTED["test"] == (8_131, 98)


def test_one_car_alone_is_read(tmp_path):
    write_cars(tmp_path, labels=(1,))
    assert len(load("cars", tmp_path, allow_incomplete=True)) == 1


def test_cars_refuse_paths_that_lead_outside(tmp_path):
    rows = [annotation(1, relative_im_path="../../secret.jpg")]
    savemat(tmp_path / "cars_annos.mat", {"annotations": structs(rows)})
    with pytest.raises(DmlError, match="leads outside"):
        load("cars", tmp_path, allow_incomplete=True)
    write_devkit(tmp_path)
    (tmp_path / "cars_annos.mat").unlink()
    rows = [annotation(1, fname="/etc/passwd")]
    savemat(tmp_path / "devkit" / cars.TEST, {"annotations": structs(rows)})
    with pytest.raises(DmlError, match="leads outside"):
        load("cars", tmp_path, allow_incomplete=True)


@pytest.mark.parametrize("content", [b"", b"not a MATLAB file", b"MATLAB 5.0" + bytes(200)])
def test_a_damaged_cars_file_is_an_error(tmp_path, content):
    (tmp_path / "cars_annos.mat").write_bytes(content)
    with pytest.raises(DmlError, match=r"cars_annos.mat (cannot be read|does not hold)"):
        load("cars", tmp_path)


def test_a_truncated_cars_file_is_an_error(tmp_path):
    write_cars(tmp_path)
    file = tmp_path / "cars_annos.mat"
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(DmlError, match=r"cars_annos.mat (cannot be read|does not hold)"):
        load("cars", tmp_path)


def test_a_matlab_file_of_something_else_is_an_error(tmp_path):
    savemat(tmp_path / "cars_annos.mat", {"annotations": np.eye(3)})
    with pytest.raises(DmlError, match="does not hold the annotations"):
        load("cars", tmp_path)
    savemat(tmp_path / "cars_annos.mat", {"x": np.eye(3)})
    with pytest.raises(DmlError, match="does not hold the annotations"):
        load("cars", tmp_path)


def test_a_class_of_cars_that_is_no_number_is_an_error(tmp_path):
    rows = [annotation(1, relative_im_path="car_ims/1.jpg") | {"class": np.inf}]
    savemat(tmp_path / "cars_annos.mat", {"annotations": structs(rows)})
    with pytest.raises(DmlError, match="does not hold the annotations"):
        load("cars", tmp_path, allow_incomplete=True)
