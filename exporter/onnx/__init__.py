"""Trace, describe, compress, check and run ONNX models."""
