"""Miniature trees in the official layouts of CUB, Cars, SOP and In-Shop."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from retrieval.errors import DmlError
from trainer.data.datasets import cars, cub, inshop, layout, load, sop


def picture(path: Path, colour: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (colour, 0, 0)).save(path)


def labels_in(data, split):
    return {data.label_names[label] for label in data.classes(split)}


# CUB


def write_cub(root: Path, classes=(1, 2, 100, 101, 200), images=2, draw=picture) -> Path:
    root = root / "CUB_200_2011"
    number, listed, labels = 0, [], []
    for c in classes:
        for i in range(images):
            number += 1
            path = f"{c:03}.Bird_{c}/Bird_{c}_{i}.jpg"
            listed.append(f"{number} {path}")
            labels.append(f"{number} {c}")
            draw(root / "images" / path)
    (root / "images.txt").write_text("\n".join(listed) + "\n")
    (root / "image_class_labels.txt").write_text("\n".join(labels) + "\n")
    (root / "classes.txt").write_text("".join(f"{c} {c:03}.Bird_{c}\n" for c in classes))
    (root / "train_test_split.txt").write_text("".join(f"{n} 1\n" for n in range(1, number + 1)))
    return root


def test_cub_trains_on_the_first_hundred_classes(tmp_path):
    write_cub(tmp_path)
    data = load("cub", tmp_path, allow_incomplete=True)
    assert labels_in(data, "train") == {"001.Bird_1", "002.Bird_2", "100.Bird_100"}
    assert labels_in(data, "test") == {"101.Bird_101", "200.Bird_200"}
    assert data.image(0).shape == (6, 8, 3)
    assert "Incomplete" in data.notes[0]
    inner = load("cub", tmp_path / "CUB_200_2011", allow_incomplete=True)
    assert inner.paths == data.paths


def test_cub_of_another_size_is_refused_with_expected_and_found(tmp_path):
    write_cub(tmp_path)
    with pytest.raises(DmlError) as caught:
        load("cub", tmp_path)
    assert "train: expected 5,864 images of 100 classes, found 6 of 3." in caught.value.why
    assert "test: expected 5,924 images of 100 classes, found 4 of 2." in caught.value.why
    assert "--allow-incomplete" in caught.value.fix


def test_cub_of_the_published_size_passes(tmp_path, monkeypatch):
    folder = tmp_path / "CUB_200_2011"
    folder.mkdir()
    # 5,864 = 64 x 59 + 36 x 58; 5,924 = 24 x 60 + 76 x 59
    sizes = [59] * 64 + [58] * 36 + [60] * 24 + [59] * 76
    paths = [f"{c:03}/{i}.jpg" for c, size in enumerate(sizes, 1) for i in range(size)]
    numbered = list(enumerate(paths, 1))
    (folder / "images.txt").write_text("".join(f"{n} {path}\n" for n, path in numbered))
    (folder / "image_class_labels.txt").write_text(
        "".join(f"{n} {int(path[:3])}\n" for n, path in numbered)
    )
    monkeypatch.setattr(layout, "present", lambda root, rows, source: (rows, ""))
    data = load("cub", tmp_path)
    assert data.counts() == {"train": (5_864, 100), "test": (5_924, 100)}
    assert data.notes == ()
    monkeypatch.setattr(layout, "present", lambda root, rows, source: (rows[:-1], "1 is missing."))
    with pytest.raises(DmlError, match="found 5,923 of 100"):
        load("cub", tmp_path)


def test_one_missing_file_is_noticed_and_named(tmp_path, monkeypatch):
    root = write_cub(tmp_path)
    monkeypatch.setattr(cub, "EXPECTED", {"train": (6, 3), "test": (4, 2)})
    assert load("cub", tmp_path).notes == ()
    (root / "images" / "002.Bird_2" / "Bird_2_1.jpg").unlink()
    with pytest.raises(DmlError, match="found 5 of 3") as caught:
        load("cub", tmp_path)
    assert "1 of 10 files that images.txt names are missing" in caught.value.why
    assert "images/002.Bird_2/Bird_2_1.jpg" in caught.value.why
    assert len(load("cub", tmp_path, allow_incomplete=True)) == 9


def test_more_images_than_published_are_an_error_too(tmp_path, monkeypatch):
    write_cub(tmp_path)
    monkeypatch.setattr(cub, "EXPECTED", {"train": (6, 3), "test": (3, 2)})
    with pytest.raises(DmlError, match="expected 3 images of 2 classes, found 4 of 2"):
        load("cub", tmp_path)


@pytest.mark.parametrize("path", ["../../x.jpg", "/etc/x.jpg", "001/../../../x.jpg"])
def test_cub_refuses_paths_that_lead_outside(tmp_path, path):
    root = write_cub(tmp_path)
    with open(root / "images.txt", "a") as file:
        file.write(f"11 {path}\n")
    with open(root / "image_class_labels.txt", "a") as file:
        file.write("11 1\n")
    with pytest.raises(DmlError, match="leads outside"):
        load("cub", tmp_path, allow_incomplete=True)


def test_cub_files_that_do_not_belong_together_are_refused(tmp_path):
    root = write_cub(tmp_path)
    with open(root / "images.txt", "a") as file:
        file.write("99 001.Bird_1/x.jpg\n")
    with pytest.raises(DmlError, match="image 99"):
        load("cub", tmp_path, allow_incomplete=True)
    (root / "images.txt").write_text("only-one-word\n")
    with pytest.raises(DmlError, match="line 1"):
        load("cub", tmp_path, allow_incomplete=True)
    (root / "image_class_labels.txt").unlink()
    with pytest.raises(DmlError, match=r"image_class_labels.txt cannot be read"):
        load("cub", tmp_path, allow_incomplete=True)


# Cars


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


# SOP


def write_sop(root: Path) -> Path:
    root = root / "Stanford_Online_Products"
    number = 0
    for split, products in (("train", (1, 2, 3)), ("test", (11319, 11320))):
        lines = ["image_id class_id super_class_id path"]
        for product in products:
            for i in range(2):
                number += 1
                path = f"chair_final/{product}_{i}.JPG"
                lines.append(f"{number} {product} 4 {path}")
                picture(root / path)
        (root / f"Ebay_{split}.txt").write_text("\n".join(lines) + "\n")
    return root


def test_sop_is_split_as_its_two_files_say(tmp_path):
    write_sop(tmp_path)
    data = load("sop", tmp_path, allow_incomplete=True)
    assert labels_in(data, "train") == {"1", "2", "3"}
    assert labels_in(data, "test") == {"11319", "11320"}
    assert data.counts() == {"train": (6, 3), "test": (4, 2)}
    assert data.image(9).shape == (6, 8, 3)


def test_sop_counts_are_asserted(tmp_path, monkeypatch):
    root = write_sop(tmp_path)
    with pytest.raises(DmlError, match="test: expected 60,502 images of 11,316 classes, found 4"):
        load("sop", tmp_path)
    assert sop.EXPECTED["train"] == (59_551, 11_318)
    monkeypatch.setattr(sop, "EXPECTED", {"train": (6, 3), "test": (4, 2)})
    assert load("sop", tmp_path).notes == ()
    (root / "chair_final" / "2_1.JPG").unlink()
    with pytest.raises(DmlError, match="found 5 of 3") as caught:
        load("sop", tmp_path)
    assert "chair_final/2_1.JPG" in caught.value.why


def test_sop_refuses_paths_that_lead_outside_and_broken_lines(tmp_path):
    root = write_sop(tmp_path)
    source = root / "Ebay_test.txt"
    good = source.read_text()
    source.write_text(good + "99 11319 4 ../../x.JPG\n")
    with pytest.raises(DmlError, match=r"entry 6: .*leads outside"):
        load("sop", tmp_path, allow_incomplete=True)
    source.write_text(good + "99 11319\n")
    with pytest.raises(DmlError, match="line 6"):
        load("sop", tmp_path, allow_incomplete=True)
    source.write_text(good + "99 abc 4 chair_final/1_0.JPG\n")
    with pytest.raises(DmlError, match="'abc' is not a whole number"):
        load("sop", tmp_path, allow_incomplete=True)
    source.unlink()
    with pytest.raises(DmlError, match=r"Ebay_test.txt cannot be read"):
        load("sop", tmp_path, allow_incomplete=True)


# In-Shop


ITEMS = [("id_00000001", "train", 2), ("id_00000002", "query", 1), ("id_00000002", "gallery", 2)]


def write_inshop(root: Path, list_in="", images_in="", count=None) -> Path:
    lines = []
    for item, split, images in ITEMS:
        for i in range(images):
            path = f"img/WOMEN/Dresses/{item}/{split}_{i}_front.jpg"
            lines.append(f"{path:<70} {item} {split}")
            picture(root / images_in / path)
    head = [str(len(lines) if count is None else count), "image_name item_id evaluation_status"]
    (root / list_in).mkdir(exist_ok=True)
    (root / list_in / inshop.LIST).write_text("\n".join(head + lines) + "\n")
    return root / list_in / inshop.LIST


@pytest.mark.parametrize(("list_in", "images_in"), [("", ""), ("Eval", "Img"), ("Anno", "")])
def test_inshop_has_train_query_and_gallery(tmp_path, list_in, images_in):
    write_inshop(tmp_path, list_in, images_in)
    data = load("inshop", tmp_path, allow_incomplete=True)
    assert data.counts() == {"train": (2, 1), "query": (1, 1), "gallery": (2, 1)}
    assert labels_in(data, "query") == labels_in(data, "gallery") == {"id_00000002"}
    assert data.image(0).shape == (6, 8, 3)


def test_inshop_counts_are_asserted(tmp_path, monkeypatch):
    write_inshop(tmp_path)
    with pytest.raises(DmlError) as caught:
        load("inshop", tmp_path)
    for said in ("25,882 images of 3,997", "14,218 images of 3,985", "12,612 images of 3,985"):
        assert said in caught.value.why
    monkeypatch.setattr(inshop, "EXPECTED", {"train": (2, 1), "query": (1, 1), "gallery": (2, 1)})
    assert load("inshop", tmp_path).notes == ()


def test_inshop_list_that_was_cut_short_is_noticed(tmp_path):
    write_inshop(tmp_path, count=52_712)
    with pytest.raises(DmlError, match="promises 52,712 images, it names 5"):
        load("inshop", tmp_path)


def test_inshop_refuses_hostile_paths_and_unknown_splits(tmp_path):
    source = write_inshop(tmp_path)
    good = source.read_text()
    source.write_text(good + "img/../../x.jpg id_1 train\n")
    with pytest.raises(DmlError, match=r"entry 8: .*leads outside"):
        load("inshop", tmp_path, allow_incomplete=True)
    source.write_text(good + "img/x.jpg id_1 tset\n")
    with pytest.raises(DmlError, match="line 8: 'tset'"):
        load("inshop", tmp_path, allow_incomplete=True)


# All four


@pytest.mark.parametrize("module", [cub, cars, sop, inshop])
def test_expected_counts_add_up_to_the_published_totals(module):
    totals = {"cub": 11_788, "cars": 16_185, "sop": 120_053, "inshop": 52_712}
    name = module.__name__.rpartition(".")[2]
    assert sum(images for images, _ in module.EXPECTED.values()) == totals[name]


def test_nothing_at_all_is_an_error_even_when_incomplete_is_allowed(tmp_path):
    root = write_cub(tmp_path)
    for file in (root / "images").rglob("*.jpg"):
        file.unlink()
    with pytest.raises(DmlError, match="not the complete data set"):
        load("cub", tmp_path, allow_incomplete=True)
