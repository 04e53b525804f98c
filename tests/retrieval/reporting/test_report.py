"""The page of a report as the command writes it."""

import json

import numpy as np
import pytest
from PIL import Image

from retrieval.embeddings import Split
from retrieval.formats.hdf5.writing import write
from tests.commands import call


@pytest.fixture
def photos(tmp_path, clustered):
    """embeddings.h5 with paths that lead to images, to nothing, and out of the folder."""
    X, labels = clustered
    root = tmp_path / "photos"
    root.mkdir()
    paths = [f"{n:03}.png" for n in range(60)]
    for n, path in enumerate(paths[:50]):
        Image.new("RGB", (80, 60), (n, 2 * n, 200)).save(root / path)
    Image.new("RGB", (80, 60), (255, 0, 0)).save(tmp_path / "secret.png")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "deep").mkdir()
    paths[50:56] = [
        "../secret.png",
        str(tmp_path / "secret.png"),
        "link.png",
        "a\x00b",
        "deep",
        "deep/../000.png",
    ]
    target = tmp_path / "a.h5"
    write(target, {"test": Split(X, labels, np.array(paths))}, None, {"model": "m"})
    return target


def page_view(path):
    text = path.read_text(encoding="utf-8")
    found = text.split('id="view"', 1)[1].split(">", 1)[1].split("</script>", 1)[0]
    return json.loads(found)


def test_the_command_writes_one_page_and_prints_its_path(photos, tmp_path):
    out = tmp_path / "page.html"
    args = ("report", photos, "--out", out, "--no-nmi", "--map", "pca", "--distance", "l2")
    result = call(*args, "--images", tmp_path / "photos")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{out}\n"
    view = page_view(out)
    assert view["distance"] == "l2"
    assert view["result"]["source"]["attrs"]["model"] == "m"
    assert ["model", "m"] in view["provenance"]
    again = call(*args)
    assert again.exit_code == 1
    assert "exists already" in again.stderr
    assert call(*args, "--force").exit_code == 0
    assert page_view(out)["thumbs"]["images"] == []


def test_images_outside_the_folder_are_never_shown(photos, tmp_path):
    out = tmp_path / "page.html"
    result = call(
        "report", photos, "--out", out, "--no-nmi", "--map", "none", "--images", tmp_path / "photos"
    )
    view = page_view(out)
    pictured = {
        path
        for path, thumb in zip(view["items"]["path"], view["items"]["thumb"], strict=True)
        if thumb >= 0
    }
    assert pictured == {f"{n:03}.png" for n in range(50)} | {"deep/../000.png"}
    assert len(view["thumbs"]["images"]) == 50
    assert "9 of 60" in result.stderr


def test_inputs_are_not_overwritten_and_mistakes_are_named(photos, tmp_path):
    before = photos.read_bytes()
    quick = ("--no-nmi", "--map", "none")
    for args, code, words in (
        ((photos, "--out", photos, "--force"), 1, "both an input and the output"),
        ((photos, "--out", tmp_path / "best.pt", "--force"), 1, "is not the name of a report"),
        ((tmp_path / "none.h5",), 1, "none.h5"),
        ((photos, "--images", tmp_path / "nowhere"), 1, "no folder"),
        ((photos, "--run", tmp_path), 1, "not a run folder"),
        ((photos, "--compare", tmp_path / "none.h5"), 1, "none.h5"),
        ((photos, "--distance", "dot"), 2, "dot"),
        ((photos, "--map", "umap"), 2, "umap"),
    ):
        out = () if "--out" in args else ("--out", tmp_path / "page.html")
        result = call("report", *quick, *args, *out)
        assert (result.exit_code, words in result.stderr) == (code, True), result.stderr
        assert result.stdout == ""
    np.save(tmp_path / "x.npy", np.eye(4))
    np.save(tmp_path / "y.npy", np.array([0, 0, 1, 1]))
    args = ("report", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", *quick)
    result = call(*args, "--out", tmp_path / "page.html", "--images", tmp_path)
    assert result.exit_code == 1
    assert "holds no paths" in result.stderr
    assert photos.read_bytes() == before
    assert not (tmp_path / "page.html").exists()


def test_a_failed_write_leaves_the_old_page(photos, tmp_path, monkeypatch):
    import os

    out = tmp_path / "page.html"
    old = '<!doctype html><meta name="generator" content="dmltool 0">'
    out.write_text(old)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    result = call("report", photos, "--out", out, "--no-nmi", "--map", "none", "--force")
    assert result.exit_code == 1
    assert "No space left" in result.stderr
    assert out.read_text() == old
    assert [path.name for path in tmp_path.glob(".page*")] == []


def test_queries_and_gallery_may_come_from_two_files(tmp_path, clustered):
    X, labels = clustered
    for name, part in (("q", slice(None, 20)), ("g", slice(20, None))):
        np.save(tmp_path / f"{name}.npy", X[part])
        np.save(tmp_path / f"{name}_labels.npy", labels[part])
    out = tmp_path / "page.html"
    result = call(
        "report",
        tmp_path / "q.npy",
        "--labels",
        tmp_path / "q_labels.npy",
        "--gallery",
        tmp_path / "g.npy",
        "--gallery-labels",
        tmp_path / "g_labels.npy",
        "--out",
        out,
        "--no-nmi",
        "--map",
        "none",
    )
    assert result.exit_code == 0, result.stderr
    view = page_view(out)
    assert view["result"]["protocol"] == "query-gallery"
    sides = view["items"]["side"]
    assert all(sides[q["item"]] == 0 for q in view["queries"])
    assert all(sides[n] == 1 for q in view["queries"] for n in q["near"])
    for n, (side, row) in enumerate(zip(sides, view["items"]["row"], strict=True)):
        assert view["items"]["class"][n] == labels[row + 20 * side]
