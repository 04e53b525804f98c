"""The arithmetic of docs/scale.md, by hand."""

import pytest

from benchmarks.scale import Machine, plan


def test_costs_of_ten_million_vectors_are_those_by_hand():
    machine = Machine(cores=10, memory=1e12, read=1e9, send=1e9)
    cost = plan(10**7, 4, flops_per_core=1e10, dim=100, itemsize=4, machine=machine)
    assert cost.flops == 1e14 * 100  # half of the product, two operations each
    assert cost.read == 3 * 10**7 * 100 * 4
    assert cost.sent == pytest.approx(1.5 * 10**7 * 2 * 8 * 66)
    counting = 1e16 / (4 * 10 * 1e10)
    assert cost.seconds == pytest.approx(counting + 12 + cost.sent / 1e9)


def test_one_machine_sends_nothing_and_samples_take_the_whole_product():
    cost = plan(10**6, 1, 1000, flops_per_core=1e10, dim=64)
    assert cost.sent == 0
    assert cost.flops == 2 * 1000 * 10**6 * 64


def test_a_file_beyond_the_memory_is_read_tile_by_tile():
    small, large = (
        plan(10**6, 2, flops_per_core=1e10, dim=64, machine=Machine(memory=memory), block=1000)
        for memory in (1e12, 1e6)
    )
    assert large.read - small.read == pytest.approx(1000**2 / 2 / 2 * 1000 * 64 * 2)
