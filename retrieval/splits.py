"""The names of splits, and how files, folders and tables spell them."""

SPLITS = ("train", "val", "test", "query", "gallery")
HELD_OUT = ("test", "query", "gallery")
"""What scores are computed on: one test set, or queries and a gallery."""
SPELLINGS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("query", "queries", "probe"), "query"),
    "gallery": "gallery",
}
