"""Configs, presets and what the command line changes of them."""

import os
import time
import tomllib
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from retrieval.errors import DmlError
from retrieval.files import write_text
from tests.trainer.conftest import small_config
from trainer import toml
from trainer.config import (
    Batches,
    Config,
    Data,
    Input,
    Loss,
    Optimizer,
    Phase,
)
from trainer.resolve import (
    changed,
    default_preset,
    parsed,
    preset_names,
    preset_path,
    preset_summary,
    resolve,
    resumed,
    starting_preset,
)
from trainer.run.setup import balanced, open_data
from trainer.run.watch import Watch
from trainer.validate import check_names, from_dict

PUBLISHED = {
    "cub-ce": (0.02, 0.0, 30, False, True, (0.25, 0.25, 0.25, 0.0)),
    "cars-ce": (0.05, 0.0, 100, True, False, (0.3, 0.3, 0.3, 0.1)),
    "sop-ce": (0.003, 0.99, 100, True, False, (0.0, 0.0, 0.0, 0.0)),
    "inshop-ce": (0.003, 0.99, 100, True, False, (0.0, 0.0, 0.0, 0.0)),
}
GROUP = {  # classes, images, anchors, temperature; decay of the paper; rate and decay of the code
    "cub-group": (6, 9, 2, 24.0, 1e-6, 1.564e-4, 6.06e-6),
    "cars-group": (5, 7, 3, 79.0, 1e-7, 2e-4, 4.86e-7),
    "sop-group": (10, 6, 2, 54.0, 1e-12, 6.08e-4, 5.27e-12),
}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_has_a_summary_and_names_its_command(name):
    config, start = resolve(name, None, {})
    assert start == name
    assert preset_summary(name)
    text = preset_path(name).read_text()
    assert f"# dmltool train --preset {name}" in text
    assert config.loss.name in name or name.startswith("photos")


