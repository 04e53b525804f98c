"""Simplified pairwise cross-entropy: Boudiaf et al., ECCV 2020, eq. 15."""

from torch import Tensor

from trainer.losses.base import Loss, require
from trainer.losses.ce import cross_entropy_parts


class SimplifiedPairwiseCrossEntropy(Loss):
    """Cross-entropy whose head is the class sums of the batch: nothing to learn.

    self_pairs: the sum of an image's own class includes the image itself, as in eq. 15.
    batch_classes: only classes in the batch count. Eq. 15 has all training classes, and one that
        the batch lacks has logit 0.
    scale: multiplies the dot products; 1 in eq. 15.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        self_pairs: bool = True,
        batch_classes: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__(num_classes, dim)
        self.self_pairs = self_pairs
        self.batch_classes = batch_classes
        self.scale = require(scale > 0, "scale", scale, "above 0")

    def split(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        n, classes = len(embeddings), self.num_classes
        if self.batch_classes:
            present, labels = labels.unique(return_inverse=True)
            classes = len(present)
        gram = embeddings @ embeddings.T  # (B, B)
        if not self.self_pairs:
            gram.fill_diagonal_(0)
        logits = embeddings.new_zeros(n, classes)
        logits.index_add_(1, labels, gram, alpha=self.scale / n)  # columns of a class added: (B, C)
        return cross_entropy_parts(logits, labels)
