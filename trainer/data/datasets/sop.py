"""Stanford Online Products (Oh Song et al. 2016), with its published split."""

from pathlib import Path

from trainer.data.datasets import layout
from trainer.data.datasets.records import DataSet

EXPECTED = {"train": (59_551, 11_318), "test": (60_502, 11_316)}
FORM = "image_id class_id super_class_id path"


def read(root: Path, *, allow_incomplete: bool = False) -> DataSet:
    """Read Ebay_train.txt, Ebay_test.txt and the folders *_final, in Stanford_Online_Products."""
    root = layout.locate(
        root, "Stanford Online Products", "Ebay_train.txt", inside=["Stanford_Online_Products"]
    )
    rows = []
    for split in ("train", "test"):
        source = root / f"Ebay_{split}.txt"
        for line, text in layout.lines(source):
            _, label, _, path = layout.fields(source, line, text, 4, FORM)
            if line == 1 and not label.isdigit():  # the header
                continue
            label = str(layout.number(source, line, label))
            rows.append((layout.relative(path, source, line), label, split))
    source = root / "Ebay_train.txt"
    return layout.official("sop", root, rows, EXPECTED, allow_incomplete, source)
