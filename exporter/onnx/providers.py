"""Choose the device that runs a model, with a trial run.

ONNX Runtime lists what it was compiled for, not what the machine has, and it prints failures to
stdout, which is suppressed here.
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from functools import cache
from typing import Any

import numpy as np

from exporter.onnx import PROVIDERS
from retrieval import signals
from retrieval.errors import DmlError, install
from retrieval.files import temporary_folder
from retrieval.registry import unknown
from retrieval.resources import gpu_fault

NAMES = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
TITLES = {"cpu": "CPU", "cuda": "CUDA", "tensorrt": "TensorRT"}
_quiet_lock = threading.RLock()


def pick(provider: str = "auto") -> tuple[list[str], str]:
    """Providers for a session, the chosen one first, and one line that says which and why.

    auto chooses CUDA if it works, otherwise the CPU. TensorRT compiles a model for minutes and is
    used only on request. Requesting a provider that does not work is an error.
    """
    if provider not in PROVIDERS:
        raise unknown("provider", provider, PROVIDERS, "--provider")
    if provider == "cpu":
        return [NAMES["cpu"]], "CPU: requested"
    wanted = "cuda" if provider == "auto" else provider
    missing = missing_for(wanted)
    if missing is None:
        chain = ["cuda", "cpu"] if wanted == "cuda" else ["tensorrt", "cuda", "cpu"]
        reason = "it works on this machine" if provider == "auto" else "requested, and it works"
        return [NAMES[name] for name in chain], f"{TITLES[wanted]}: {reason}"
    why, fix = missing
    if provider == "auto":
        return [NAMES["cpu"]], f"CPU: {why}"
    raise DmlError(f"{TITLES[wanted]} cannot be used here.", f"{why[0].upper()}{why[1:]}.", fix)


@cache
def missing_for(name: str) -> tuple[str, str] | None:
    """Why a GPU provider does not work and how to fix it; None if it works."""
    fault = gpu_fault()
    if fault is not None:
        return fault, "Run on the CPU: --provider cpu"
    runtime = load_runtime()
    if NAMES[name] not in runtime.get_available_providers():
        return (
            f"this onnxruntime is built without {TITLES[name]}",
            f"{install('gpu')}, in an environment of its own",
        )
    with quiet() as said:
        if hasattr(runtime, "preload_dlls"):
            runtime.preload_dlls()
        try:
            chain = [NAMES[name], NAMES["cpu"]]
            session = runtime.InferenceSession(tiny_model(), silent_options(), providers=chain)
            if session.get_providers()[0] == NAMES[name]:
                session.run(None, {"x": np.ones(1, np.float32)})
                return None
        except Exception as error:  # the runtime has its own class for every failure
            said.append(str(error))
    return (
        f"{TITLES[name]} does not start: {last_words(said)}",
        f"Run on the CPU: --provider cpu; or install libraries that fit. {install('gpu')}"
        + (", then pip install tensorrt" if name == "tensorrt" else ""),
    )


def load_runtime() -> Any:
    """Import onnxruntime; a DmlError with the command that installs it if it is missing."""
    # Looking for devices, it may remark on them when it is first imported.
    with nullcontext() if "onnxruntime" in sys.modules else quiet():
        try:
            import onnxruntime
        except ImportError as error:
            what = "The library onnxruntime is not installed."
            raise DmlError(what, f"{error}.", install("cpu")) from error
    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


def silent_options() -> Any:
    options = load_runtime().SessionOptions()
    options.log_severity_level = 4  # fatal; what fails raises anyway
    return options


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Capture what Python and C code write to stdout and stderr.

    The lines are in the list after the block. Only one thread at a time can be inside, because file
    descriptors belong to the whole process.
    """
    said: list[str] = []
    text = io.StringIO()
    with _quiet_lock, tempfile.TemporaryFile(dir=temporary_folder()) as file:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # none, or closed
                stream.flush()
        saved = []
        try:
            for descriptor in (1, 2):
                with suppress(OSError):  # closed, as in a daemon
                    saved.append((os.dup(descriptor), descriptor))
                    os.dup2(file.fileno(), descriptor)
            shown = next((copy for copy, descriptor in saved if descriptor == 2), signals.STDERR)
            # Python's streams may have been replaced and lead elsewhere.
            with redirect_stdout(text), redirect_stderr(text), signals.captured(shown):
                yield said
        finally:
            for copy, descriptor in saved:
                os.dup2(copy, descriptor)
                os.close(copy)
            file.seek(0)
            written = file.read(20_000).decode("utf-8", "replace")
            said.extend((text.getvalue() + written).splitlines())


def last_words(said: list[str]) -> str:
    """The reason in a runtime's output: missing libraries, or the last line with an error."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(said))
    lacking = re.findall(r"([\w.+-]+\.so[\w.]*): cannot open shared object", text)
    if lacking:
        return f"{', '.join(dict.fromkeys(lacking))} cannot be loaded"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"rror|ailed|lease", line)]
    words = (telling or lines or ["it gives no reason"])[-1]
    return words[-300:].strip(" .")


def tiny_model() -> bytes:
    """The bytes of a model that computes x + x, to try a provider with."""
    from onnx import parser

    versions, body = '<ir_version: 8, opset_import: ["": 17]>', "{ y = Add(x, x) }"
    text = f"{versions} tiny (float[1] x) => (float[1] y) {body}"
    return parser.parse_model(text).SerializeToString()
