"""Score a run: before training, after each epoch, and on the test set at the end."""

import time

import numpy as np
import torch

from retrieval.distributed import processes
from retrieval.evaluation import Settings, evaluate, score
from retrieval.metrics import RECALL_AT, mean
from retrieval.results import Result
from trainer.data.datasets import recall_at_of
from trainer.data.loading import testing_batches
from trainer.results import EpochRecord, Recalls, Validation
from trainer.run import distributed
from trainer.run.device import precision, to_input
from trainer.run.scoring import (
    Embeds,
    WithPixels,
    as_problem,
    counting_device,
    embed,
    gallery_and_queries,
    recall,
)
from trainer.run.state import Embedded, Training


def score_baselines(training: Training) -> EpochRecord | None:
    """Score the network before training, and raw pixels: the record of epoch 0."""
    began = time.perf_counter()
    network = WithPixels(training.embedder)
    found = validation_vectors(training, network)
    if found is None:
        return None
    vectors, labels, gallery = found
    dim = training.embedder.dim
    untrained, pixels = processes.from_first(
        lambda: [
            recall(part, labels, gallery, training.device)
            for part in (vectors[:, :dim], vectors[:, dim:])
        ],
        training.world,
    )
    seconds = time.perf_counter() - began
    return {
        "epoch": 0,
        "loss": None,
        "parts": {},
        "monitor": {},
        "seconds": seconds,
        "images_per_second": len(vectors) / seconds,
        "lr": 0.0,
        "scores_of": training.config.run.select,
        "scores": untrained,
        "pixels": pixels,
        "best": False,
    }


def baselines(training: Training) -> dict[str, Recalls]:
    """The scores of epoch 0 by name; a run without validation has none."""
    first = next(iter(training.records), None)
    if first is None or first["epoch"] != 0:
        return {}
    return {"pixels": first["pixels"], "untrained": first["scores"]}


def check_sound(training: Training) -> None:
    """Raise if the last step has ruined the network, before a checkpoint replaces the last one."""
    modules = (training.embedder, training.loss)
    tensors = [t.detach() for m in modules for t in (*m.parameters(), *m.buffers())]
    sound = all(t.isfinite().all() for t in tensors if t.is_floating_point())
    some = training.source.data.rows("train")[:64]
    if not sound or not np.isfinite(embed_rows(training, some)).all():
        raise training.diverged(
            f"The network gives NaN or infinite embeddings after epoch {training.epoch + 1}."
        )


def validate(training: Training, found: Embedded | None) -> Recalls:
    """Recall@1 on the split that picks the best epoch; nothing if none does."""
    if found is None:
        return {}
    return processes.from_first(lambda: recall(*found, training.device), training.world)


def training_recall(training: Training) -> Recalls:
    """Recall@1 among a sample of training images, seen as in validation."""
    data, config = training.source.data, training.config
    count, seed = config.run.train_recall, config.data.val_seed
    rows = sampled_classes(data.rows("train"), data.labels, count, seed)
    distributed.share_buffers(training.embedder, training.world)
    return validate(training, (embed_rows(training, rows), data.labels[rows], None))


