"""Cars196 (Krause et al. 2013). Classes 1 to 98 train, 99 to 196 test.

Two layouts hold the same images: `cars_annos.mat` lists all of them; the later devkit has the
classification split in two files. Either way the split here is the one by class.
"""

from pathlib import Path

import numpy as np

from retrieval.errors import DmlError
from trainer.data.datasets import layout
from trainer.data.datasets.records import DataSet

EXPECTED = {"train": (8_054, 98), "test": (8_131, 98)}
LAST_TRAINING_CLASS = 98
ALL, TRAIN, TEST = "cars_annos.mat", "cars_train_annos.mat", "cars_test_annos_withlabels.mat"
INSIDE = ["devkit", "car_devkit/devkit", "stanford_cars", "stanford_cars/devkit", "cars196"]


def read(root: Path, *, allow_incomplete: bool = False) -> DataSet:
    """Read cars_annos.mat and car_ims/, or devkit/*.mat with cars_train/ and cars_test/."""
    place = layout.locate(root, "Cars196", ALL, TRAIN, inside=INSIDE)
    if (place / ALL).is_file():
        source, root = place / ALL, place
        entries, names = _annotations(source, "relative_im_path"), _class_names(source)
    else:
        source, root, entries, names = _devkit(place, root)
    rows = []
    for line, (path, label) in enumerate(entries, 1):
        split = "train" if label <= LAST_TRAINING_CLASS else "test"
        name = names[label - 1] if 0 < label <= len(names) else str(label)
        rows.append((layout.relative(path, source, line), name, split))
    return layout.official("cars", root, rows, EXPECTED, allow_incomplete, source)


def _devkit(place: Path, root: Path) -> tuple[Path, Path, list[tuple[str, int]], list[str]]:
    base = next((p for p in (root, place, place.parent) if (p / "cars_train").is_dir()), root)
    tests = (place / TEST, base / TEST, place.parent / TEST)
    test = next((path for path in tests if path.is_file()), None)
    if test is None:
        raise DmlError(
            f"{place} holds {TRAIN} but not {TEST}.",
            "The labels of half of the images are in that file; `cars_test_annos.mat` in "
            "cars_devkit.tgz has none.",
            f"Get {TEST} and put it beside {TRAIN}.",
        )
    entries = []
    for folder, source in (("cars_train", place / TRAIN), ("cars_test", test)):
        # Some copies of the archive nest the folder in one of the same name.
        images = f"{folder}/{folder}" if (base / folder / folder).is_dir() else folder
        for line, (path, label) in enumerate(_annotations(source, "fname"), 1):
            entries.append((f"{images}/{layout.relative(path, source, line)}", label))
    meta = place / "cars_meta.mat"
    return place / TRAIN, base, entries, _class_names(meta) if meta.is_file() else []


def _annotations(path: Path, field: str) -> list[tuple[str, int]]:
    """(image path, class) of each entry."""
    content = _matlab(path)
    try:
        table = np.atleast_1d(content["annotations"])
        images, labels = table[field], table["class"]
        return [(str(image), int(label)) for image, label in zip(images, labels, strict=True)]
    except (KeyError, IndexError, ValueError, TypeError, OverflowError) as error:
        raise DmlError(
            f"{path} does not hold the annotations of Cars196.",
            f"Wanted: a table `annotations` with the columns {field} and class ({error}).",
            "Get the file from its source again.",
        ) from error


def _class_names(path: Path) -> list[str]:
    """`AM General Hummer SUV 2000`, ...; names may repeat nowhere, or two classes would be one."""
    names = [str(name) for name in np.atleast_1d(_matlab(path).get("class_names", []))]
    return names if len(set(names)) == len(names) else []


def _matlab(path: Path) -> dict:
    from scipy.io import loadmat

    try:
        return loadmat(path, squeeze_me=True)
    except Exception as error:  # a damaged file raises whatever the parser stumbled on
        raise layout.unreadable(path, error) from error
