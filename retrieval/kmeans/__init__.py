"""k-means: initial centroids, exact iterations, and their compiled loops."""

STARTS = ("k-means++", "random")
"""Kinds of initial centroids; the first is the default."""
ITERATIONS = 300
"""Most iterations of a run by default; as in scikit-learn."""
