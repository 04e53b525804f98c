"""CUB-200-2011 (Wah et al. 2011). The first 100 classes train, the others test.

`train_test_split.txt` is the classification split, with every class on both sides: not used.
"""

from pathlib import Path

from retrieval.errors import DmlError
from trainer.data.datasets import layout
from trainer.data.datasets.records import DataSet

EXPECTED = {"train": (5_864, 100), "test": (5_924, 100)}
LAST_TRAINING_CLASS = 100


def read(root: Path, *, allow_incomplete: bool = False) -> DataSet:
    """Read images.txt, image_class_labels.txt and images/, in root or its folder CUB_200_2011."""
    root = layout.locate(root, "CUB-200-2011", "images.txt", inside=["CUB_200_2011"])
    names = dict(_pairs(root / "classes.txt")) if (root / "classes.txt").is_file() else {}
    source, given = root / "images.txt", root / "image_class_labels.txt"
    classes = {
        image: layout.number(given, line, label)
        for line, (image, label) in enumerate(_pairs(given), 1)
    }
    rows = []
    for line, (image, path) in enumerate(_pairs(source), 1):
        if image not in classes:
            raise DmlError(
                f"{source} lists image {image}, which {given.name} does not.",
                "The two files do not belong together.",
                "Get both from CUB_200_2011.tgz again.",
            )
        path = layout.relative(path, source, line)
        label = classes[image]
        split = "train" if label <= LAST_TRAINING_CLASS else "test"
        rows.append((f"images/{path}", names.get(str(label), str(label)), split))
    return layout.official("cub", root, rows, EXPECTED, allow_incomplete, source)


def _pairs(path: Path) -> list[tuple[str, str]]:
    """Lines of `number text`."""
    lines = layout.lines(path)
    words = (layout.fields(path, line, text, 2, "number text") for line, text in lines)
    return [(key, value) for key, value in words]
