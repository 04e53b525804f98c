"""Images of a data set, ready to be resized, cropped and stacked into batches. No torch."""

from dataclasses import dataclass
from random import Random

import numpy as np

from retrieval.embeddings import SPLITS
from retrieval.errors import DmlError, listed
from retrieval.number_format import counted
from retrieval.resources import Progress
from trainer.config import Input
from trainer.data import image_cache, images, transforms
from trainer.data.datasets.records import DataSet
from trainer.data.image_cache import Store


@dataclass(frozen=True, eq=False)
class Source:
    """A data set, what is done to its images, and a cache of resized images if there is one."""

    data: DataSet
    spec: Input
    store: Store | None = None

    def resized(self, row: int) -> np.ndarray:
        """One resized image (H, W, 3) uint8, read-only."""
        if self.store is not None:
            return self.store.image(row)
        return transforms.resized(self.data.image(row, self.spec.short_side), self.spec)

    def batch(self, rows: np.ndarray, keys: np.ndarray | None = None) -> np.ndarray:
        """Images (B, crop, crop, 3) uint8, for training if there are keys (B,), else for testing.

        A key determines what is random about an image.
        """
        spec, crop = self.spec, self.spec.crop
        if not transforms.is_random(spec):
            keys = None
        if keys is None and self.store is not None and self.store.uniform:
            height, width = self.store.shapes[0].tolist()
            if min(height, width) >= crop:
                left, top = transforms.centre(width, height, crop)
                return self.store.images(rows)[:, top : top + crop, left : left + crop]
        batch = np.empty((len(rows), crop, crop, 3), np.uint8)
        for place, row in enumerate(rows.tolist()):
            image = self.resized(row)
            if keys is None:
                batch[place] = transforms.for_testing(image, spec)
            else:
                batch[place] = transforms.for_training(image, spec, Random(int(keys[place])))
        return batch


def open_images(
    data: DataSet,
    spec: Input,
    *,
    cache: str = "auto",
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Source:
    """Read every image once; those that cannot be read are an error, or left out with skip_bad.

    cache: none, ram, disk; auto: ram unless images are files of their own.
    """
    files = data.files()
    if cache == "auto":
        cache = "ram" if files is None else "none"
    kept: Store | None = None
    bad: image_cache.Bad = []
    if cache == "ram":
        kept, bad = image_cache.in_memory(data, spec, progress)
    elif cache == "disk":
        kept, bad = image_cache.on_disk(data, spec, progress)
    elif files is not None:
        bad = image_cache.check(data, spec, progress)
    if bad:
        paths = files or data.paths
        if not skip_bad:
            raise images.bad_images(paths, bad)
        names = listed((paths[row] for row, _ in bad), 3)
        note = f"{counted(len(bad), 'unreadable image')} left out: {names}."
        whole, rows = data, np.delete(np.arange(len(data)), [row for row, _ in bad])
        data = whole.take(rows, note)
        _check_left(whole, data)
        kept = None if kept is None else kept.take(rows)
    return Source(data, spec, kept)


def _check_left(whole: DataSet, left: DataSet) -> None:
    """Raise if a split has lost all images of a class."""
    for split in SPLITS:
        lost = np.setdiff1d(whole.classes(split), left.classes(split))
        if len(lost):
            names = listed(whole.label_names[label] for label in lost)
            raise DmlError(
                f"{whole.name}: without the bad images, {split} has no images of "
                f"{counted(len(lost), 'class', 'classes')}.",
                f"No image can be read of {names}.",
                "Replace the images, or remove these classes.",
            )