def test_all_promised_presets_are_there():
    assert set(preset_names()) >= {
        *PUBLISHED,
        *GROUP,
        *(f"{name}-code" for name in GROUP),
        "fashion-spce",
        "glyphs-ce",
        "glyphs-spce",
        "glyphs-group",
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_cross_entropy_presets_are_those_of_the_paper(name):
    config, _ = resolve(name, None, {})
    lr, momentum, epochs, batchnorm, keep_ratio, jitter = PUBLISHED[name]
    assert (config.optimizer.name, config.optimizer.lr) == ("sgd", lr)
    assert (config.optimizer.momentum, config.optimizer.weight_decay) == (momentum, 5e-4)
    assert (config.schedule.epochs, config.schedule.name, config.schedule.warmup) == (
        epochs,
        "cosine",
        100,
    )
    assert (config.network.backbone, config.network.weights) == ("resnet50", "imagenet")
    assert (config.network.batchnorm, config.network.freeze_batchnorm) == (batchnorm, True)
    assert (config.input.resize, config.input.keep_ratio, config.input.crop) == (
        256,
        keep_ratio,
        224,
    )
    assert (config.input.jitter, config.input.scale) == (jitter, (0.16, 1.0))
    assert config.input.ratio == ((1.0, 1.0) if name == "cars-ce" else (0.75, 4 / 3))
    assert (config.batches.size, config.batches.classes) == (128, 0)
    assert config.loss.options == {"smoothing": 0.1, "dropout": 0.5}


@pytest.mark.parametrize("name", GROUP)
def test_group_presets_are_those_of_the_paper(name):
    config, _ = resolve(name, None, {})
    classes, images, anchors, temperature, decay, _, _ = GROUP[name]
    assert (config.batches.classes, config.batches.images) == (classes, images)
    assert config.batches.sampling == "classes"
    options = {"anchors": anchors, "temperature": temperature, "iterations": 1}
    assert config.loss.options == options | {"diagonal": 0.0, "ce_weight": 0.0, "bias": False}
    expected = Optimizer("adam", 2e-4, weight_decay=decay)
    assert config.optimizer == config.optimizer_in(0) == expected
    assert config.phase == Phase(10)
    assert (config.schedule.epochs, config.schedule.milestones) == (70, (40,))
    assert (config.input.train_crop, config.input.crop) == ("random", 227)
    assert (config.input.resize, config.input.keep_ratio) == (256, False)
    assert (config.network.backbone, config.network.dim) == ("bninception", 512)


@pytest.mark.parametrize("name", GROUP)
def test_group_code_presets_are_those_of_the_public_code(name):
    config, _ = resolve(f"{name}-code", None, {})
    classes, images, anchors, temperature, _, lr, decay = GROUP[name]
    assert (config.batches.classes, config.batches.images) == (classes, images)
    assert config.batches.sampling == "classes"
    options = {"anchors": anchors, "temperature": temperature, "iterations": 1}
    assert config.loss.options == options | {"diagonal": 1.0, "ce_weight": 1.0, "bias": True}
    later, first = config.optimizer, config.optimizer_in(9)
    assert config.optimizer_in(10) == later
    assert (later.name, later.decay_all, later.decoupled, later.eps) == ("radam", True, True, 1e-8)
    assert (later.lr, later.weight_decay) == pytest.approx((lr, decay), rel=2e-3)
    assert (first.name, first.lr, first.eps, first.weight_decay) == ("radam", 3e-4, 1e-2, 0.0)
    assert (config.phase.epochs, config.phase.batch, config.phase.augment) == (10, 32, False)
    assert (config.schedule.epochs, config.schedule.milestones) == (80, (40,))
    assert (config.input.train_crop, config.input.crop) == ("resized", 227)
    assert (config.input.scale, config.input.ratio) == ((0.08, 1.0), (0.75, 4 / 3))
    assert (config.network.backbone, config.network.dim) == ("bninception", 0)
    assert config.data.min_images == (3 if name.startswith("sop") else 1)


def test_classification_epochs_of_older_files_are_those_of_the_phase():
    old = {"loss": {"name": "group", "classification_epochs": 3}}
    assert from_dict(old, "it").phase == Phase(3)
    assert from_dict(old | {"phase": {"batch": 8}}, "it").phase == Phase(3, 8)


def test_the_phase_has_the_other_settings_of_the_optimiser():
    settings = ["phase.epochs=2", "phase.optimizer.lr=1", "optimizer.weight_decay=0.5"]
    config, _ = resolve("glyphs-group", None, {}, settings)
    assert config.optimizer_in(1) == replace(config.optimizer, lr=1.0)
    assert config.optimizer_in(2) == config.optimizer
    assert isinstance(config.phase.optimizer["lr"], float)
    other, _ = resolve("cub-group", None, {"loss.name": "spce"})
    assert other.phase == Phase()  # no head to classify with


@pytest.mark.parametrize("name", preset_names())
def test_a_config_survives_being_written_as_toml(name):
    config, _ = resolve(name, None, {})
    assert from_dict(tomllib.loads(config.to_toml()), "it") == config


def test_odd_texts_survive_being_written_as_toml():
    odd = 'a "b" \\ \n \x7f \x01 ü 雪 \U0001f600'
    config = replace(Config(), data=Data(root=odd, options={"a b": [1, {"c": True}], "x": 1e300}))
    assert from_dict(tomllib.loads(config.to_toml()), "it") == config
    assert tomllib.loads(f"x = {toml.render(float('inf'))}")["x"] == float("inf")


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Config().loss = Loss()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["optimizer.lrr=1"], "did you mean optimizer.lr?"),
        (["optimiser.lr=1"], "did you mean optimizer?"),
        (["optimizer.zzz=1"], "there is no key optimizer.zzz; there are name, lr"),
        (["network.lr=1"], "did you mean optimizer.lr?"),
        (["optimizer.lr=fast"], "a number belongs here"),
        (["schedule.epochs=1.5"], "a whole number belongs here"),
        (["run.compile=1"], "true or false belongs here"),
        (["schedule.epochs=true"], "a whole number belongs here"),
        (["input.scale=[0.1]"], "a list of 2 belongs here"),
        (["input.scale=0.1"], "a list belongs here"),
        (["loss.options=3"], "a table of keys belongs here"),
        (["optimizer.lr=-1"], "optimizer.lr = -1.0: from 0"),
        (["optimizer.lr=nan"], "optimizer.lr = nan: from 0"),
        (["optimizer.name=sdg"], "one of sgd, adam, radam, adamw"),
        (["input.scale=[0.9, 0.1]"], "the smaller number comes first"),
        (["batches.classes=4"], "go together"),
        (["loss.length=-1"], "loss.length = -1.0: from 0"),
        (["loss.miner_options.epsilon=0.1"], "loss.miner names no miner"),
        (["phase.epochs=99"], "more than schedule.epochs"),
        (["phase.optimizer.lrr=1"], "there is no key phase.optimizer.lrr"),
        (["phase.optimizer.problems=1"], "there is no key phase.optimizer.problems"),
        (["phase.optimizer.lr=fast"], "phase.optimizer.lr = 'fast': a number belongs here"),
        (["phase.optimizer.lr=-1"], "phase.optimizer.lr = -1.0: from 0"),
        (["optimizer.decoupled=true", "optimizer.name=sgd"], "sgd has no such weight decay"),
        (["batches.sampling=evenly"], "one of images, classes"),
        (["lr=1"], "did you mean optimizer.lr?"),
        (["optimizer.lr"], "table.key=value"),
        (["data.root.x=1", "data.root.x.y=2"], "is not a table"),
    ],
)
def test_what_is_wrong_with_a_setting_is_said(settings, told):
    with pytest.raises(DmlError) as caught:
        resolve("glyphs-ce", None, {}, settings)
    assert told in str(caught.value)


