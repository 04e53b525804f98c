"""The device is found by trying, in silence."""

import os
import sys
import tempfile
import types

import numpy as np
import pytest
from onnx import save

from exporter.onnx import PROVIDERS, providers
from exporter.onnx.model import describe
from exporter.onnx.session import Session
from retrieval import signals
from retrieval.errors import DmlError, install
from tests.exporter.models import PROPERTIES, mean_model

FAULT = providers.gpu_fault()
needs_gpu = pytest.mark.skipif(FAULT is not None, reason=f"needs an NVIDIA GPU: {FAULT}")
needs_none = pytest.mark.skipif(FAULT is None, reason="needs a machine without an NVIDIA GPU")


@pytest.fixture(autouse=True)
def forgetful():
    providers.missing_for.cache_clear()
    yield
    providers.missing_for.cache_clear()


@pytest.fixture
def model(tmp_path):
    save(mean_model(properties=PROPERTIES), tmp_path / "model.onnx")
    return describe(tmp_path / "model.onnx")


@pytest.fixture
def gpu_build(monkeypatch):
    """onnxruntime-gpu on a machine whose driver works: lists all, shouts, does as it was told to.

    gpu_build(starts) says which providers really start.
    """

    def install(*starts):
        class Loud:
            def __init__(self, data, options, providers):
                os.write(1, b"EP Error: on stdout\n")
                text = "Failed to load library libonnx_cuda.so: libcudnn.so.9: cannot open shared "
                os.write(2, f"\x1b[1;31m{text}object file\x1b[m\n".encode())
                self.chain = [name for name in providers if name in starts or "CPU" in name]

            def get_providers(self):
                return self.chain

            def run(self, names, feed, options=None):
                os.write(1, b"building an engine\n")
                return [np.ones((len(next(iter(feed.values()))), 3), np.float32)]

        fake = types.SimpleNamespace(
            get_available_providers=lambda: list(providers.NAMES.values()),
            preload_dlls=lambda: os.write(1, b"preloading\n"),
            InferenceSession=Loud,
            SessionOptions=lambda: types.SimpleNamespace(add_session_config_entry=lambda *_: None),
            RunOptions=types.SimpleNamespace,
            set_default_logger_severity=lambda _: None,
        )
        monkeypatch.setitem(sys.modules, "onnxruntime", fake)
        monkeypatch.setattr(providers, "gpu_fault", lambda: None)

    return install


def test_cpu_is_cpu(model):
    session = Session(model, "cpu")
    assert (session.provider, session.why) == ("cpu", "CPU: requested")


@needs_none
def test_without_a_gpu_auto_is_the_cpu_and_says_why(model, capfd):
    session = Session(model)
    assert session.provider == "cpu"
    assert session.why.startswith("CPU: ")
    assert "NVIDIA driver" in session.why
    assert capfd.readouterr() == ("", "")


@needs_none
@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_without_a_gpu_asking_for_one_is_an_error(model, name, capfd):
    with pytest.raises(DmlError, match="cannot be used here") as caught:
        Session(model, name)
    assert "NVIDIA driver" in caught.value.why
    assert "--provider cpu" in caught.value.fix
    assert capfd.readouterr() == ("", "")


def test_an_unknown_provider_is_answered_with_the_known_ones():
    with pytest.raises(DmlError) as caught:
        providers.pick("gpu")
    assert "auto, cpu, cuda, tensorrt" in caught.value.why


def test_a_build_without_cuda_names_the_extra(monkeypatch):
    runtime = providers.load_runtime()
    if providers.NAMES["cuda"] in runtime.get_available_providers():
        pytest.skip("this onnxruntime is built with CUDA")
    monkeypatch.setattr(providers, "gpu_fault", lambda: None)
    assert providers.pick("auto")[1] == "CPU: this onnxruntime is built without CUDA"
    with pytest.raises(DmlError) as caught:
        providers.pick("cuda")
    assert ".[gpu]" in caught.value.fix


