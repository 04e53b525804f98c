"""Embed images with a model and write the embeddings to a file."""

BACKENDS = ("onnx", "torch")
"""What computes the embeddings of an export; the first is the default."""
