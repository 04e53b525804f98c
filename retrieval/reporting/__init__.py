"""The report: one view of an embedding file, and the page that shows it."""

MAPS = ("tsne", "pca", "none")
"""Methods of the map; the first is the default."""
