"""Softmax cross-entropy, with the settings of Boudiaf et al., ECCV 2020, section 5.3."""

from torch import Tensor, nn

from trainer.losses.base import Loss, require
from trainer.losses.softmax import at_labels, log_sum_exp_


class CrossEntropy(Loss):
    """The target of the true class is 1 - smoothing, of each other smoothing / (C - 1).

    zero_init: the weights and biases of the head start at 0; if false, as torch draws them.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        smoothing: float = 0.1,
        dropout: float = 0.5,
        zero_init: bool = True,
    ) -> None:
        super().__init__(num_classes, dim)
        require(0 <= smoothing < 1, "smoothing", smoothing, "at least 0 and below 1")
        require(0 <= dropout < 1, "dropout", dropout, "at least 0 and below 1")
        self.smoothing = smoothing
        self.dropout = nn.Dropout(dropout)
        self.head = zero_head(dim, num_classes) if zero_init else nn.Linear(dim, num_classes)

    def split(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return cross_entropy_parts(self.head(self.dropout(embeddings)), labels, self.smoothing)


def zero_head(dim: int, num_classes: int) -> nn.Linear:
    """A linear layer whose weights and biases are 0."""
    head = nn.Linear(dim, num_classes)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def cross_entropy_parts(logits: Tensor, labels: Tensor, smoothing: float = 0) -> dict[str, Tensor]:
    """The two halves of eq. 13, without the lambda that cancels. Overwrites the logits (B, C)."""
    true = at_labels(logits, labels)
    wanted = true
    if smoothing and logits.shape[1] > 1:
        others = (logits.sum(1) - true) / (logits.shape[1] - 1)
        wanted = (1 - smoothing) * true + smoothing * others
    return {"tightness": -wanted.mean(), "contrastive": log_sum_exp_(logits).mean()}
