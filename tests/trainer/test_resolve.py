"""Presets, and what a file, options and settings make of them."""

from dataclasses import replace

import pytest

from retrieval.errors import DmlError
from trainer import toml
from trainer.config import Config, Loss, Optimizer, Phase
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


def test_options_of_a_miner_are_dropped_with_it(tmp_path):
    file = tmp_path / "my.toml"
    options = {"miner": "multi_similarity", "miner_options": {"epsilon": 0.2}}
    config, _ = resolve("glyphs-group", None, {"loss.name": "triplet"}, ["loss.miner=semihard"])
    file.write_text(replace(config, loss=Loss("triplet", **options)).to_toml())
    same, _ = resolve(None, file, {"loss.miner": "multi_similarity"})
    assert same.loss.miner_options == {"epsilon": 0.2}
    other, _ = resolve(None, file, {"loss.miner": "semihard"})
    assert other.loss.miner_options == {}


def test_problems_of_a_file_and_of_options_are_told_apart(tmp_path):
    (tmp_path / "my.toml").write_text("[schedule]\nepochs = 0\n")
    names = {"optimizer.lr": "--lr"}
    with pytest.raises(DmlError) as caught:
        resolve(None, tmp_path / "my.toml", {"optimizer.lr": -1.0}, (), names)
    assert "my.toml cannot be used" in caught.value.what
    assert "--lr -1.0 is not a number from 0 to" in caught.value.why
    assert "schedule.epochs = 0 is not a number from 1 to" in caught.value.why


@pytest.mark.parametrize("given", [({"loss.name": "spce"}, ()), ({}, ["loss.name=spce"])])
def test_a_value_in_place_of_a_table_is_told_as_such(tmp_path, given):
    (tmp_path / "my.toml").write_text('loss = "ce"\n')
    with pytest.raises(DmlError, match="loss = 'ce' is not a table of keys"):
        resolve(None, tmp_path / "my.toml", *given)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("optimizer=5", "optimizer is a table, and --set changes one of its keys."),
        ("optimiser=5", "There is no key optimiser. Did you mean optimizer?"),
    ],
)
def test_a_setting_without_a_table_is_told_as_such(setting, why):
    with pytest.raises(DmlError, match="is not understood") as caught:
        resolve("glyphs-ce", None, {}, [setting])
    assert caught.value.why == why


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


def test_resuming_changes_only_what_the_result_does_not_depend_on():
    saved = Config()
    moved = resumed(saved, {"data.root": "/elsewhere"}, ["data.workers=3"])
    assert (moved.data.root, moved.data.workers) == ("/elsewhere", 3)
    with pytest.raises(DmlError, match=r"optimizer\.lr cannot be changed"):
        resumed(saved, {"optimizer.lr": 1.0}, [])
    with pytest.raises(DmlError, match=r"run\.seed cannot be changed"):
        resumed(saved, {}, ["run.seed=3"])
    with pytest.raises(DmlError, match=r"loss\.options\.smoothing cannot be changed"):
        resumed(saved, {}, ["loss.options.smoothing=0.2"])
    assert resumed(saved, {"optimizer.lr": saved.optimizer.lr}, ["run.seed=0"]) == saved
