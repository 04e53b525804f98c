import itertools
import re
from pathlib import Path

import pytest

from retrieval.errors import DmlError
from trainer.sweep.plan import Plan
from trainer.sweep.space import Range, cells, from_file, from_grid
from trainer.validate import check_names


def test_a_grid_has_every_combination_in_order():
    space = from_grid(["loss.options.anchors=0,1", "batches.images=4,6,8"])
    found = [tuple(cell.values()) for cell in cells(space)]
    assert found == [(a, i) for a in ("0", "1") for i in ("4", "6", "8")]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("loss.name=ce,group", ('"ce"', '"group"')),
        ("input.scale=[0.2, 1.0],[0.5, 1.0]", ("[0.2, 1.0]", "[0.5, 1.0]")),
        ("network.batchnorm=true,false", ("true", "false")),
        ("optimizer.lr=1e-3", ("0.001",)),
    ],
)
def test_values_of_a_grid_are_those_of_set(text, values):
    [parameter] = from_grid([text]).values()
    assert parameter == values


@pytest.mark.parametrize(
    "texts",
    [
        ["lr=1,2"],
        ["optimizer.lr"],
        ["optimizer.lr="],
        ["optimizer.lr=1,1"],
        ["optimizer.lr=1", "optimizer.lr=2"],
        ["run.seed=0,1"],
        ["run.select=val,test"],
        ["data.val_seed=0,1"],
        ["data.val_fraction=0.1,0.2"],
        ["data.min_images=1,4"],
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(texts):
    with pytest.raises(DmlError):
        from_grid(texts)


def test_advice_fits_the_grid_and_the_file(tmp_path):
    with pytest.raises(DmlError) as caught:
        from_grid(["lr="])
    assert "Did you mean optimizer.lr?" in caught.value.why
    with pytest.raises(DmlError, match=r"no file of parameters .*none\.toml") as caught:
        from_file(tmp_path / "none.toml")
    assert "optimizer.lr = {low" in caught.value.fix
    (tmp_path / "config.toml").write_text('[data]\ndataset = "folder"\n')
    with pytest.raises(DmlError, match="is not understood") as caught:
        from_file(tmp_path / "config.toml")
    assert "--set data.dataset" in caught.value.fix


def test_a_file_has_ranges_logarithms_whole_numbers_and_choices(tmp_path):
    file = tmp_path / "space.toml"
    file.write_text(
        "optimizer.lr = {low = 1e-4, high = 0.1, log = true}\n"
        "optimizer.momentum = {low = 0.0, high = 0.9}\n"
        "[batches]\nimages = {low = 2, high = 8}\n"
        '[loss]\nname = ["ce", "spce"]\n'
    )
    space = from_file(file)
    assert space["optimizer.lr"] == Range(1e-4, 0.1, log=True)
    assert not space["optimizer.momentum"].whole
    assert space["batches.images"].whole
    assert space["loss.name"] == ('"ce"', '"spce"')
    with pytest.raises(DmlError, match="range"):
        cells(space)


def test_every_corner_of_the_space_in_the_docs_can_be_trained(tmp_path):
    page = (Path(__file__).parents[3] / "docs/sweeps.md").read_text()
    (tmp_path / "space.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    space = from_file(tmp_path / "space.toml")
    ends = [
        one if isinstance(one, tuple) else [f"{one.low:g}", f"{one.high:g}"]
        for one in space.values()
    ]
    for values in itertools.product(*ends):
        check_names(Plan("glyphs-group").config(dict(zip(space, values, strict=True))))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "optimizer.lr = 3",
        "optimizer.lr = []",
        "optimizer.lr = {low = 1}",
        "optimizer.lr = {low = 2, high = 1}",
        "optimizer.lr = {low = 0, high = 1, log = true}",
        "optimizer.lr = {low = 0, high = 1, step = 2}",
        "optimizer.lr = {low = nan, high = 1}",
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, text):
    (tmp_path / "space.toml").write_text(text)
    with pytest.raises(DmlError):
        from_file(tmp_path / "space.toml")


def test_a_file_adds_to_a_grid_and_names_none_of_its_parameters(tmp_path):
    file, grid = tmp_path / "space.toml", from_grid(["optimizer.lr=0.1,0.2"])
    file.write_text("optimizer.momentum = [0.5, 0.9]\n")
    assert list(from_file(file, grid)) == ["optimizer.lr", "optimizer.momentum"]
    file.write_text("optimizer.lr = {low = 1e-3, high = 1e-1}\n")
    with pytest.raises(DmlError, match=r"optimizer\.lr, which was named before"):
        from_file(file, grid)
