"""Half precision on a CPU is tried in a child: a processor may advertise what it does not allow."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from retrieval.errors import DmlError
from tests.forks import Forked
from trainer.run import half_precision, train
from trainer.run.half_precision import LIMIT, VARIABLE, allow_half, fault_of, train_layers
from trainer.run.watch import Watch


@pytest.fixture(autouse=True)
def no_limit(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def advertises_amx(dtype):
    """Such a processor: the first tile instruction ends the process, unless oneDNN is limited."""
    if os.environ.get(VARIABLE) != LIMIT:
        os.kill(os.getpid(), signal.SIGILL)


def dies(dtype):
    os.kill(os.getpid(), signal.SIGILL)


def raises(dtype):
    raise RuntimeError("not implemented for 'Half'.\nat some place")


def test_a_processor_that_forbids_amx_gets_a_limit_and_a_note(monkeypatch, capfd):
    told = allow_half(torch.bfloat16, advertises_amx)
    assert os.environ[VARIABLE] == LIMIT
    assert "Illegal instruction" in told
    assert f"limited to {LIMIT}" in told
    assert allow_half(torch.bfloat16, advertises_amx) is None  # nothing more to say
    monkeypatch.delenv(VARIABLE)
    assert capfd.readouterr() == ("", "")


def test_a_processor_without_half_precision_is_refused():
    with pytest.raises(DmlError, match="cannot compute in bf16") as caught:
        allow_half(torch.bfloat16, dies)
    assert "Illegal instruction" in caught.value.why
    assert "--precision fp32" in caught.value.fix
    assert f"{VARIABLE}={LIMIT} before the program starts" in caught.value.fix
    assert VARIABLE not in os.environ


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_the_trial_allows_this_process_can_do(dtype):
    try:
        allow_half(dtype)
    except DmlError as error:
        pytest.skip(str(error))
    train_layers(dtype)


def test_a_limit_of_the_users_own_is_kept(monkeypatch):
    monkeypatch.setenv(VARIABLE, "AVX512_CORE")
    with pytest.raises(DmlError, match="cannot compute in fp16"):
        allow_half(torch.float16, advertises_amx)
    assert os.environ[VARIABLE] == "AVX512_CORE"


def test_an_error_in_the_child_is_told_in_one_line():
    assert fault_of(torch.float16, raises) == "not implemented for 'Half'"


def test_a_child_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(half_precision, "SECONDS", 0.2)
    assert "did not end" in fault_of(torch.bfloat16, lambda _: signal.pause())


def test_the_trial_changes_nothing_in_this_process():
    before = torch.get_rng_state(), torch.get_num_threads()
    fault_of(torch.bfloat16, train_layers)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def test_a_run_is_refused_before_anything_is_written(config, tmp_path, monkeypatch):
    monkeypatch.setattr(half_precision, "train_layers", dies)
    half = replace(config, run=replace(config.run, precision="bf16"))
    with pytest.raises(DmlError, match="cannot compute in bf16"):
        train.train(half, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    one = replace(config, schedule=replace(config.schedule, epochs=1))
    train.train(one, tmp_path / "full", test=False)


def test_a_run_says_that_it_is_limited(config, tmp_path, monkeypatch):
    texts, watch = [], Watch()
    watch.note = texts.append

    def tried(dtype):
        advertises_amx(dtype)
        train_layers(dtype)

    monkeypatch.setattr(half_precision, "train_layers", tried)
    half = replace(
        config,
        run=replace(config.run, precision="bf16"),
        schedule=replace(config.schedule, epochs=1),
    )
    train.train(half, tmp_path / "run", watch, test=False)
    monkeypatch.delenv(VARIABLE)
    assert any(f"limited to {LIMIT}" in text for text in texts)


def test_onednn_takes_a_limit_that_is_set_after_torch_is_imported():
    code = """
import os, torch
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
with torch.no_grad():
    torch.nn.Conv2d(16, 16, 3)(torch.rand(2, 16, 8, 8))
"""
    ended, told, errors = Forked("-c", code, env={"ONEDNN_VERBOSE": "1"}).end()
    assert ended == 0, errors
    if "isa:" not in told:
        pytest.skip("torch without oneDNN")
    assert "avx512" not in told


def test_a_trial_that_ends_without_an_answer_is_a_fault():
    fault = fault_of(torch.bfloat16, lambda _: os._exit(3))
    assert "exit code 3" in fault
