"""HDF5 embedding files: read safely, written row by row."""
