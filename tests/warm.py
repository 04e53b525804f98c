"""Do once what each process would do first: load compiled loops, image formats and fonts, trace.

The process that forks the others imports this module (tests/forks.py).
"""

import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from exporter.onnx import trace
from retrieval.evaluation import evaluate
from tests import traces
from tests.exporter.networks import settled
from trainer.run.metrics_log import draw_curves

RECORD = {"epoch": 1, "loss": 1.0, "parts": {}, "monitor": {}, "scores": {}}

traces.share()
Image.init()
evaluate(np.eye(8, dtype=np.float32).repeat(2, axis=0), np.arange(8).repeat(2), seeds=1)
with TemporaryDirectory() as folder:
    os.environ["XDG_CACHE_HOME"] = folder  # what matplotlib finds out about fonts
    os.environ[traces.FOLDER] = folder
    trace.traced(settled(), 16, "uint8-nhwc")
    logging.disable()  # that this may take a moment
    draw_curves(Path(folder), [RECORD])
    logging.disable(logging.NOTSET)
