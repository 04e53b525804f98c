"""Export: checkpoint to ONNX, parity, embeddings of images into files."""
