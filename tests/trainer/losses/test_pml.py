"""The losses of pytorch-metric-learning: each trains, and takes its options."""

import warnings

import pytest

from retrieval.errors import DmlError
from tests.trainer.losses.batches import CLASSES, DIM, batch, step
from trainer.losses import build
from trainer.losses.pml import classes


@pytest.mark.parametrize("name", sorted(classes("loss")))
def test_every_loss_class_of_pytorch_metric_learning_trains(name):
    # the library indexes with a list, and hands tensors to SciPy: both are to change some day
    warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning)
    warnings.filterwarnings("ignore", "__array_wrap__ must accept", DeprecationWarning)
    options = {"RankedListLoss": {"margin": 0.4, "Tn": 5.0}}.get(name, {})
    loss = build(f"pml:{name}", CLASSES, DIM, **options)
    z, labels = batch()
    for _ in range(2):
        value, by_embedding, by_parameters = step(loss, z, labels)
        assert value.isfinite()
        assert by_embedding.isfinite().all()
        assert all(gradient is not None for gradient in by_parameters)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("proxy_nca", (CLASSES, DIM)),
        ("norm_softmax", (DIM, CLASSES)),
        ("soft_triple", (DIM, 10 * CLASSES)),
        ("arcface", (DIM, CLASSES)),
        ("pml:SubCenterArcFaceLoss", (DIM, 3 * CLASSES)),
    ],
)
def test_parameters_of_the_library_are_parameters_of_the_loss(name, shape):
    loss = build(name, CLASSES, DIM)
    assert [tuple(parameter.shape) for parameter in loss.parameters()] == [shape]
    assert list(loss.state_dict())


def test_another_reducer_leaves_a_loss_in_one_part():
    parts = build("snca", CLASSES, DIM, reducer="SumReducer").parts(*batch())
    assert set(parts) == {"loss"}


def test_options_reach_the_library():
    z, labels = batch()
    losses = [build("pml:ContrastiveLoss", CLASSES, DIM, neg_margin=m) for m in (0.5, 1)]
    assert losses[0](z, labels) != losses[1](z, labels)
    assert build("nca", CLASSES, DIM, distance="CosineSimilarity").loss.distance.is_inverted


@pytest.mark.parametrize(
    ("name", "options", "near"),
    [
        ("pml:TripletLoss", {}, "pml:"),
        ("pml:VICRegLoss", {}, "pml:"),
        ("pml:RankedListLoss", {}, "--set loss.options.margin="),
        ("nca", {"distance": "Cosine"}, "CosineSimilarity"),
        ("fastap", {"distance": "CosineSimilarity"}, "--set loss.options.distance="),
        ("nca", {"distance": {"name": "LpDistance", "powr": 2}}, "--set loss.options.distance="),
    ],
)
def test_what_the_library_cannot_do_is_an_error_with_a_way_out(name, options, near):
    with pytest.raises(DmlError) as caught:
        build(name, CLASSES, DIM, **options)
    assert caught.value.why
    assert near in caught.value.fix