def test_a_listed_provider_that_does_not_start_is_not_taken(gpu_build, capfd):
    gpu_build()
    chain, why = providers.pick("auto")
    assert chain == ["CPUExecutionProvider"]
    assert why == "CPU: CUDA does not start: libcudnn.so.9 cannot be loaded"
    with pytest.raises(DmlError) as caught:
        providers.pick("cuda")
    assert caught.value.why == "CUDA does not start: libcudnn.so.9 cannot be loaded."
    assert install("gpu") in caught.value.fix
    assert capfd.readouterr() == ("", "")


def test_a_provider_that_starts_is_taken_in_silence(gpu_build, model, capfd):
    gpu_build("CUDAExecutionProvider", "TensorrtExecutionProvider")
    images = np.zeros((2, 8, 8, 3), np.uint8)
    for asked, got in (("auto", "cuda"), ("cuda", "cuda"), ("tensorrt", "tensorrt")):
        session = Session(model, asked)
        assert session.provider == got
        assert session.run(images).shape == (2, 3)
    assert capfd.readouterr() == ("", "")


def test_a_model_that_falls_back_is_told_or_refused(gpu_build, model, monkeypatch):
    gpu_build()
    monkeypatch.setattr(providers, "missing_for", FakeCache())  # the trial went well
    session = Session(model, "auto")
    assert session.provider == "cpu"
    assert "CUDAExecutionProvider did not start" in session.why
    with pytest.raises(DmlError, match="does not run on cuda"):
        Session(model, "cuda")


class FakeCache:
    def __call__(self, name):
        return None

    def cache_clear(self):
        pass


def test_a_missing_onnxruntime_names_the_extras(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DmlError, match="not installed") as caught:
        providers.load_runtime()
    assert ".[cpu]" in caught.value.fix
    assert ".[gpu]" in caught.value.fix


def test_quiet_keeps_what_c_code_writes_and_gives_the_streams_back(capfd):
    print("before")
    with providers.quiet() as said:
        print("from Python")
        os.write(1, b"to stdout\n")
        os.write(2, b"to stderr\n")
    print("after")
    assert sorted(said) == ["from Python", "to stderr", "to stdout"]
    assert capfd.readouterr() == ("before\nafter\n", "")


def test_quiet_gives_the_streams_back_after_an_error(capfd):
    with pytest.raises(KeyError), providers.quiet():
        raise KeyError
    print("after")
    assert capfd.readouterr().out == "after\n"


def test_a_system_without_a_folder_for_temporary_files_is_told(monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(DmlError, match="no folder for temporary files"), providers.quiet():
        pass


# Where there is a GPU


@needs_gpu
@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_a_gpu_computes_what_the_cpu_computes(model, name, rng, capfd):
    missing = providers.missing_for(name)
    if missing is not None:
        pytest.skip(missing[0])
    images = rng.integers(0, 256, (5, 8, 8, 3), np.uint8)
    session = Session(model, name)
    assert session.provider == name
    np.testing.assert_allclose(session.run(images), Session(model, "cpu").run(images), rtol=1e-3)
    assert capfd.readouterr() == ("", "")


@needs_gpu
def test_auto_takes_the_gpu_where_cuda_starts(model):
    missing = providers.missing_for("cuda")
    if missing is not None:
        pytest.skip(missing[0])
    assert Session(model).provider == "cuda"


def test_the_option_and_the_names_of_providers_list_the_same():
    assert ("auto", *providers.NAMES) == PROVIDERS
    assert providers.TITLES.keys() == providers.NAMES.keys()


def test_last_words_are_shown_while_output_is_captured(capfd):
    """Another rank may end, or Ctrl-C be pressed, while a model is traced or started."""
    with providers.quiet(), providers.quiet():
        os.write(2, b"a remark of C code\n")
        signals.say("Error: Rank 1 stops.\n")
    signals.say("After it.\n")
    assert capfd.readouterr().err == "Error: Rank 1 stops.\nAfter it.\n"
