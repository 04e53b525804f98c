"""Single rows of vectors: read them once, scale them, hash them, and find identical ones."""
