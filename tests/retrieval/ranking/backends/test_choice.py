"""Which device counts ranks: what auto takes and says, and errors for what does not work."""

import sys
from pathlib import Path

import pytest
import torch

from retrieval import Settings
from retrieval.errors import DmlError, install
from retrieval.ranking.backends import choice, trial
from retrieval.ranking.backends.choice import SMALL, choose
from tests.commands import call
from trainer.run.scoring import counting_device

LARGE = (10**5, 10**5, 512)


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs; the dict says what their trials find."""
    faults = {"cuda:0": None, "cuda:1": None}
    monkeypatch.setattr(choice, "gpu_fault", lambda: None)
    monkeypatch.setattr(choice, "_missing", lambda: None)
    monkeypatch.setattr(trial, "cuda_devices", lambda: tuple(faults))
    monkeypatch.setattr(trial, "fault_of", lambda device, dim: faults[device])
    monkeypatch.setattr(trial, "title", lambda device: "NVIDIA A100")
    return faults


def test_auto_takes_the_gpus_whose_trial_is_right_and_says_so(gpus):
    found = choose("auto", *LARGE)
    assert found.devices == ("cuda:0", "cuda:1")
    assert found.note == (
        "Ranks are counted on cuda:0, cuda:1 (NVIDIA A100): their trial products are right."
    )


def test_auto_leaves_out_a_gpu_whose_trial_is_wrong_and_says_so(gpus):
    gpus["cuda:0"] = "a trial product is off"
    found = choose("auto", *LARGE)
    assert found.devices == ("cuda:1",)
    assert "cuda:0 is left out, a trial product is off" in found.note
    gpus["cuda:1"] = "a trial fails"
    found = choose("auto", *LARGE)
    assert found.devices == ()
    assert found.note.startswith("Ranks are counted on the CPU: cuda:0 is left out, a trial")


def test_auto_counts_little_on_the_cpu_and_less_if_torch_is_there_already(
    gpus, monkeypatch, tmp_path
):
    assert SMALL > 5000 * 5000 * 512
    assert choose("auto", 5000, 5000, 512).devices  # tests have imported torch
    monkeypatch.setattr(choice, "DRIVER", tmp_path)
    small = ((), "Ranks are counted on the CPU, which is faster for a small problem.")
    assert choose("auto", 1000, 1000, 2048) == small  # as an export compares
    monkeypatch.delitem(sys.modules, "torch")
    assert choose("auto", 5000, 5000, 512) == small


def test_auto_says_nothing_on_a_machine_without_gpu(monkeypatch):
    monkeypatch.setattr(choice, "gpu_fault", lambda: "no NVIDIA driver was found")
    assert choose("auto", *LARGE) == ((), "")
    monkeypatch.setattr(choice, "DRIVER", Path("missing"))
    assert choose("auto", 10, 10, 10) == ((), "")


def test_auto_says_that_torch_cannot_use_the_gpu(monkeypatch):
    monkeypatch.setattr(choice, "gpu_fault", lambda: None)
    monkeypatch.setattr(choice, "_missing", lambda: "torch is not installed")
    assert choose("auto", *LARGE) == (
        (),
        "Ranks are counted on the CPU: torch is not installed.",
    )


def test_each_process_of_a_machine_takes_a_gpu_of_its_own(gpus, monkeypatch):
    started = {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 4}
    for name, value in {**started, "MASTER_ADDR": "here", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    assert choose("auto", *LARGE).devices == ("cuda:1",)
    assert choose("cuda", *LARGE).devices == ("cuda:1",)
    assert choose("cuda:0", *LARGE).devices == ("cuda:0",)


def test_a_requested_gpu_is_taken_without_a_word(gpus):
    assert choose("cuda", *LARGE) == (("cuda:0", "cuda:1"), "")
    assert choose("cuda:1", 2, 2, 2) == (("cuda:1",), "")
    assert choose("cpu", *LARGE) == ((), "")


def test_a_requested_gpu_that_does_not_work_is_an_error(gpus, monkeypatch):
    with pytest.raises(DmlError, match=r"no device cuda:7") as found:
        choose("cuda:7", *LARGE)
    assert found.value.why == "The GPUs that torch finds are cuda:0, cuda:1."
    gpus["cuda:1"] = "a trial product is off"
    with pytest.raises(DmlError, match=r"cuda:1 cannot be used") as found:
        choose("cuda", *LARGE)
    assert found.value.why == "A trial product is off."
    assert found.value.fix == "Count on the CPU: --device cpu"
    monkeypatch.setattr(trial, "cuda_devices", tuple)
    monkeypatch.setattr(choice, "gpu_fault", lambda: "no NVIDIA driver was found (libcuda.so.1)")
    with pytest.raises(DmlError) as found:
        choose("cuda", *LARGE)
    assert found.value.why == "No NVIDIA driver was found (libcuda.so.1)."


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (
            "cuda: Optional[str] = None\nhip: Optional[str] = None\n",
            "The installed torch is a build for CPUs.",
        ),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", None),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2'\n", None),
        ("cuda = '11.8'\n", None),
        (None, "Torch is not installed."),
    ],
)
def test_the_build_of_torch_is_found_without_importing_it(version, why, tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text(version or "")
    origin = str(tmp_path / "__init__.py")
    spec = type("Spec", (), {"origin": origin})() if version else None
    monkeypatch.setattr(choice, "find_spec", lambda name: spec)
    monkeypatch.setattr(choice, "gpu_fault", lambda: None)
    if why is None:
        assert choice._missing() is None
        return
    with pytest.raises(DmlError, match="cuda cannot be used") as found:
        choose("cuda", *LARGE)
    assert found.value.why == why
    assert found.value.fix == f"{install('gpu')}, in an environment of its own"


def test_a_machine_without_gpu_is_not_told_to_install_another_torch(monkeypatch):
    monkeypatch.setattr(choice, "_missing", lambda: "the installed torch is a build for CPUs")
    monkeypatch.setattr(choice, "gpu_fault", lambda: "no NVIDIA driver was found (libcuda.so.1)")
    with pytest.raises(DmlError) as found:
        choose("cuda", *LARGE)
    assert found.value.why == "No NVIDIA driver was found (libcuda.so.1)."
    assert found.value.fix == "Count on the CPU: --device cpu"


def test_unknown_devices_are_refused_with_those_there_are(files):
    for wrong in ("gpu", "cuda:", "cuda:x", "mps"):
        with pytest.raises(DmlError, match="no device"):
            choose(wrong, *LARGE)
        with pytest.raises(DmlError, match="settings") as found:
            Settings(device=wrong)
        assert "cuda:1" in found.value.why
    done = call("eval", files / "a.h5", "--device", "gpu")
    assert done.exit_code == 2
    assert "is not auto, cpu, cuda or a GPU such as cuda:1" in done.stderr


@pytest.mark.parametrize("command", ["eval", "compare", "report", "inspect"])
def test_commands_tell_the_device_that_counts_once_on_stderr(command, files, monkeypatch):
    """The choice is made for the queries that are counted, not for all rows of the file."""
    asked = []

    def small(device, *size):
        asked.append((device, *size))
        return choice.Choice((), "Ranks are counted on the CPU: a reason.")

    monkeypatch.setattr(choice, "_chosen", small)
    others = {
        "eval": ["--queries", "7"],
        "compare": [files / "b.h5", "--queries", "7"],
        "report": ["--map", "none", "--out", files / "r.html"],
    }
    done = call(command, files / "a.h5", *others.get(command, []))
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("Ranks are counted on the CPU: a reason.") == (command != "inspect")
    assert "Ranks are counted" not in done.stdout
    if command in ("eval", "compare"):
        assert set(asked) == {("auto", 7, 60, 8)}


def test_the_ranks_of_a_training_tell_which_gpu_is_left_out(gpus, caplog):
    gpus["cuda:1"] = "a trial product is off"
    with caplog.at_level("INFO", "retrieval.device"):
        assert counting_device(torch.device("cuda:0"), 8) == "cuda:0"
        assert not caplog.messages
        assert counting_device(torch.device("cuda:1"), 8) == "cpu"
    assert caplog.messages == [
        "Ranks are counted on the CPU: cuda:1 is left out, a trial product is off."
    ]
