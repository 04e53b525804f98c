"""Recall of a network on held-out images, computed by `retrieval`."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from retrieval.errors import DmlError
from retrieval.number_format import percent
from retrieval.problem import Problem, from_arrays
from retrieval.results import Scores
from trainer.data.datasets import DataSet
from trainer.networks.embedder import Embedder
from trainer.results import BASELINES, Best, FlatScores, Recalls

PIXELS = 8  # sides of the raw images that training is compared with


class WithPixels(nn.Module):
    """A network whose embeddings are followed by the image itself at 8 x 8 pixels."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder
        self.dim = embedder.dim + 3 * PIXELS**2

    def forward(self, images: Tensor) -> Tensor:
        pixels = nn.functional.adaptive_avg_pool2d(images, PIXELS).flatten(1)
        return torch.cat([self.embedder(images).float(), pixels.float()], dim=1)


class Embeds(Protocol):
    """A network that gives embeddings of `dim` numbers."""

    dim: int
    training: bool

    def __call__(self, images: Tensor, /) -> Tensor: ...

    def train(self, mode: bool = True) -> object: ...

    def eval(self) -> object: ...


def embed(
    embedder: Embeds, batches: Iterable[Tensor], to_input: Callable[[Tensor], Tensor]
) -> Tensor:
    """Embeddings (n, D), float32 on the CPU, computed in evaluation mode."""
    training = embedder.training
    embedder.eval()
    try:
        with torch.inference_mode():
            found = [embedder(to_input(images)).float().cpu() for images in batches]
            return torch.cat([torch.empty(0, embedder.dim), *found])
    finally:
        embedder.train(training)


def gallery_and_queries(data: DataSet, split: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Gallery rows and query rows of a split; None: every image is a query for all others."""
    if split == "test" and not len(data.rows("test")):
        return data.rows("gallery"), data.rows("query")
    return data.rows(split), None


def recall(
    vectors: np.ndarray,
    labels: np.ndarray,
    gallery: int | None = None,
    device: torch.device | None = None,
) -> Recalls:
    """Recall@1 by l2 and by cos; if `gallery` is given, so many first rows are the gallery.

    device: that of the training, which counts the ranks if it is a GPU.
    Vectors that are not finite stop training with a clear message instead of a score.
    """
    if not np.isfinite(vectors).all():
        raise DmlError(
            "The network gives NaN or infinite embeddings.",
            "Training has diverged, although the loss was finite.",
            "Try a smaller learning rate: --lr, or clipping: --set optimizer.clip=1",
        )
    from retrieval.ranking.ranks import recall_at_1  # its kernels take a second to load

    chosen = counting_device(device, vectors.shape[1])
    return recall_at_1(as_problem(vectors, labels, gallery), device=chosen)


def counting_device(device: torch.device | None, dim: int) -> str:
    """The device that counts ranks: the GPU of a training if its products are right, else cpu."""
    if device is None or device.type != "cuda":
        return "cpu"
    from retrieval.ranking.backends.choice import NOTES
    from retrieval.ranking.backends.trial import fault_of

    index = torch.cuda.current_device() if device.index is None else device.index
    name = f"cuda:{index}"
    if fault := fault_of(name, dim):
        NOTES.info("Ranks are counted on the CPU: %s is left out, %s.", name, fault)
    return "cpu" if fault else name


def as_problem(vectors: np.ndarray, labels: np.ndarray, gallery: int | None) -> Problem:
    """The retrieval of all rows among each other, or of the last ones among the first."""
    if gallery is None:
        return from_arrays(vectors, labels)
    return from_arrays(vectors[gallery:], labels[gallery:], vectors[:gallery], labels[:gallery])


def flat(distances: Mapping[str, Scores]) -> FlatScores:
    """Scores of the evaluation by name: recall {"1": ...} becomes recall@1; no intervals."""
    found: FlatScores = {}
    for d, scores in distances.items():
        found[d] = {}
        for name, value in scores.items():
            if isinstance(value, dict) and not name.endswith("_ci"):
                ks = {k: v for k, v in value.items() if str(k).isdigit()}
                found[d] |= {f"{name}@{k}": v for k, v in ks.items()}
                if "mean" in value:  # of the seeds of k-means
                    found[d][name] = value["mean"]
            elif isinstance(value, float):
                found[d][name] = value
    return found


def verdict(best: Best, baselines: Mapping[str, Recalls], epochs: int) -> str:
    """A note if training did not help; empty if it did."""
    score = best["scores"]["cos"]
    for name, found in baselines.items():
        if score < found["cos"]:
            return (
                f"No epoch is better than the baseline, {BASELINES[name]}: Recall@1 "
                f"{percent(score)} against {percent(found['cos'])} (cos). Try another --lr, or "
                "more --epochs"
            )
    if best["epoch"] == 1 and epochs > 1:
        return "The best epoch is the first: what followed was of no use. Try a smaller --lr"
    return ""
