"""Stanford Online Products in its official layout, whole, incomplete and hostile."""

from pathlib import Path

import pytest

from retrieval.errors import DmlError
from tests.trainer.data.datasets.trees import labels_in, picture
from trainer.data.datasets import load, sop


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