def sampled_classes(rows: np.ndarray, labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Rows of classes drawn at random, as many classes as hold at most `count` images.

    Whole classes, because a query needs its positives; at least two of them. If the classes are
    too large for that, those two lose some of their images.
    """
    drawn = np.random.default_rng(seed).permutation(np.unique(labels[rows]))
    sizes = np.array([np.count_nonzero(labels[rows] == c) for c in drawn])
    classes = max(2, int(np.searchsorted(np.cumsum(sizes), count, side="right")))
    kept = [rows[labels[rows] == c] for c in drawn[:classes]]
    most = max(2, count // len(kept))
    if sum(map(len, kept)) > count:
        kept = [part[:most] for part in kept]
    return np.sort(np.concatenate(kept))


def validation_vectors(training: Training, network: Embeds, full: bool = False) -> Embedded | None:
    """Embeddings, labels and the number of gallery rows of the split that picks the best epoch.

    full: in float32, as an export is.
    """
    data = training.source.data
    split = training.config.run.select
    if split == "last":
        return None
    gallery, queries = gallery_and_queries(data, split)
    rows = gallery if queries is None else np.concatenate([gallery, queries])
    distributed.share_buffers(training.embedder, training.world)
    vectors = embed_rows(training, rows, network, full)
    return vectors, data.labels[rows], None if queries is None else len(gallery)


def embed_rows(
    training: Training,
    rows: np.ndarray,
    network: Embeds | None = None,
    full: bool = False,
) -> np.ndarray:
    """Embeddings (n, D) of these rows, by all processes; full: in float32, as an export is."""
    config, world = training.config, training.world
    own = rows[world.rank :: world.size]
    batches = testing_batches(
        training.source,
        own,
        max(64, config.batches.total),
        config.data.workers,
        training.device,
    )
    half = None if full else precision(config, training.device)
    with torch.autocast(training.device.type, half or torch.bfloat16, enabled=half is not None):
        vectors = embed(
            network or training.embedder,
            batches,
            lambda images: to_input(images, training.device),
        )
    return distributed.gather_rows(vectors, len(rows), world).numpy()


def score_test(training: Training) -> Result | None:
    """Evaluate the embedder on the test set, if there is one; only the first process has scores."""
    data = training.source.data
    gallery, queries = gallery_and_queries(data, "test")
    if not len(gallery):
        return None
    training.watch.stage("scoring the test set", 0, 1)
    rows = gallery if queries is None else np.concatenate([queries, gallery])
    vectors, labels = embed_rows(training, rows, full=True), data.labels[rows]
    if training.world.rank != 0:
        return None
    n = len(rows) if queries is None else len(queries)
    pair = (None, None) if queries is None else (vectors[n:], labels[n:])
    return evaluate(
        vectors[:n],
        labels[:n],
        *pair,
        recall_at=recall_at(training),
        device=counting_device(training.device, vectors.shape[1]),
        progress=training.watch.stage,
    )


def recall_at(training: Training) -> tuple[int, ...]:
    """The values of K: those of the settings, else those that papers give, else the usual."""
    known = training.config.run.recall_at or recall_at_of(training.source.data.name)
    return known or RECALL_AT


def needs_vectors(training: Training) -> bool:
    """Whether the best epoch's validation has to be embedded again.

    This process has its embeddings unless an earlier one trained that epoch, or in half precision.
    """
    if training.config.run.select == "last":
        return False
    half = precision(training.config, training.device)
    return training.best_vectors is None or half is not None


def score_validation(training: Training) -> Validation | None:
    """All scores on the split that picked the best epoch, and the hits of its classes.

    Hits are queries whose nearest neighbour is of their class: what tests of a difference between
    runs draw from. None where no split picks the epoch, and in all processes but the first.
    """
    found = training.best_vectors
    if needs_vectors(training):
        found = validation_vectors(training, training.embedder, full=True)
    if found is None or training.world.rank != 0:
        return None
    vectors, labels, gallery = found
    ks = recall_at(training)
    device = counting_device(training.device, vectors.shape[1])
    settings = Settings(recall_at=tuple(sorted({1, *ks})), nmi=False, resamples=1, device=device)
    evaluation = score(as_problem(vectors, labels, gallery), settings)
    codes = evaluation.problem.query_codes
    names = training.source.data.label_names
    present = np.unique(codes)
    return {
        "split": training.config.run.select,
        "scores": {
            d: {name: mean(values) for name, values in columns.items()}
            for d, columns in evaluation.per_query.items()
        },
        "classes": [str(names[evaluation.problem.names[c]]) for c in present],
        "queries": np.bincount(codes)[present].tolist(),
        "hits": {
            d: np.bincount(codes, weights=ranks == 1)[present].astype(int).tolist()
            for d, ranks in evaluation.ranks.items()
        },
    }
