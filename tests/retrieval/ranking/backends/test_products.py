"""Products in float32 leave the precision of torch as it was."""

import threading

import pytest
import torch

from retrieval.ranking.backends.products import ieee_products


def test_overlapping_users_restore_the_precision_when_the_last_is_done():
    torch.set_float32_matmul_precision("medium")
    inside, leave = threading.Event(), threading.Event()

    def use():
        with ieee_products():
            inside.set()
            leave.wait(10)

    try:
        with ieee_products():
            other = threading.Thread(target=use)
            other.start()
            inside.wait(10)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        leave.set()
        other.join()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_precisions_set_in_the_newer_way_are_restored():
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has only the older way")
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        with ieee_products():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