def test_options_of_a_miner_are_dropped_with_it(tmp_path):
    file = tmp_path / "my.toml"
    options = {"miner": "multi_similarity", "miner_options": {"epsilon": 0.2}}
    config, _ = resolve("glyphs-group", None, {"loss.name": "triplet"}, ["loss.miner=semihard"])
    file.write_text(replace(config, loss=Loss("triplet", **options)).to_toml())
    same, _ = resolve(None, file, {"loss.miner": "multi_similarity"})
    assert same.loss.miner_options == {"epsilon": 0.2}
    other, _ = resolve(None, file, {"loss.miner": "semihard"})
    assert other.loss.miner_options == {}


def test_all_problems_are_told_together():
    with pytest.raises(DmlError) as caught:
        resolve("glyphs-ce", None, {}, ["optimizer.lr=-1", "schedule.epochs=0", "data.cache=x"])
    assert all(part in str(caught.value) for part in ("optimizer.lr", "schedule.epochs", "cache"))
    with pytest.raises(DmlError) as caught:
        from_dict({"lr": 1, "data": {"rot": "x"}, "loss": 3}, "it")
    assert all(part in str(caught.value) for part in ("optimizer.lr", "data.root", "loss = 3"))


def test_wrong_keys_types_and_values_are_told_together():
    tables = {
        "optimizer": {"lr": "fast"},
        "run": {"sed": 1, "select": "best"},
        "input": {"crop": 9e9},
    }
    with pytest.raises(DmlError) as caught:
        from_dict(tables | {"schedule": {"epochs": 0}}, "The file")
    lines = caught.value.why.splitlines()
    keys = ("optimizer.lr", "run.sed", "input.crop", "schedule.epochs", "run.select")
    assert [key for key in keys if sum(key in line for line in lines) == 1] == list(keys)
    assert caught.value.what == "The file cannot be used."


def test_problems_of_a_file_and_of_options_are_told_apart(tmp_path):
    (tmp_path / "my.toml").write_text("[schedule]\nepochs = 0\n")
    names = {"optimizer.lr": "--lr"}
    with pytest.raises(DmlError) as caught:
        resolve(None, tmp_path / "my.toml", {"optimizer.lr": -1.0}, (), names)
    assert "my.toml cannot be used" in caught.value.what
    assert "--lr -1.0: from 0" in caught.value.why
    assert "schedule.epochs = 0: from 1" in caught.value.why


@pytest.mark.parametrize("given", [({"loss.name": "spce"}, ()), ({}, ["loss.name=spce"])])
def test_a_value_in_place_of_a_table_is_told_as_such(tmp_path, given):
    (tmp_path / "my.toml").write_text('loss = "ce"\n')
    with pytest.raises(DmlError, match="loss = 'ce': a table of keys belongs here"):
        resolve(None, tmp_path / "my.toml", *given)


def test_several_wrong_names_are_told_together():
    wrong = ["loss.name=grup", "network.backbone=resnet5", "data.dataset=foldr"]
    config, _ = resolve("glyphs-ce", None, {}, wrong)
    with pytest.raises(DmlError) as caught:
        check_names(config)
    assert all(name in caught.value.why for name in ("'group'", "'resnet50'", "'folder'"))


