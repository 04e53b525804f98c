"""Epochs are whole, batches balanced, and both depend on seed and epoch alone."""

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.sampling import balanced_batches, keys, mix, random_batches


def blocks(targets, plan, classes, images):
    """(steps, C, M) labels, after checking that blocks are of one class and classes differ."""
    labels = np.asarray(targets)[plan].reshape(len(plan), classes, images)
    assert (labels == labels[:, :, :1]).all()
    assert all(len(set(row)) == classes for row in labels[:, :, 0].tolist())
    return labels


# Random batches


def test_an_epoch_has_every_image_once_but_for_the_rest():
    plan = random_batches(103, 10, 0, 0)
    assert plan.shape == (10, 10)
    assert len(np.unique(plan)) == 100
    assert plan.min() >= 0
    assert plan.max() < 103


def test_every_image_has_its_turn_over_the_epochs():
    seen = np.concatenate([random_batches(13, 5, 0, epoch).ravel() for epoch in range(12)])
    assert set(seen.tolist()) == set(range(13))


def test_too_few_images_are_one_batch():
    assert sorted(random_batches(7, 10, 0, 0).ravel().tolist()) == list(range(7))
    assert random_batches(7, 10, 0, 0).shape == (1, 7)


def test_seed_and_epoch_decide_the_plan():
    targets = np.arange(200) % 10
    for make in (
        lambda s, e: random_batches(200, 20, s, e),
        lambda s, e: balanced_batches(targets, 4, 5, s, e),
    ):
        assert (make(3, 4) == make(3, 4)).all()
        assert (make(3, 4) != make(3, 5)).any()
        assert (make(3, 4) != make(4, 4)).any()
        assert (make(3, 4) != make(4, 3)).any()


def test_places_are_shuffled_evenly():
    firsts = [random_batches(10, 5, seed, 0)[0, 0] for seed in range(2000)]
    assert np.bincount(firsts, minlength=10).min() > 140


# Balanced batches


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(0, 5),
)
def test_batches_are_c_classes_of_m_images_for_any_sizes(sizes, classes, images, seed):
    targets = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    present = [size for size in sizes if size]
    if len(present) < classes:
        return
    plan = balanced_batches(targets, classes, images, seed, 0)
    assert plan.shape == (max(1, len(targets) // (classes * images)), classes * images)
    blocks(targets, plan, classes, images)
    for block in plan.reshape(-1, images):
        own = sizes[targets[block[0]]]
        assert len(set(block.tolist())) == min(images, own)  # distinct where there are enough
    times = np.bincount(plan.ravel(), minlength=len(targets))
    for label in set(targets.tolist()):
        used = times[targets == label]
        assert used.max() - used.min() <= 1  # all of a class before one of them comes again


def test_classes_are_used_in_proportion_to_their_images():
    sizes = np.array([10, 20, 30, 40, 60, 80])
    targets = np.repeat(np.arange(6), sizes)
    used = np.zeros(6)
    for epoch in range(200):
        plan = balanced_batches(targets, 3, 5, 0, epoch)
        counts = np.bincount(targets[plan].ravel(), minlength=6)
        share = 5 * np.round(sizes * plan.size / len(targets) / 5)
        assert (np.abs(counts - share) <= 5).all()
        used += counts / 200
    assert np.allclose(used, sizes * plan.size / len(targets), rtol=0.05)


def test_classes_are_used_equally_often_if_asked_for():
    sizes = np.array([10, 20, 30, 40, 60, 80])
    targets = np.repeat(np.arange(6), sizes)
    used = np.zeros(6)
    for epoch in range(100):
        plan = balanced_batches(targets, 3, 5, 0, epoch, equally=True)
        assert plan.shape == (len(targets) // 15, 15)
        counts = np.bincount(blocks(targets, plan, 3, 5)[:, :, 0].ravel(), minlength=6)
        assert counts.max() - counts.min() <= 1
        used += counts
    assert np.allclose(used / used.sum(), 1 / 6, atol=0.002)


def test_an_epoch_of_equal_classes_uses_every_image_once():
    targets = np.random.default_rng(0).permutation(np.repeat(np.arange(12), 20))
    plan = balanced_batches(targets, 6, 5, 0, 0)
    assert sorted(plan.ravel().tolist()) == list(range(240))


def test_a_class_larger_than_all_others_is_in_every_batch_once():
    targets = np.repeat(np.arange(5), [500, 10, 10, 10, 10])
    plan = balanced_batches(targets, 3, 5, 0, 0)
    labels = blocks(targets, plan, 3, 5)
    assert ((labels[:, :, 0] == 0).sum(axis=1) == 1).all()


def test_small_classes_repeat_images():
    targets = np.repeat(np.arange(50), 2)
    plan = balanced_batches(targets, 5, 4, 0, 0)
    blocks(targets, plan, 5, 4)
    for block in plan.reshape(-1, 4).tolist():
        assert sorted(np.bincount(block)[np.unique(block)].tolist()) == [2, 2]


def test_classes_meet_different_classes():
    """Were classes dealt out in turn, those of one batch would meet again in the next."""
    targets = np.repeat(np.arange(40), 10)
    plan = balanced_batches(targets, 8, 5, 0, 0)  # each class in two batches
    labels = blocks(targets, plan, 8, 5)[:, :, 0]
    common = [len(set(a) & set(b)) for i, a in enumerate(labels) for b in labels[:i]]
    assert max(common) < 8
    assert np.mean(np.array(common) > 0) > 0.5


def test_an_epoch_of_sop_is_planned_in_a_second():
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.poisson(3.26, 11_318) + 2, 2, 12)
    targets = rng.permutation(np.repeat(np.arange(11_318), sizes))
    start = time.process_time()
    plan = balanced_batches(targets, 10, 6, 0, 0)
    assert time.process_time() - start < 1
    assert len(plan) == len(targets) // 60
    blocks(targets, plan, 10, 6)


# Keys


def test_keys_differ_from_place_to_place_and_from_epoch_to_epoch():
    every = np.concatenate([keys(s, e, 50, 32).ravel() for s in range(4) for e in range(4)])
    assert every.dtype == np.uint64
    assert len(np.unique(every)) == len(every)


def test_a_key_does_not_depend_on_the_size_of_the_plan():
    assert (keys(1, 2, 10, 8)[:4, :3] == keys(1, 2, 4, 3)).all()


def test_every_bit_of_a_key_is_set_half_of_the_time():
    bits = np.unpackbits(keys(0, 0, 100, 100).view(np.uint8).reshape(-1, 8), axis=1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.025


def test_mix_depends_on_every_number_and_their_order():
    assert len({mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 0), mix(0, 1, 2)}) == 5
    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 from seed 0
    assert 0 <= mix(2**63 - 1, 10**6) < 2**64
