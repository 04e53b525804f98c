"""Trace a network once for all processes of the tests: it takes longer than the rest of an export.

Importing this module does it, where the variable FOLDER names a folder for the graphs. What a
network gives twice is the same: tests/exporter/onnx/test_trace.py, which traces anew.
"""

import hashlib
import os
from functools import cache
from pathlib import Path

import onnx
from torch.onnx._internal.exporter._registration import ONNXRegistry

from exporter.onnx import trace
from retrieval.files import whole_file

FOLDER = "DMLTOOL_TEST_TRACES"

anew = trace.traced


def once(network, size, input):
    folder = os.environ.get(FOLDER)
    if folder is None:
        return anew(network, size, input)
    unit = [getattr(module, "normalize", None) for module in network.modules()]
    digest = hashlib.sha256(repr((repr(network), unit, size, input)).encode())
    for tensor in network.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    path = Path(folder, digest.hexdigest())
    if not path.exists():
        with whole_file(path) as file:
            file.write(anew(network, size, input).SerializeToString())
    return onnx.load(path)


trace.traced = once
# The exporter would read the source of all its operators for each network.
ONNXRegistry.from_torchlib = staticmethod(cache(ONNXRegistry.from_torchlib))
