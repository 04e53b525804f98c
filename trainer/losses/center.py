"""Center loss: Wen et al., ECCV 2016, with the class means of the batch as centres."""

from torch import Tensor

from trainer.losses.base import Loss, not_negative, total
from trainer.losses.ce import cross_entropy_parts, zero_head


class Center(Loss):
    """Mean over the batch of weight/2 |z_i - c_{y_i}|^2 plus cross-entropy on a linear head.

    c_k is the mean of class k in the batch, so class-balanced batches are needed: a class with one
    image is its own centre. Wen et al. sum both terms over the batch and move the centres slowly;
    the default weight is theirs. Table 2 of Boudiaf et al., ECCV 2020, sums only the first term:
    that is weight = n, the size of the batch.
    """

    def __init__(self, num_classes: int, dim: int, *, weight: float = 0.003) -> None:
        super().__init__(num_classes, dim)
        self.weight = not_negative("weight", weight)
        self.head = zero_head(dim, num_classes)

    def split(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        squares = (embeddings - class_means(embeddings, labels)).square().sum(1).mean()
        entropy = total(cross_entropy_parts(self.head(embeddings), labels))
        return {"tightness": self.weight / 2 * squares, "contrastive": entropy}


def class_means(embeddings: Tensor, labels: Tensor) -> Tensor:
    """For each row the mean of the rows with its label, (B, D)."""
    _, place, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = embeddings.new_zeros(len(counts), embeddings.shape[1]).index_add(0, place, embeddings)
    return (sums / counts[:, None])[place]