def test_settings_take_bare_words_numbers_and_nested_keys():
    tables = changed(
        {}, parsed(["data.root=a b", "loss.options.temperature=3", "run.compile=true"])
    )
    assert tables == {
        "data": {"root": "a b"},
        "loss": {"options": {"temperature": 3}},
        "run": {"compile": True},
    }


def test_another_loss_drops_the_options_of_the_presets_loss():
    config, _ = resolve("cub-group", None, {"loss.name": "spce"})
    assert config.loss == Loss(name="spce")
    config, _ = resolve("cub-group", None, {"loss.name": "group"})
    assert config.loss.options["temperature"] == 24.0


def test_statistics_of_a_network_without_weights_are_not_frozen():
    assert resolve("photos-ce", None, {})[0].network.freeze_batchnorm
    config, _ = resolve("photos-ce", None, {"network.weights": "none"})
    assert not config.network.freeze_batchnorm


def test_settings_come_after_flags():
    config, _ = resolve("glyphs-ce", None, {"optimizer.lr": 0.5}, ["optimizer.lr=0.25"])
    assert config.optimizer.lr == 0.25


@pytest.mark.parametrize(
    ("dataset", "loss", "preset"),
    [
        (None, None, "glyphs-ce"),
        (None, "group", "glyphs-group"),
        ("cub", "group", "cub-group"),
        ("cub", "triplet", "cub-ce"),
        ("idx", None, "fashion-spce"),
        ("folder", "spce", "photos-ce"),
    ],
)
def test_without_a_preset_the_fitting_one_is_taken(dataset, loss, preset):
    assert default_preset(dataset, loss) == preset


def test_own_images_without_weights_get_settings_that_learn_from_nothing():
    assert default_preset("folder", None, "none") == "photos-scratch-ce"
    assert default_preset("csv", "spce", "none") == "photos-scratch-ce"
    assert default_preset("cub", None, "none") == "cub-ce"
    assert default_preset("folder", None, "imagenet") == "photos-ce"
    config, _ = resolve(None, None, {"data.dataset": "folder", "network.weights": "none"})
    pretrained, _ = resolve(None, None, {"data.dataset": "folder"})
    assert config.network.backbone == "smallcnn"
    assert config.optimizer.lr >= 10 * pretrained.optimizer.lr
    assert config.input.crop <= 64


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ({"data.root": "p", "network.weights": "none"}, []),
        ({"data.root": "p"}, ["network.weights=none"]),
        ({}, ["data.root = p", 'network.weights = "none"']),
        ({"data.root": "p", "network.weights": "imagenet"}, ["network.weights=none"]),
    ],
)
def test_names_by_set_count_as_those_by_flags(flags, settings):
    config, name = resolve(None, None, flags, settings)
    wanted, _ = resolve("photos-scratch-ce", None, {"data.root": "p"})
    assert (config, name) == (wanted, "folder-ce")
    assert starting_preset(flags | parsed(settings)) == "photos-scratch-ce"


def test_another_loss_or_no_weights_by_set_fit_a_preset_too():
    config, _ = resolve("cub-group", None, {}, ["loss.name=spce"])
    assert config.loss == Loss(name="spce")
    config, _ = resolve("photos-ce", None, {}, ["network.weights=none"])
    assert not config.network.freeze_batchnorm


def test_a_loss_that_compares_gets_batches_that_hold_several_images_of_a_class():
    photos = {"data.dataset": "folder"}
    assert resolve(None, None, {**photos, "loss.name": "group"})[0].batches.balance
    assert resolve(None, None, photos, ["loss.name=spce"])[0].batches.balance
    for flags, settings in (
        (photos, []),
        ({**photos, "loss.name": "arcface"}, []),
        ({**photos, "loss.name": "group", "batches.size": 9}, []),
        ({**photos, "loss.name": "group"}, ["batches.size=9"]),
        ({"loss.name": "group"}, []),  # a preset of its own
    ):
        assert not resolve(None, None, flags, settings)[0].batches.balance
    assert not resolve("photos-ce", None, {"loss.name": "group"})[0].batches.balance


