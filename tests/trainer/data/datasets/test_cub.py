"""CUB-200-2011 in its official layout, whole, incomplete and hostile."""

import pytest

from retrieval.errors import DmlError
from tests.trainer.data.datasets.trees import labels_in, write_cub
from trainer.data.datasets import layout, load


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


def test_a_label_of_cub_that_is_no_number_is_named_by_its_own_line(tmp_path):
    root = write_cub(tmp_path)
    labels = (root / "image_class_labels.txt").read_text().splitlines()
    (root / "image_class_labels.txt").write_text("\n".join([*labels[1:], "1 x"]) + "\n")
    with pytest.raises(DmlError, match=r"image_class_labels.txt, line 10: 'x' is not a whole"):
        load("cub", tmp_path, allow_incomplete=True)
