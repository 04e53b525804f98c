"""Parity: what it measures equals arithmetic by hand, and wrong models do not pass."""

import copy

import numpy as np
import pytest
import torch

from exporter import parity
from exporter.networks import Together
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from exporter.parity import check, judge
from retrieval.errors import DmlError
from tests.exporter.networks import stripes

GOOD = {
    "max_abs": 1e-6,
    "max_rel": 1e-6,
    "min_cosine": 0.9999999,
    "recall_torch": 0.8,
    "recall_onnx": 0.8,
    "agreement": 1.0,
    "images": 1000,
    "batches": [1, 3, 32],
}


class Model:
    """The network itself, with what a broken export may do to it."""

    def __init__(self, embedder, before=lambda images: images, after=lambda found: found):
        self.network = parity.torch_runner(embedder)
        self.before, self.after = before, after
        self.seen = []

    def run(self, batch):
        self.seen.append(batch)
        return self.after(self.network(self.before(batch)))


def test_a_model_retrieves_as_its_network(embedder, exported):
    images, labels = stripes()
    found = check(embedder, Session(describe(exported), "cpu", 1).run, images, labels)
    assert 0 < found["max_abs"] < 1e-4
    assert 0 < found["max_rel"] < 1e-5
    assert found["min_cosine"] > 0.9999999
    assert found["recall_torch"] == found["recall_onnx"]
    assert 0.2 < found["recall_torch"] < 1  # neither trivial nor by chance
    assert (found["agreement"], found["images"], found["batches"]) == (1, 80, [1, 3, 32])
    judge(found, "fp32")


def test_one_image_cannot_be_compared_and_another_split_would_not_help(embedder):
    with pytest.raises(DmlError, match="1 image") as caught:
        check(embedder, parity.torch_runner(embedder), stripes(1)[0], np.zeros(1, int))
    assert "--data" in caught.value.fix
    assert "--split" not in caught.value.fix


def test_every_batch_size_meets_real_and_random_images_and_every_image_is_compared(embedder):
    images, labels = stripes(40)
    model, told = Model(embedder), []
    check(
        embedder,
        model.run,
        images,
        labels,
        batch_sizes=(1, 3, 16),
        progress=lambda *a: told.append(a),
    )
    assert [len(batch) for batch in model.seen] == [1, 1, 3, 3, 16, 16, 32, 8]
    known = {image.tobytes() for image in images}
    real = [{image.tobytes() for image in batch} <= known for batch in model.seen]
    assert real == [False, True, False, True, False, True, True, True]
    assert {image.tobytes() for batch in model.seen[6:] for image in batch} == known
    assert [done for _, done, _ in told] == list(range(1, 17))
    assert {total for *_, total in told} == {16}


def test_differences_are_those_computed_by_hand():
    right = np.array([[3.0, 4.0], [1.0, 0.0]], np.float32)
    given = np.array([[3.0, 4.5], [1.0, 0.1]], np.float32)
    largest, relative, cosine = parity.difference(right, given)
    assert largest == 0.5
    assert relative == pytest.approx(0.1)  # 0.5 / 5 and 0.1 / 1
    assert cosine == pytest.approx(1 / np.sqrt(1.01))
    zeros = np.zeros((1, 2), np.float32)
    assert parity.difference(zeros, zeros) == (0, 0, 1)
    assert parity.difference(right[1:], zeros)[2] == 0


def test_a_row_of_nearly_zero_is_compared_with_the_length_of_the_others():
    right = np.array([[3.0, 4.0], [0.0, 0.0]])
    given = np.array([[3.0, 4.0], [0.0, 1e-5]])
    assert parity.difference(right, given)[1] == pytest.approx(1e-5 / 0.025)


def test_recall_and_neighbours_are_those_of_brute_force(clustered):
    vectors, labels = clustered
    unit = vectors.astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -2)
    nearest = cosines.argmax(1)
    recall, found = parity.retrieved(vectors, labels + 100)
    assert recall == (labels[nearest] == labels).mean()
    assert (found == nearest).all()


def test_a_tie_does_not_count_and_neither_does_a_row_without_another_of_its_class():
    vectors = np.array([[1, 0.1], [1, 0.1], [1, 0.1], [0, 1], [-1, 0]], np.float32)
    labels = np.array([0, 0, 1, 1, 2])
    assert parity.retrieved(vectors, labels)[0] == 0  # 2 is as near to 0 as 1 is
    assert parity.retrieved(vectors, np.array([0, 0, 0, 1, 2]))[0] == 0.6
    assert parity.retrieved(vectors, np.zeros(5, int))[0] == 1


