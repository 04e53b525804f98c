"""Trace, describe, compress, check and run ONNX models."""

INPUTS = {"uint8-nhwc": ("nhwc", "uint8"), "float-nchw": ("nchw", "float32")}
"""Layout and type of each form of input that a model can be exported with."""
LAYOUTS = ("nhwc", "nchw")
"""Orders of the axes of an input."""
PRECISIONS = ("fp32", "fp16", "int8")
"""Precisions of an exported model; the first is the default."""
PROVIDERS = ("auto", "cpu", "cuda", "tensorrt")
"""What may run a model; the first is the default."""
