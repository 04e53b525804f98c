"""HDF5 embedding files: read safely, written row by row."""

SUFFIXES = (".h5", ".hdf5", ".he5")
