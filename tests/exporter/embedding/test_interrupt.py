"""Ctrl-C while a model runs that never ends."""

import signal
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from PIL import Image

from tests.exporter.models import FLOAT, UINT8, model_of
from tests.forks import Forked

ROOT = Path(__file__).parents[3]


def endless_model(path, batch="batch"):
    """The mean colour of each image, to which zero is added for ever."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_in"], ["go_out"]),
            helper.make_node("Mul", ["sum_in", "one"], ["sum_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("n", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("go_in", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_in", FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_out", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_out", FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], axes=[1, 2], keepdims=0),
        helper.make_node("Loop", ["trips", "", "mean"], ["embeddings"], body=body),
    ]
    weights = [
        numpy_helper.from_array(np.int64(2**62), "trips"),
        numpy_helper.from_array(np.float32(1), "one"),
    ]
    onnx.save(
        model_of(
            nodes,
            [("images", UINT8, [batch, 8, 8, 3])],
            [("embeddings", FLOAT, [batch, 3])],
            weights=weights,
        ),
        path,
    )


# The trial comes before the file.
TRIAL = """
from pathlib import Path
from cli import main
from exporter.embedding import engine
honest = engine.trial
def begun(*args):
    Path("x.h5.partial").touch()
    return honest(*args)
engine.trial = begun
main(prog_name="dmltool")
"""


@pytest.mark.parametrize("command", ["embed", "trial", "run"])
def test_a_loop_without_end_can_be_interrupted(tmp_path, command):
    """In the threads of `embed`, in the trial of threads before it, and in the main thread."""
    endless_model(tmp_path / "endless.onnx")
    for n in range(4):
        (tmp_path / "photos" / str(n)).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "photos" / str(n) / "0.png")
    embed = ["embed", "endless.onnx", "photos", "--out", "x.h5"]
    given = {
        "embed": ["-m", "cli", *embed, "--threads", "1"],
        "trial": ["-c", TRIAL, *embed],
        "run": [
            "-c",
            "import numpy as np\n"
            "from exporter.onnx.model import describe\n"
            "from exporter.onnx.session import Session\n"
            "session = Session(describe('endless.onnx'))\n"
            "open('x.h5.partial', 'w')\n"
            "session.run(np.zeros((1, 8, 8, 3), np.uint8))",
        ],
    }
    process = Forked(*given[command], cwd=tmp_path)
    try:
        while not (tmp_path / "x.h5.partial").exists() and process.running():
            time.sleep(0.1)
        time.sleep(1)
        process.send(signal.SIGINT)
        code, _, told = process.end(timeout=60)
    finally:
        process.kill()
    assert "Interrupted" in told or "KeyboardInterrupt" in told, told
    assert code != 0