def test_a_file_is_read_and_bad_ones_are_named(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text('[loss]\nname = "spce"\n')
    config, name = resolve(None, path, {})
    assert (config, name) == (replace(Config(), loss=Loss(name="spce")), "my")
    path.write_text("[loss")
    with pytest.raises(DmlError, match=r"my\.toml is not TOML"):
        toml.read(path)
    with pytest.raises(DmlError, match="There is no configuration"):
        toml.read(tmp_path / "none.toml")
    with pytest.raises(DmlError, match="exclude each other"):
        resolve("cub-ce", path, {})
    with pytest.raises(DmlError) as caught:
        resolve("cub-cee", None, {})
    assert "--preset cub-ce" in str(caught.value)


def test_a_run_on_a_folder_that_is_not_utf8_says_which_line_of_its_config_is_at_fault(tmp_path):
    root = os.fsdecode(b"/data/caf\xe9")
    config = replace(Config(), data=replace(Config().data, root=root))
    write_text(tmp_path / "config.toml", config.to_toml())
    with pytest.raises(DmlError, match=r"config.toml, line \d+: .* is not UTF-8") as caught:
        resolve(None, tmp_path / "config.toml", {})
    assert "Rename" in caught.value.fix


def test_resuming_changes_only_what_the_result_does_not_depend_on():
    saved = Config()
    moved = resumed(saved, {"data.root": "/elsewhere"}, ["data.workers=3"])
    assert (moved.data.root, moved.data.workers) == ("/elsewhere", 3)
    with pytest.raises(DmlError, match=r"optimizer\.lr cannot be changed"):
        resumed(saved, {"optimizer.lr": 1.0}, [])
    with pytest.raises(DmlError, match=r"run\.seed cannot be changed"):
        resumed(saved, {}, ["run.seed=3"])


def test_every_field_has_a_default_that_is_sound():
    for part in fields(Config):
        assert list(getattr(Config(), part.name).problems()) == []
    assert [problem.text for problem in Input(crop=300).problems()] == [
        "input.crop = 300 does not fit into input.resize = 256"
    ]
    assert list(Optimizer(momentum=1.0).problems())


HOSTILE_TOML = {
    "lists": "a = " + "[" * 40_000,
    "tables": "a = " + "{b=" * 20_000,
    "a name": ".".join("a" * 25_000) + " = 1\n",
    "a quoted name": ".".join(['"a b"'] * 10_000) + " = 1\n",
    "a header": f"[ {' . '.join('a' * 20_000)} ]\n" + "\n".join(f"a{n} = 1" for n in range(900)),
    "one word": "a" * 99_000,
    "quotes": '"' * 99_000,
    "large": "# " + "x" * 200_000,
}


@pytest.mark.parametrize("name", HOSTILE_TOML)
def test_toml_made_to_take_long_is_refused_at_once(tmp_path, name):
    path = tmp_path / "x.toml"
    path.write_text(HOSTILE_TOML[name])
    began = time.process_time()  # others may keep the machine busy
    with pytest.raises(DmlError, match=r"x.toml is not"):
        toml.read(path)
    assert time.process_time() - began < 1


def test_a_configuration_without_end_is_refused():
    with pytest.raises(DmlError, match=r"/dev/zero is not a configuration"):
        toml.read(Path("/dev/zero"))


def test_a_setting_that_is_nested_too_deeply_is_a_text():
    assert toml.parse_value("[" * 40_000).startswith("[[")


def test_ordinary_names_and_texts_may_hold_dots():
    assert toml.parse('a.b."c.d".e = "1.2.3, and so on... 1.5"\n[x.y]\nz = [0.5, 1.5]')["x"]["y"]


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_beyond_all_floats_is_explained(digits):
    with pytest.raises(DmlError, match=r"optimizer\.lr = .*a smaller number belongs here"):
        from_dict({"optimizer": {"lr": 10**digits}}, "x.toml")


def test_anchors_that_leave_nothing_to_refine_are_refused_also_if_they_are_the_default(pictures):
    with pytest.raises(DmlError, match="anchors = 2 with 2 images"):
        check_names(Config(loss=Loss("group"), batches=Batches(classes=4, images=2)))
    check_names(Config(loss=Loss("group"), batches=Batches(classes=4, images=3)))
    config = small_config(pictures)
    config = replace(config, loss=Loss("group", {"anchors": 4}), batches=Batches(16, balance=True))
    source = open_data(config, Watch())
    with pytest.raises(DmlError, match="anchors = 4 with 4 images"):
        balanced(config, source.data, 1, Watch())
