"""Run a model file with ONNX Runtime, on a device that works."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from exporter.onnx.foreign import foreign_preprocessing
from exporter.onnx.metadata import Preprocessing
from exporter.onnx.model import Model, bad_rank, printable
from exporter.onnx.providers import NAMES, load_runtime, pick, quiet, silent_options
from retrieval.distributed.processes import own_gpu
from retrieval.distributed.world import from_environment
from retrieval.errors import DmlError
from retrieval.resources import processors_if_limited


class Session:
    """Run a model. Several threads may call `run` at the same time."""

    provider: str
    """cpu, cuda or tensorrt: the provider that really runs."""
    why: str
    """One line: which provider, and why."""

    def __init__(
        self,
        model: Model,
        provider: str = "auto",
        threads: int | None = None,
        *,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        """Start a session; `threads` are those of one run, by default one for each processor."""
        self.model = model
        self.preprocessing = preprocessing or foreign_preprocessing(model)
        chain, self.why = pick(provider)
        self.session = _start(model, chain, threads)
        first = self.session.get_providers()[0]
        self.provider = next((k for k, name in NAMES.items() if name == first), first)
        if first != chain[0]:
            if provider != "auto":
                raise DmlError(
                    f"{model.path} does not run on {provider}.",
                    f"ONNX Runtime fell back to {self.provider}.",
                    "Let dmltool choose: --provider auto",
                )
            self.why = f"{self.provider.upper()}: {chain[0]} did not start for this model"
        self.options = load_runtime().RunOptions()
        self.options.log_severity_level = 4
        self._aside = ThreadPoolExecutor(1, "model")
        self._warm = self.provider == "cpu"

    @property
    def dim(self) -> int:
        """Length of the embedding; found by embedding a black image if the file does not say."""
        if self.model.dim is not None:
            return self.model.dim
        side = self.preprocessing.crop
        return self.run(np.zeros((1, side, side, 3), np.uint8)).shape[1]

    def run(self, batch: np.ndarray) -> np.ndarray:
        """Embeddings (B, D) float32 of uint8 RGB images (B, H, W, 3)."""
        if not len(batch):
            return np.empty((0, self.model.dim or 0), np.float32)
        size = self.model.batch or len(batch)
        padding = np.zeros((-len(batch) % size, *batch.shape[1:]), batch.dtype)
        whole = np.concatenate([batch, padding]) if len(padding) else batch
        pieces = whole.reshape(-1, size, *batch.shape[1:])
        found = np.concatenate([self._embed(piece) for piece in pieces])[: len(batch)]
        if not np.isfinite(found).all():
            rows = np.flatnonzero(~np.isfinite(found).all(1))
            own = self.model.metadata
            raise DmlError(
                f"{self.model.path} gave embeddings with NaN or infinity.",
                f"It happened for {len(rows)} of {len(batch)} images of a batch.",
                "Export it in float32, which overflows later: "
                "dmltool export RUN --precision fp32 --force"
                if own and own.precision != "fp32"
                else "If it computes in float16, convert it to float32, which overflows later.",
            )
        return found

    def stop(self) -> None:
        """End the runs of other threads with an error, and all that start later."""
        self.options.terminate = True

    def _run(self, feed: dict[str, np.ndarray]) -> np.ndarray:
        """Run the model once, in another thread if this is the main one.

        Python notices Ctrl-C only between two steps of the main thread, and a model may contain an
        endless loop.
        """
        names = [self.model.output_name]
        if threading.current_thread() is not threading.main_thread():
            return np.asarray(self.session.run(names, feed, self.options)[0])
        future = self._aside.submit(self.session.run, names, feed, self.options)
        try:
            return np.asarray(future.result()[0])
        except KeyboardInterrupt:
            self.stop()
            raise

    def _embed(self, batch: np.ndarray) -> np.ndarray:
        name, path = self.model.output_name, self.model.path
        feed = {self.model.input_name: self.preprocessing.to_input(batch)}
        try:
            with nullcontext() if self._warm else quiet():  # a first run builds engines
                found = self._run(feed)
            self._warm = True
        except Exception as error:  # the runtime has its own class for every failure
            side = " x ".join(map(str, batch.shape[1:3]))
            raise DmlError(
                f"{path} cannot be run on a batch of {len(batch)}, {side} pixels each.",
                _first_line(error),
                "Try --batch-size 1, or --provider cpu where a GPU lacks memory.",
            ) from error
        if found.ndim != 2:
            shape = " x ".join(map(str, found.shape))
            raise bad_rank(path, f"{name} ({shape})", found.ndim)
        if len(found) != len(batch):
            raise DmlError(
                f"{path} gave {len(found)} embeddings for {len(batch)} images.",
                "Its batch size was frozen when it was exported.",
                f"Try --batch-size {len(found)}, or export it with a dynamic batch.",
            )
        return found.astype(np.float32, copy=False)


class TimedSession(Session):
    """A session that measures its speed, without its first run, which allocates memory."""

    runs, images, seconds = 0, 0, 0.0

    def run(self, batch: np.ndarray) -> np.ndarray:
        start = time.perf_counter()
        found = super().run(batch)
        if self.runs:
            self.images += len(batch)
            self.seconds += time.perf_counter() - start
        self.runs += 1
        return found

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


def _start(model: Model, chain: list[str], threads: int | None) -> Any:
    """Start a session with the bytes that were described."""
    data = model.read()
    options = silent_options()
    options.intra_op_num_threads = threads or processors_if_limited()
    if model.beside:
        folder = str(Path(model.path).absolute().parent)
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", folder
        )
    try:
        with quiet():
            return load_runtime().InferenceSession(data, options, providers=_on_own_gpu(chain))
    except Exception as error:  # the runtime has its own class for every failure
        raise DmlError(
            f"{model.path} cannot be run by ONNX Runtime.",
            _first_line(error),
            "Export it again with operators that ONNX Runtime knows.",
        ) from error


def _on_own_gpu(chain: list[str]) -> list[Any]:
    """The providers with the GPU of this rank, where a machine has several processes."""
    world = from_environment()
    if world.local_size == 1 or chain[0] == NAMES["cpu"]:
        return chain
    device = {"device_id": own_gpu(world)}
    return [name if name == NAMES["cpu"] else (name, device) for name in chain]


def _first_line(error: Exception) -> str:
    """The first line of the runtime's message, without error codes and source locations."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)
    line = re.sub(r"/\S+\.(?:cc|h):\d+ .*\) (?=[A-Z])", "", line)
    return printable(line, 300)
