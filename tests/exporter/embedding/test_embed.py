"""From own images to a report without flags: labelled or not, moved, with any names."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from exporter import commands
from exporter.embedding.embed import embed, find_data
from exporter.exporting import MODEL, Settings, export
from exporter.onnx.metadata import describe_checkpoint
from exporter.onnx.model import describe
from retrieval.errors import DmlError
from retrieval.loading.load import load
from tests.commands import call
from tests.exporter.models import PROPERTIES, mean_model
from trainer.config import Config, Data, Run
from trainer.data import datasets
from trainer.reporting import pictures_of
from trainer.run.setup import load_data
from trainer.run.state import preprocessing


@pytest.fixture
def model(tmp_path):
    onnx.save(mean_model(properties=PROPERTIES), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def draw(folder, classes=("cat", "dog", "hen"), each=4):
    for place, name in enumerate(classes):
        os.makedirs(os.path.join(os.fsencode(folder), os.fsencode(name)))
        for n in range(each):
            colour = (60 * place + 3 * n, 40 * n, 200 - 50 * place)
            with open(
                os.path.join(os.fsencode(folder), os.fsencode(name), b"%d.png" % n), "wb"
            ) as f:
                Image.new("RGB", (9, 9), colour).save(f, "PNG")


def report(file, *options):
    page = file.with_name("page.html")
    done = call("report", file, "--out", page, "--force", "--no-nmi", "--map", "none", *options)
    assert done.exit_code == 0, done.stderr
    return done.stderr, page.read_text().count("data:image/webp")


def test_a_report_finds_the_images_that_were_embedded(model, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    draw(tmp_path / "project" / "photos")
    assert call("embed", model, "photos", "--out", "x.h5").exit_code == 0
    monkeypatch.chdir(tmp_path)  # the given name leads nowhere from here
    told, images = report(tmp_path / "project" / "x.h5")
    assert images == 12
    assert "not shown" not in told
    os.rename(tmp_path / "project", tmp_path / "moved")  # with the file
    assert report(tmp_path / "moved" / "x.h5")[1] == 12
    os.rename(tmp_path / "moved" / "photos", tmp_path / "elsewhere")  # without it
    told, images = report(tmp_path / "moved" / "x.h5")
    assert images == 0
    assert "--images" in told
    assert report(tmp_path / "moved" / "x.h5", "--images", tmp_path / "elsewhere")[1] == 12


def test_a_file_records_how_to_get_its_images_again(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "photos")
    embed(model, "photos", tmp_path / "x.h5")
    said = json.loads(load(tmp_path / "x.h5").attrs["images"])
    assert (said["root"], said["absolute"], said["relative"]) == (
        "photos",
        str(tmp_path / "photos"),
        "photos",
    )
    assert said["options"]["test_fraction"] == 0
    shutil.copy("x.h5", "y.h5")
    assert call("merge", "x.h5", "y.h5", "--out", "both.h5").exit_code == 0
    said.pop("root")  # as it was typed, from another folder perhaps
    assert json.loads(load("both.h5").attrs["images"]) == said


def test_glyphs_of_another_seed_are_drawn_again(model, tmp_path):
    from exporter.embedding.engine import onnx_engine
    from exporter.embedding.writing import embed

    data = datasets.load("glyphs", seed=5)
    rows = {"test": data.rows("test")[:20]}
    embed(onnx_engine(describe(model), "cpu"), data, rows, tmp_path / "x.h5")
    read, note = pictures_of(load(tmp_path / "x.h5"), None, None)
    assert note == ""
    path = data.paths[rows["test"][0]]
    expected = datasets.load("glyphs", seed=5, size=64).reader(path, None)
    np.testing.assert_array_equal(read(path), expected)


def test_a_file_that_does_not_say_where_its_images_are_names_the_flag(tmp_path):
    from retrieval.embeddings import Split
    from retrieval.formats.hdf5.writing import write

    paths = np.array([f"{n}.png" for n in range(6)])
    vectors = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    write(tmp_path / "x.h5", {"test": Split(vectors, np.arange(6) % 2, paths)})
    assert "--images" in report(tmp_path / "x.h5")[0]
    strange = ({"files": True}, {"files": True, "absolute": "\0"}, {"options": 3}, {"root": 3})
    for images in ("3", "[]", "{", *map(json.dumps, strange)):
        attrs = {"images": images, "dataset": "idx"}
        same = {"test": Split(vectors, np.arange(6) % 2, paths)}
        write(tmp_path / "y.h5", same, attrs=attrs, force=True)
        assert report(tmp_path / "y.h5")[1] == 0


@pytest.mark.parametrize("kind", ["flat", "table"])
@pytest.mark.parametrize("options", [(), ("--half",), ("--skip-bad",)])
def test_images_without_labels_can_be_embedded(model, tmp_path, kind, options):
    flat = tmp_path / "flat"
    flat.mkdir()
    for n in range(6):
        Image.new("RGB", (9, 9), (40 * n, 0, 0)).save(flat / f"{n}.png")
    if "--skip-bad" in options:
        (flat / "bad.png").write_bytes(b"no image")
    names = sorted(path.name for path in flat.iterdir())
    data = flat
    if kind == "table":
        data = tmp_path / "list.csv"
        data.write_text("file,camera\n" + "".join(f"flat/{name},3\n" for name in names))
    done = call("embed", model, data, "--out", tmp_path / "x.h5", *options)
    assert done.exit_code == 0, done.stderr
    assert done.stderr.splitlines()[-1].endswith("--labels labels.txt")
    split = load(tmp_path / "x.h5").splits["test"]
    assert split.labels is None
    assert [os.path.basename(path) for path in split.paths] == [n for n in names if n != "bad.png"]
    done = call("eval", tmp_path / "x.h5")
    assert done.exit_code == 1
    assert "no labels" in done.stderr
    assert "--labels" in done.stderr
    (tmp_path / "labels.txt").write_text("0\n0\n0\n1\n1\n1\n")
    labels = ("--labels", tmp_path / "labels.txt")
    assert call("eval", tmp_path / "x.h5", *labels, "--no-nmi").exit_code == 0
    assert report(tmp_path / "x.h5", *labels)[1] == 6
    done = call("embed", model, data, "--out", tmp_path / "x.h5", "--resume")
    other = "--half" in options  # the finished file holds float16, and float32 is wanted
    assert done.exit_code == int(other), done.stderr
    assert ("x.h5 exists already." in done.stderr) == other
    assert ("bad.png: It is not an image" in done.stderr) == ("--skip-bad" in options)


def test_files_that_are_no_images_are_told(model, tmp_path):
    draw(tmp_path / "photos")
    (tmp_path / "photos" / "cat" / "IMG_1.heic").write_bytes(b"x")
    (tmp_path / "photos" / "empty").mkdir()
    done = call("embed", model, tmp_path / "photos", "--out", tmp_path / "x.h5")
    assert "1 folder without images left out: empty." in done.stderr
    assert "left out because of their suffix: 1 .heic." in done.stderr


@pytest.mark.parametrize("header", ["path,label", "path,camera"])
def test_images_that_are_listed_and_missing_are_left_out_on_request(model, tmp_path, header):
    draw(tmp_path / "photos")
    rows = "".join(f"photos/cat/{n}.png,cat\n" for n in range(6))
    (tmp_path / "list.csv").write_text(f"{header}\n{rows}")
    given = ("embed", model, tmp_path / "list.csv", "--out", tmp_path / "x.h5")
    done = call(*given)
    assert done.exit_code == 1
    assert "--skip-bad" in done.stderr
    done = call(*given, "--skip-bad")
    assert done.exit_code == 0, done.stderr
    assert "2 of 6 files that" in done.stderr
    assert len(load(tmp_path / "x.h5").splits["test"].vectors) == 4


def test_folders_are_embedded_whole_or_as_training_divides_them(tmp_path):
    draw(tmp_path / "photos", [f"class {n}" for n in range(8)])
    assert len(find_data(str(tmp_path / "photos"))) == 32
    assert find_data(f"folder:{tmp_path / 'photos'}").counts() == {"train": (24, 6), "test": (8, 2)}


def rows_of(config, *splits):
    """Rows of the splits as the run of a config divides its data."""
    images = load_data(config).counts()
    return {split: images[split][0] for split in splits}


@pytest.mark.parametrize("splits", [("train",), ("val",), ("val", "train")])
def test_classes_are_held_out_as_in_training_whichever_splits_are_embedded(splits, model, tmp_path):
    draw(tmp_path / "photos", [f"class {n}" for n in range(20)], each=2)
    given = f"folder:{tmp_path / 'photos'}"
    found = embed(model, given, tmp_path / "x.h5", splits=splits)
    data = Data("folder", str(tmp_path / "photos"))
    assert found["splits"] == rows_of(Config(data=data), *splits)
    assert "does not record how its training divided" in found["notes"][-1]
    assert "2 classes of 15 are held out" in found["notes"][-1]


@pytest.mark.parametrize(
    ("options", "select"),
    [
        ({"val_fraction": 0.4}, "val"),
        ({"val_seed": 3, "min_images": 3}, "val"),
        ({}, "test"),
        ({"min_images": 3}, "last"),
    ],
)
def test_the_division_of_a_models_own_training_is_taken(options, select, tmp_path):
    names = [f"class {n}" for n in range(10)]
    draw(tmp_path / "photos", names[:6], each=4)
    draw(tmp_path / "photos", names[6:], each=2)
    data = Data("folder", str(tmp_path / "photos"), **options)
    config = Config(data=data, run=Run(select=select))
    said = {"dmltool.dataset": "folder", "dmltool.division": division_of(config)}
    onnx.save(mean_model(properties=PROPERTIES | said), tmp_path / "net.onnx")
    splits = ("train", "val") if select == "val" else ("train",)
    given = f"folder:{tmp_path / 'photos'}"
    found = embed(tmp_path / "net.onnx", given, tmp_path / "x.h5", splits=splits)
    assert found["splits"] == rows_of(config, *splits)
    assert not any("does not record" in note for note in found["notes"])
    if select != "val":
        with pytest.raises(DmlError, match="no split val"):
            embed(tmp_path / "net.onnx", given, tmp_path / "y.h5", splits=("val",))


def division_of(config):
    """What the metadata of a model of the run say of it."""
    state = {
        "config": config.to_dict(),
        "preprocessing": preprocessing(config) | {"mean": [0.5] * 3, "std": [0.5] * 3},
        "versions": {},
    }
    return json.dumps(describe_checkpoint(state, "abc", 3)["division"])


def test_a_set_with_too_few_classes_to_hold_some_out_is_embedded_as_it_is(model, tmp_path):
    draw(tmp_path / "photos", [f"class {n}" for n in range(4)])
    given = f"folder:{tmp_path / 'photos'}"
    found = embed(model, given, tmp_path / "x.h5", splits=("train",))
    assert found["splits"] == {"train": 8}
    with pytest.raises(DmlError, match="too few classes"):
        embed(model, given, tmp_path / "y.h5", splits=("val",))


def test_images_without_splits_have_one_of_the_names_test_and_train(model, tmp_path):
    draw(tmp_path / "photos")
    photos = str(tmp_path / "photos")
    for splits, named in ((("val",), "val"), (("test", "val", "query"), "val, query")):
        with pytest.raises(DmlError, match=f"so it has no split {named}\\.") as caught:
            embed(model, photos, tmp_path / "x.h5", splits=splits)
        assert caught.value.fix.endswith(f"as train does: folder:{photos}")
    with pytest.raises(DmlError, match="test and train would hold the same images") as caught:
        embed(model, photos, tmp_path / "x.h5", splits=("test", "train"))
    assert caught.value.fix == "Choose one of them: --split test"
    for split in ("test", "train"):
        found = embed(model, photos, tmp_path / f"{split}.h5", splits=(split, split))
        assert found["splits"] == {split: 12}


def test_a_named_set_without_splits_is_not_named_twice(model, tmp_path):
    draw(tmp_path / "photos")
    table = tmp_path / "photos" / "t.csv"
    table.write_text("path,label,split\ncat/0.png,cat,train\ndog/0.png,dog,train\n")
    with pytest.raises(DmlError, match="has no split query") as caught:
        embed(model, f"csv:{table}", tmp_path / "x.h5", splits=("query",))
    assert caught.value.fix == "Leave out --split."


@pytest.mark.parametrize("data", ["folder:few", "folder:flat", "none", "csv:few", "idx:idx"])
def test_hints_name_only_options_that_embed_has(data, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "few")
    (tmp_path / "flat").mkdir()
    (tmp_path / "none" / "cat").mkdir(parents=True)
    (tmp_path / "idx").mkdir()
    (tmp_path / "idx" / "train-images-idx3-ubyte").touch()
    with pytest.raises(DmlError) as caught:
        embed(model, data, "x.h5")
    fix = caught.value.fix
    known = {name for option in commands.embed.params for name in option.opts}
    assert "embed: " in fix or set(re.findall("--[a-z-]+", fix)) <= known, fix


def test_data_that_cannot_be_embedded_is_named_for_what_it_is(tmp_path):
    image = tmp_path / "cat.JPG"
    Image.new("RGB", (8, 8)).save(image)
    empty = tmp_path / "empty"
    empty.mkdir()
    for data, what, fix in (
        (image, "is a single image", f"Name the folder: {tmp_path}"),
        (empty, "is an empty folder", "another folder"),
        (tmp_path / "none", "nothing to embed", "Check the path"),
        (f"cubb:{tmp_path}", "There is no data set 'cubb'", f"Did you mean cub:{tmp_path}?"),
    ):
        with pytest.raises(DmlError, match=what) as caught:
            find_data(str(data))
        assert fix in caught.value.fix


def test_names_that_are_not_utf8_go_through_embed_eval_and_report(model, tmp_path):
    draw(tmp_path / "photos", [b"caf\xe9", b"th\xe9", "日本".encode()])
    os.rename(
        os.fsencode(tmp_path) + b"/photos/caf\xe9/0.png",
        os.fsencode(tmp_path) + b"/photos/caf\xe9/\xff\xfe.png",
    )
    done = call("embed", model, tmp_path / "photos", "--out", tmp_path / "x.h5")
    assert done.exit_code == 0, done.stderr
    found = load(tmp_path / "x.h5")
    assert os.fsencode(found.splits["test"].paths[3]) == b"caf\xe9/\xff\xfe.png"
    out, classes = tmp_path / "r.json", tmp_path / "c.csv"
    done = call("eval", tmp_path / "x.h5", "--no-nmi", "--out", out, "--per-class", classes)
    assert done.exit_code == 0, done.stderr
    assert json.loads(out.read_text())["classes"] == 3
    assert b"caf" in classes.read_bytes()
    assert call("inspect", tmp_path / "x.h5").exit_code == 0
    assert call("compare", tmp_path / "x.h5", tmp_path / "x.h5", "--json").exit_code == 0
    told, images = report(tmp_path / "x.h5")
    assert images == 12
    assert "could not be read" not in told
    done = call("merge", tmp_path / "x.h5", tmp_path / "x.h5", "--out", tmp_path / "two.h5")
    assert done.exit_code == 0, done.stderr


def test_embed_takes_folders_tables_and_named_data_sets(trained, run, tmp_path):
    export([run], settings=Settings(embeddings=False))
    result = embed(run / MODEL, str(trained / "pictures"), tmp_path / "all.h5")
    assert result["splits"] == {"test": 96}
    table = Path(shutil.copytree(trained / "pictures", tmp_path / "pictures")) / "images.csv"
    lines = [f"class{c}/{n}.png,c{c}\n" for c in (0, 1) for n in (0, 1)]
    table.write_text("path,label\n" + "".join(lines))
    assert embed(run / MODEL, str(table), tmp_path / "t.h5")["splits"] == {"test": 4}
    assert find_data("glyphs").name == "glyphs"
    with pytest.raises(DmlError, match="images of cub have to be in a folder") as caught:
        find_data("cub")
    assert "cub:FOLDER" in caught.value.fix
    whole, some = (load(tmp_path / name).splits["test"] for name in ("all.h5", "t.h5"))
    paths = [str(path) for path in whole.paths]
    places = [paths.index(f"class{c}/{n}.png") for c in (0, 1) for n in (0, 1)]
    np.testing.assert_array_equal(whole.vectors[places], some.vectors)


def test_what_embed_reads_is_never_overwritten(trained, run, tmp_path):
    export([run], settings=Settings(embeddings=False))
    pictures = Path(shutil.copytree(trained / "pictures", tmp_path / "pictures"))
    table = pictures / "images.csv"
    table.write_text("path,label\nclass0/0.png,c0\nclass1/0.png,c1\n")
    for data, target, words in (
        (pictures, run / MODEL, "is both an input and the output"),
        (table, table, "is both an input and the output"),
        (pictures, pictures / "class0" / "0.png", "is not the name of an embedding file"),
    ):
        before = target.read_bytes()
        done = call("embed", run / MODEL, data, "--out", target, "--force")
        assert done.exit_code == 1
        assert words in done.stderr
        assert target.read_bytes() == before


def test_one_class_or_one_image_can_be_embedded(trained, run, tmp_path):
    export([run], settings=Settings(embeddings=False))
    shutil.copytree(trained / "pictures" / "class0", tmp_path / "alone" / "class0")
    model, data = run / MODEL, str(tmp_path / "alone")
    assert embed(model, data, tmp_path / "class.h5")["splits"] == {"test": 8}
    for path in sorted((tmp_path / "alone" / "class0").iterdir())[1:]:
        path.unlink()
    found = embed(model, data, tmp_path / "image.h5", half=True)
    assert found["splits"] == {"test": 1}
