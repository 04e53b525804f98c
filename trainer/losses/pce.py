"""Pairwise cross-entropy: Boudiaf et al., ECCV 2020, Proposition 1 and eq. 25."""

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrieval.errors import DmlError
from trainer.losses.base import Loss, not_negative
from trainer.losses.softmax import log_sum_exp_, softmax_


class PairwiseCrossEntropy(Loss):
    """An instrument that shows what cross-entropy does to pairs, by the paper's argument.

    It divides by lambda, the smallest eigenvalue of C matrices of D x D: costly, and zero whenever
    the batch is smaller than D. Below `floor` the floor is used and a warning says so once; with
    floor = 0 that is an error.

    Proposition 1 has CE >= PCE. That is sure for a head of zeros, whatever lambda is: the class
    sums add up to the sum of all, and Cauchy-Schwarz does the rest. For other heads it often
    fails: the proof takes the soft means at the present head for the optimum of its second half.
    """

    def __init__(self, num_classes: int, dim: int, *, floor: float = 1e-3) -> None:
        super().__init__(num_classes, dim)
        self.floor = not_negative("floor", floor)
        self.head = nn.Linear(dim, num_classes, bias=False)
        self.smallest = float("nan")
        """The lambda of the last batch, the floor where that was used."""

    def further_values(self) -> dict[str, float]:
        return {"lambda": self.smallest}

    def split(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """A bias of the head is the weight of one more dimension that is always 1."""
        logits = self.head(embeddings)  # (B, C)
        if self.head.bias is not None:
            embeddings = F.pad(embeddings, (0, 1), value=1.0)  # (B, D + 1)
        n = len(embeddings)
        probabilities = softmax_(logits)
        soft = probabilities.T @ embeddings / n  # (C, D), c^s of the paper
        smallest = self.at_least_floor(embeddings, probabilities)
        del logits, probabilities  # the next (B, C) matrix takes their memory
        hard = torch.zeros_like(soft).index_add(0, labels, embeddings) / n  # (C, D)
        spread = log_sum_exp_((embeddings / smallest) @ soft.T).mean()
        return {
            "tightness": -hard.square().sum() / (2 * smallest),
            "contrastive": spread - soft.square().sum() / (2 * smallest),
        }

    def at_least_floor(self, embeddings: Tensor, probabilities: Tensor) -> Tensor:
        n, d = embeddings.shape
        # p - p^2 <= 1/4 bounds the largest eigenvalue; rounding is proportional to that.
        squares = embeddings.detach().square().sum().item()
        lowest = max(self.floor, torch.finfo(embeddings.dtype).eps * d * squares / (4 * n))
        smallest = smallest_eigenvalue(embeddings, probabilities, lowest)
        self.note, self.smallest = "", smallest.item()
        if self.smallest > lowest:
            return smallest
        why = f"a batch of {n} in {d} dimensions" + (" has no full rank" if n < d else "")
        what = f"the lambda of the loss 'pce' is at most {self.smallest:.2g}"
        if self.floor == 0:
            raise DmlError(
                f"{what.capitalize()}.",
                f"The batch has {n} images in {d} dimensions.",
                f"Use a batch of well over {d} images, fewer dimensions, or a floor: "
                "--set loss.options.floor=1e-3",
            )
        self.smallest = self.floor
        self.note = f"{what}: {why}; {self.floor:g} is used instead"
        if self.warn:
            warnings.warn(self.note, stacklevel=5)
            self.warn = False
        return torch.full_like(smallest, self.floor)


def smallest_eigenvalue(embeddings: Tensor, probabilities: Tensor, enough: float = 0.0) -> Tensor:
    """The smallest eigenvalue of any A_k = 1/n sum_i (p_ik - p_ik^2) z_i z_i^T, eq. 25.

    The first one found that is not above `enough` is taken. Rare classes come first, theirs are
    small; a Cholesky factor of A_k - m tells, ten times faster, that those of A_k are above m.
    """
    n, d = embeddings.shape
    if n < d:
        return embeddings.new_zeros(())

    def scatter(k: int) -> Tensor:
        p = probabilities[:, k]
        return (embeddings * (p - p.square())[:, None]).T @ embeddings / n  # (D, D)

    least, at = math.inf, 0
    with torch.no_grad():  # the gradient is that of the smallest alone
        for k in probabilities.sum(0).argsort().tolist():
            a = scatter(k)
            if least < math.inf and above(a, least):
                continue
            value = torch.linalg.eigvalsh(a)[0].item()
            if not value >= least:  # NaN ends the search as well
                least, at = value, k
            if not least > enough:
                break
    return torch.linalg.eigvalsh(scatter(at))[0]


def above(symmetric: Tensor, value: float) -> bool:
    """Whether all eigenvalues are above a value."""
    shifted = symmetric - value * torch.eye(len(symmetric)).to(symmetric)
    return torch.linalg.cholesky_ex(shifted).info.item() == 0
