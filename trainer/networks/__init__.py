"""Networks that turn images into embeddings, and their weights."""
