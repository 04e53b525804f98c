"""Trace a network once for all processes of the tests: it takes longer than the rest of an export.

What a network gives twice is the same: tests/exporter/onnx/test_trace.py, which traces anew. Of two
networks that differ in their weights only, the second gets the operators of the first.
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
    import torch
    from torch.onnx._internal.exporter import _core
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from exporter.onnx import trace
    from retrieval.files import whole_file

    programs = {}  # by structure: the operators, and a place for the weights

    def once(network, size, input):
        folder = os.environ.get(FOLDER)
        if folder is None:
            return anew(network, size, input)
        structure = repr((repr(network), [attributes(m) for m in network.modules()], size, input))
        digest = hashlib.sha256(structure.encode())
        for tensor in network.state_dict().values():
            digest.update(tensor.cpu().numpy().tobytes())
        path = Path(folder, digest.hexdigest())
        if not path.exists():
            with whole_file(path) as file:
                file.write(alike(structure, network, size, input).SerializeToString())
        return onnx.load(path)

    def alike(structure, *network):
        def exported(model, *args, **options):
            if structure in programs:
                program = programs[structure]
                program._state_dict = model.state_dict()
                model = program
            return export(model, *args, **options)

        def prepared(program, **options):
            if program is not programs.get(structure):
                program = prepare(program, **options)
                if not program.constants:
                    programs[structure] = program
            return program

        export, prepare = torch.onnx.export, _core._prepare_exported_program_for_export
        torch.onnx.export, _core._prepare_exported_program_for_export = exported, prepared
        try:
            return anew(*network)
        finally:
            torch.onnx.export, _core._prepare_exported_program_for_export = export, prepare

    anew, trace.traced = trace.traced, once
    # The exporter would read the source of all its operators for each network.
    ONNXRegistry.from_torchlib = staticmethod(cache(ONNXRegistry.from_torchlib))


def attributes(module):
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}
