"""In-Shop Clothes Retrieval in its official layouts, cut short and hostile."""

from pathlib import Path

import pytest

from retrieval.errors import DmlError
from tests.trainer.data.datasets.trees import labels_in, picture
from trainer.data.datasets import inshop, load

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


@pytest.mark.parametrize("count", ["²", "9" * 5000, "many"])
def test_a_count_of_inshop_that_is_no_number_is_an_error(tmp_path, count):
    write_inshop(tmp_path, count=count)
    with pytest.raises(DmlError, match=r"line 1: .*not a whole number"):
        load("inshop", tmp_path, allow_incomplete=True)


@pytest.mark.parametrize("lost", [1, 2])
def test_no_image_of_inshop_is_lost_without_the_first_lines(tmp_path, lost):
    source = write_inshop(tmp_path)
    source.write_text("\n".join(source.read_text().splitlines()[lost:]))
    assert len(load("inshop", tmp_path, allow_incomplete=True)) == 5
    with pytest.raises(DmlError, match="promises no count, it names 5"):
        load("inshop", tmp_path)
