"""Trace a network once for all processes of the tests: it takes longer than the rest of an export.

What a network gives twice is the same: tests/exporter/onnx/test_trace.py, which traces anew.
"""

import hashlib
import os
from functools import cache
from pathlib import Path

FOLDER = "DMLTOOL_TEST_TRACES"  # the variable that names the folder of the graphs
PLAIN = (bool, int, float, str, tuple)


def share():
    """Take graphs from the folder, if it is named, and put new ones there."""
    import onnx
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from exporter.onnx import trace
    from retrieval.files import whole_file

    def once(network, size, input):
        folder = os.environ.get(FOLDER)
        if folder is None:
            return anew(network, size, input)
        plain = [
            {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}
            for module in network.modules()
        ]
        digest = hashlib.sha256(repr((repr(network), plain, size, input)).encode())
        for tensor in network.state_dict().values():
            digest.update(tensor.cpu().numpy().tobytes())
        path = Path(folder, digest.hexdigest())
        if not path.exists():
            with whole_file(path) as file:
                file.write(anew(network, size, input).SerializeToString())
        return onnx.load(path)

    anew, trace.traced = trace.traced, once
    # The exporter would read the source of all its operators for each network.
    ONNXRegistry.from_torchlib = staticmethod(cache(ONNXRegistry.from_torchlib))
