"""Readers of embedding files, one module each, behind the table in `retrieval.formats`."""
