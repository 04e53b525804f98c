"""Embed images with a model and write the embeddings to a file."""
