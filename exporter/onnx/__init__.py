"""ONNX models: traced, described, made smaller, checked and run."""