def test_agreement_counts_changed_neighbours_but_not_equal_ones():
    vectors = np.array([[1, 0], [1, 0.01], [1, 0.01], [0, 1]], np.float32)
    nearest = np.array([1, 2, 1, 1])
    other = np.array([2, 2, 1, 0])  # 2 is as near to 0 as 1 is; 0 is farther from 3 than 1
    assert parity.agreement(vectors, nearest, other).tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda images: images[..., ::-1], lambda found: found),  # BGR
        (lambda images: images.transpose(0, 2, 1, 3), lambda found: found),
        (lambda images: images // 2, lambda found: found),
        (lambda images: images, lambda found: found[:, ::-1]),
        (lambda images: images, lambda found: np.full_like(found, 0)),
        (lambda images: images, lambda found: found + 0.05 * np.abs(found).max()),
        (lambda images: images, lambda found: found * 1.5),
        (lambda images: images, lambda found: found / np.linalg.norm(found, axis=1)[:, None]),
    ],
)
def test_a_broken_model_does_not_pass(embedder, before, after):
    images, labels = stripes()
    found = check(embedder, Model(embedder, before, after).run, images, labels)
    for precision in ("fp32", "fp16"):
        with pytest.raises(DmlError):
            judge(found | {"recall_onnx": found["recall_torch"]}, precision)


def test_the_network_is_evaluated_and_left_as_it_is(embedder):
    images, labels = stripes(8)
    network = copy.deepcopy(embedder).train()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    found = check(network, Model(embedder).run, images, labels, batch_sizes=(4,))
    assert found["max_abs"] == 0
    assert network.training
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())
    assert network.backbone.layers[0].weight.is_contiguous()


def test_length_1_is_compared_with_length_1(embedder, unit):
    images, labels = stripes(12)
    session = Session(describe(unit), "cpu", 1)
    normalizing = Together([embedder], normalize=True)
    assert check(normalizing, session.run, images, labels)["max_rel"] < 1e-5
    assert check(embedder, session.run, images, labels)["max_rel"] > 0.1


def test_a_network_that_gives_nan_is_told(embedder):
    images, labels = stripes(8)
    broken = copy.deepcopy(embedder)
    with torch.no_grad():
        broken.projection.weight[0, 0] = torch.nan
    with pytest.raises(DmlError, match="NaN or infinite"):
        check(broken, Model(embedder).run, images, labels)


def test_other_dimensions_and_single_images_are_errors(embedder):
    images, labels = stripes(8)
    with pytest.raises(DmlError, match="embeddings of shape"):
        check(embedder, Model(embedder, after=lambda found: found[:, :3]).run, images, labels)
    with pytest.raises(DmlError, match="cannot be checked on 1 image"):
        check(embedder, Model(embedder).run, images[:1], labels[:1])


@pytest.mark.parametrize(
    ("precision", "allowed"), [("fp32", 0.1), ("fp16", 0.5), ("int8", 1.0), ("other", 2.5)]
)
def test_points_of_recall_beyond_tolerance_fail_and_are_named(precision, allowed):
    given = allowed if precision == "other" else None
    precision = "int8" if precision == "other" else precision
    judge(GOOD | {"recall_onnx": 0.8 - allowed / 100}, precision, given)
    judge(GOOD | {"recall_onnx": 0.9}, precision, given)
    with pytest.raises(DmlError, match=f"{allowed + 0.01:.2f} points of Recall@1") as caught:
        judge(GOOD | {"recall_onnx": 0.8 - (allowed + 0.01) / 100}, precision, given)
    assert f"{allowed:g} are allowed" in caught.value.what
    for number in ("80.00", "1,000 images", "100.0 %", "0.9999999", "1e-06"):
        assert number in caught.value.why


@pytest.mark.parametrize(("precision", "most"), [("fp32", 0.01), ("fp16", 0.1)])
def test_a_model_must_compute_the_same_and_nan_never_passes(precision, most):
    judge(GOOD | {"max_rel": most}, precision)
    far = GOOD | {"max_rel": 1.2 * most}
    judge(far, "int8")
    with pytest.raises(DmlError, match=f"difference of {1.2 * most:g}; at most {most:g} is"):
        judge(far, precision)
    for broken in (GOOD | {"max_rel": np.nan}, GOOD | {"recall_onnx": np.nan}):
        with pytest.raises(DmlError):
            judge(broken, precision)
