"""Losses of pytorch-metric-learning in the two parts of Table 2 of Boudiaf et al., ECCV 2020.

The tightness part pulls the images of a class together, the contrastive part pushes images apart.
"""

from typing import Any

import torch
from pytorch_metric_learning import distances, losses
from pytorch_metric_learning.utils.loss_and_miner_utils import convert_to_weights
from torch import Tensor

PARTS = {"pos_loss": "tightness", "neg_loss": "contrastive"}
"""The library's names of the parts, and the paper's."""


def two_parts(rows: Tensor, tightness: Tensor, contrastive: Tensor) -> dict[str, Any]:
    """Two values for each of the rows of a batch, as the library's reducers take them."""
    return {
        name: {"losses": values, "indices": rows, "reduction_type": "element"}
        for name, values in zip(PARTS, (tightness, contrastive), strict=True)
    }


class InParts:
    """Tells the library the names of the parts."""

    def _sub_loss_names(self) -> list[str]:
        return list(PARTS)


class MultiSimilarity(InParts, losses.MultiSimilarityLoss):
    """Multi-similarity loss in two parts; the value is the library's."""

    def _compute_loss(self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor) -> dict[str, Any]:
        near, far = self.distance.margin(mat, self.base), self.distance.margin(self.base, mat)
        return two_parts(
            torch.arange(len(mat), device=mat.device),
            log_one_plus(self.alpha * near, pos_mask) / self.alpha,
            log_one_plus(self.beta * far, neg_mask) / self.beta,
        )


def log_one_plus(exponents: Tensor, mask: Tensor) -> Tensor:
    """log(1 + sum of exp) over the masked entries of each row, (B, B) -> (B,)."""
    kept = exponents.masked_fill(mask == 0, -torch.inf)
    return torch.cat([kept, kept.new_zeros(len(kept), 1)], 1).logsumexp(1)


class NCA(InParts, losses.NCALoss):
    """NCA over all images that have a positive in the batch.

    The library also leaves out images whose probability of a positive rounds to 0, for which the
    loss is largest. Where there are none of these, the value is the same.
    """

    def nca_computation(
        self,
        query: Tensor,
        reference: Tensor,
        query_labels: Tensor,
        reference_labels: Tensor,
        indices_tuple: Any,
    ) -> dict[str, Any]:
        logits = self.softmax_scale * self.distance(query, reference)  # (B, B)
        logits = logits if self.distance.is_inverted else -logits
        itself = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
        positive = (query_labels[:, None] == reference_labels) & ~itself
        rows = positive.any(1).nonzero().flatten()
        if not len(rows):
            return self.zero_losses()
        weights = convert_to_weights(indices_tuple, query_labels, dtype=query.dtype)[rows]
        logits = logits.masked_fill(itself, -torch.inf)[rows]
        same = logits.masked_fill(~positive[rows], -torch.inf)
        return two_parts(rows, -same.logsumexp(1) * weights, logits.logsumexp(1) * weights)


class SquaredContrastive(InParts, losses.GenericPairLoss):
    """Eq. 2: squared distances, summed over pairs and divided by the size of the batch."""

    def __init__(self, margin: float, normalize: bool) -> None:
        super().__init__(mat_based_loss=True, distance=Euclidean(normalize_embeddings=normalize))
        self.margin = margin

    def _compute_loss(self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor) -> dict[str, Any]:
        return two_parts(
            torch.arange(len(mat), device=mat.device),
            (mat.square() * pos_mask).sum(1),
            ((self.margin - mat).relu().square() * neg_mask).sum(1),
        )


class Euclidean(distances.LpDistance):
    """Takes differences instead of products, which are inexact for points near each other."""

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return torch.cdist(query_emb, ref_emb, compute_mode="donot_use_mm_for_euclid_dist")


IN_PARTS = {"MultiSimilarityLoss": MultiSimilarity, "NCALoss": NCA}
