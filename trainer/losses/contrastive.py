"""Contrastive loss: Boudiaf et al., ECCV 2020, eq. 2."""

from trainer.losses.base import Loss, not_negative
from trainer.losses.pml import MetricLearning, apart, pairwise


class Contrastive(MetricLearning):
    """1/n sum |z_i - z_j|^2 over pairs of a class plus 1/n sum max(0, margin - |z_i - z_j|)^2.

    margin: negatives farther apart than this add nothing.
    normalize: embeddings are scaled to length 1 first, as Lemma 1 of the paper assumes.
    """

    def __init__(
        self, num_classes: int, dim: int, *, margin: float = 1.0, normalize: bool = True
    ) -> None:
        Loss.__init__(self, num_classes, dim)
        margin = not_negative("margin", margin)
        self.loss = apart(pairwise.SquaredContrastive(margin, normalize))
        self.miner = None
