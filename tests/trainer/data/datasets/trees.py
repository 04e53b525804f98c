"""Small data sets: rows without files, pictures, and a tree in the layout of CUB."""

from pathlib import Path

from PIL import Image

from retrieval.embeddings import SPLITS
from trainer.data.datasets import DataSet
from trainer.data.datasets.records import build


def picture(path: Path, colour: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (colour, 10, 20)).save(path)


def made(sizes: dict[str, int], split: str = "train") -> DataSet:
    rows = ((f"{name}/{i}.png", name, split) for name, n in sizes.items() for i in range(n))
    return build("made", Path("nowhere"), rows)


def records(data: DataSet) -> list[tuple[str, str, str]]:
    """Path, label and split of each row."""
    labels = [data.label_names[label] for label in data.labels]
    return list(zip(data.paths, labels, [SPLITS[code] for code in data.splits], strict=True))


def splits_of(data: DataSet) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for _, label, split in records(data):
        found.setdefault(split, set()).add(label)
    return found


def labels_in(data: DataSet, split: str) -> set[str]:
    return {data.label_names[label] for label in data.classes(split)}


def write_cub(root: Path, classes=(1, 2, 100, 101, 200), images=2, draw=picture) -> Path:
    root = root / "CUB_200_2011"
    number, listed, labels = 0, [], []
    for c in classes:
        for i in range(images):
            number += 1
            path = f"{c:03}.Bird_{c}/Bird_{c}_{i}.jpg"
            listed.append(f"{number} {path}")
            labels.append(f"{number} {c}")
            draw(root / "images" / path)
    (root / "images.txt").write_text("\n".join(listed) + "\n")
    (root / "image_class_labels.txt").write_text("\n".join(labels) + "\n")
    (root / "classes.txt").write_text("".join(f"{c} {c:03}.Bird_{c}\n" for c in classes))
    (root / "train_test_split.txt").write_text("".join(f"{n} 1\n" for n in range(1, number + 1)))
    return root
