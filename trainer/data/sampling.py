"""Choose the images of each batch, and the key of each image's random changes.

A plan is an array, a function of seed and epoch alone: a run that is resumed, or that runs on
more processes, sees the same batches. A rank takes its columns of every batch.
"""

import numpy as np

from retrieval.metrics import occurrences

_PLANS = 0x706C616E  # keeps the stream of plans apart from others of the same seed


def random_batches(N: int, size: int, seed: int, epoch: int) -> np.ndarray:
    """Random batches (steps, size) of positions 0 .. N-1, each at most once.

    An incomplete last batch is dropped; with fewer than `size` images all are one batch.
    """
    size = min(size, N)
    order = shuffle(N, generator(seed, epoch))
    return order[: N // size * size].reshape(-1, size)


def balanced_batches(
    targets: np.ndarray, classes: int, images: int, seed: int, epoch: int, *, equally: bool = False
) -> np.ndarray:
    """(steps, classes * images) places in targets: blocks of `images` of one class, no class twice.

    N // (classes * images) steps. Classes are used in proportion to their images, as far as a class
    can be in a batch only once, and all images of a class before one of them comes again, in the
    same batch if the class has fewer than `images`.
    equally: all classes are used equally often, however many images they have.
    """
    sizes = np.bincount(targets)
    rng = generator(seed, epoch)
    steps = max(1, len(targets) // (classes * images))
    uses = apportioned(np.sign(sizes) if equally else sizes, steps, classes, rng)
    table = spread(uses, steps, classes, rng)  # (steps, classes) labels

    # Image number k of a class, k counted over the epoch, is the k-th of a shuffled circle.
    order = np.lexsort((rng.random(len(targets)), targets))
    starts = np.cumsum(sizes) - sizes
    labels = table.ravel()
    k = images * occurrences(labels)[:, None] + np.arange(images)  # (steps * classes, images)
    plan = order[starts[labels][:, None] + k % sizes[labels][:, None]]
    return plan.reshape(steps, classes * images)


def apportioned(
    sizes: np.ndarray, steps: int, classes: int, rng: np.random.Generator
) -> np.ndarray:
    """(C,) in how many batches each class is: steps * classes in all, none above `steps`.

    Shares in proportion to sizes, rounded up or down at random by systematic sampling.
    """
    uses = np.zeros(len(sizes), np.int64)
    open_ = np.flatnonzero(sizes)
    left = steps * classes
    while len(large := open_[left * sizes[open_] > steps * sizes[open_].sum()]):
        uses[large] = steps
        left -= steps * len(large)
        open_ = np.setdiff1d(open_, large)
    if len(open_):
        open_ = open_[shuffle(len(open_), rng)]
        total = int(sizes[open_].sum())
        marks = (left * np.cumsum(sizes[open_]) + int(rng.random() * total)) // total
        uses[open_] = np.diff(marks, prepend=0)
    return uses


def spread(uses: np.ndarray, steps: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """(steps, classes) labels, each label in `uses` different rows.

    The label with most uses first, each into the rows with most room: that always comes out even.
    """
    room = np.full(steps, classes)
    rows, labels = [], []
    often = np.flatnonzero(uses > 1)
    for label in often[np.argsort(-uses[often], kind="stable")].tolist():
        n = uses[label]
        chosen = np.argpartition(-(room + rng.random(steps)), n - 1)[:n]
        room[chosen] -= 1
        rows.append(chosen)
        labels.append(np.full(n, label))
    once = np.flatnonzero(uses == 1)
    rows.append(np.repeat(np.arange(steps), room))
    labels.append(once[shuffle(len(once), rng)])
    row, label = np.concatenate(rows), np.concatenate(labels)
    return label[np.lexsort((rng.random(len(row)), row))].reshape(steps, classes)


def generator(seed: int, epoch: int) -> np.random.Generator:
    """The generator of the plan of an epoch."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((_PLANS, seed, epoch))))


def shuffle(n: int, rng: np.random.Generator) -> np.ndarray:
    """A random order of 0 .. n-1 that does not change between versions of NumPy."""
    return np.argsort(rng.random(n), kind="stable")


def keys(seed: int, epoch: int, steps: int, size: int) -> np.ndarray:
    """(steps, size) uint64, one for each place in the batches: the seed of what is random there.

    All keys of an epoch differ.
    """
    start = np.array([mix(seed, epoch)], np.uint64)
    step = np.arange(steps, dtype=np.uint64)[:, None] << np.uint64(32)
    return _mixed(start + (step | np.arange(size, dtype=np.uint64)))


def mix(*numbers: int) -> int:
    """A seed from several numbers, 0 .. 2**64 - 1."""
    seed = np.zeros(1, np.uint64)
    for number in numbers:
        seed = _mixed(seed + np.array([number], np.uint64))
    return int(seed[0])


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, a bijection; https://prng.di.unimi.it/splitmix64.c"""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
