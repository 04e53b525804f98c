"""The Group Loss: Elezi et al., ECCV 2020, Algorithm 1 and its appendix."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from trainer.losses.base import Loss, not_negative, one_of, require, total
from trainer.losses.ce import cross_entropy_parts
from trainer.losses.softmax import at_labels, overwrite_with_softmax

SIMILARITIES = ("pearson", "cosine", "gaussian")
SMALLEST = 1e-30
"""Less support or probability than this counts as none; far from float32's 1e-38."""
COLUMNS = 512


class Group(Loss):
    """Class probabilities are refined by the similarities within the batch, then scored.

    anchors: images of each class in the batch, drawn at random, whose label is given.
    temperature: divides the logits before the softmax that starts the refinement.
    iterations: steps of the refinement, at most; the public code takes one.
    tolerance: the refinement ends once no probability changes by more than this; 0: never early.
    similarity: "pearson" (correlation, eq. 1), "cosine" or "gaussian" of the embeddings.
    bandwidth: sigma of "gaussian"; 0: the root mean square distance between images of the batch.
    diagonal: similarity of an image with itself; 0 in the paper, 1 in the public code.
    negatives: negative similarities are set to 0 ("clamp") or all are raised by the lowest
        ("shift", appendix G).
    batch_classes: only the classes in the batch take part (appendix I).
    objective: "ce", or "kl": images of a class should have the same probabilities (appendix F).
    ce_weight: plain cross-entropy on the logits is added; 1 in the public code, 0 in the paper.
    bias: the head has a bias; it has one in the public code, none in the paper.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        *,
        anchors: int = 2,
        temperature: float = 24.0,
        iterations: int = 1,
        tolerance: float = 0.0,
        similarity: str = "pearson",
        bandwidth: float = 0.0,
        diagonal: float = 0.0,
        negatives: str = "clamp",
        batch_classes: bool = False,
        objective: str = "ce",
        ce_weight: float = 1.0,
        bias: bool = True,
    ) -> None:
        super().__init__(num_classes, dim)
        self.anchors = not_negative("anchors", anchors)
        self.temperature = require(temperature > 0, "temperature", temperature, "above 0")
        self.iterations = not_negative("iterations", iterations)
        self.tolerance = not_negative("tolerance", tolerance)
        self.similarity = one_of(SIMILARITIES, "similarity", similarity)
        self.bandwidth = not_negative("bandwidth", bandwidth)
        self.diagonal = not_negative("diagonal", diagonal)
        self.negatives = one_of(("clamp", "shift"), "negatives", negatives)
        self.batch_classes = batch_classes
        self.objective = one_of(("ce", "kl"), "objective", objective)
        self.ce_weight = not_negative("ce_weight", ce_weight)
        self.head = nn.Linear(dim, num_classes, bias=bias)

    def split(
        self, embeddings: Tensor, labels: Tensor, anchors: Tensor | None = None
    ) -> dict[str, Tensor]:
        """`anchors`, a mask (B,), replaces the draw."""
        if anchors is None:
            anchors = draw_anchors(labels, self.anchors)
        refined, targets = self.refined(embeddings, labels, anchors)
        if self.objective == "ce":
            parts = {"refined": -log(at_labels(refined, targets)).mean()}
        else:
            parts = {"refined": divergence(refined, labels, anchors)}
        if self.ce_weight:
            del refined  # the logits take its memory
            entropy = total(cross_entropy_parts(self.head(embeddings), labels))
            parts["ce"] = self.ce_weight * entropy
        return parts

    def refined(self, embeddings: Tensor, labels: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """X(T), (B, C), and the column of each row's label."""
        weight: Tensor = self.head.weight
        bias: Tensor | None = self.head.bias
        if self.batch_classes:
            present, labels = labels.unique(return_inverse=True)
            weight, bias = weight[present], None if bias is None else bias[present]
        logits = F.linear(embeddings, weight, bias).div_(self.temperature)
        w = similarities(embeddings, self.similarity, self.bandwidth)
        w = non_negative_(w, self.negatives, self.diagonal)
        refined = _Refinement.apply(logits, w, labels, anchors, self.iterations, self.tolerance)
        return refined, labels


def draw_anchors(labels: Tensor, count: int) -> Tensor:
    """A mask (B,) of `count` random rows of each class, or all where a class has fewer.

    From torch's CPU generator on any device, so that a seed means the same everywhere.
    """
    order = torch.randperm(len(labels)).to(labels.device)
    order = order[labels[order].argsort(stable=True)]  # classes together, random within
    grouped = labels[order]
    rank = torch.arange(len(labels), device=labels.device) - torch.searchsorted(grouped, grouped)
    return torch.zeros_like(labels, dtype=torch.bool).scatter_(0, order, rank < count)


def similarities(embeddings: Tensor, kind: str, bandwidth: float) -> Tensor:
    """Similarity of each image with each other, (B, B); the diagonal means nothing yet.

    A row without a direction, constant for Pearson and zero for cosine, has similarity 0 with all,
    and no gradient.
    """
    if kind == "gaussian":
        return gaussian(embeddings, bandwidth)
    norm_before = torch.linalg.vector_norm(embeddings.detach(), dim=1, keepdim=True)
    if kind == "pearson":
        embeddings = embeddings - embeddings.mean(1, keepdim=True)
    norm = torch.linalg.vector_norm(embeddings, dim=1, keepdim=True)
    rounding = 4 * torch.finfo(norm.dtype).eps * norm_before if kind == "pearson" else 0.0
    unit = embeddings / norm.masked_fill(norm <= rounding, torch.inf)
    return unit @ unit.T


def gaussian(embeddings: Tensor, bandwidth: float) -> Tensor:
    """exp(-|z_i - z_j|^2 / (2 sigma^2)), (B, B). Without sigma, the mean square sets the scale."""
    centred = embeddings - embeddings.mean(0)  # less is lost where all lie far from the origin
    own = centred.square().sum(1)
    squares = (own[:, None] + own - 2 * centred @ centred.T).clamp(min=0)
    scale = torch.as_tensor(bandwidth**2, dtype=squares.dtype, device=squares.device)
    if not bandwidth:
        pairs = max(1, len(squares) * (len(squares) - 1))
        scale = (squares.detach().sum() / pairs).clamp(min=SMALLEST)
    return torch.exp(-squares / (2 * scale)).clone()  # autograd needs what exp gave


def non_negative_(w: Tensor, negatives: str, diagonal: float) -> Tensor:
    """Clamp or shift similarities (B, B) in place, and set the diagonal."""
    if negatives == "clamp":
        return w.fill_diagonal_(diagonal).relu_()
    lowest = w.fill_diagonal_(0).detach().argmin().reshape(1)  # at most the 0 of the diagonal
    return w.sub_(w.flatten().index_select(0, lowest)).fill_diagonal_(diagonal)


def divergence(x: Tensor, labels: Tensor, anchors: Tensor) -> Tensor:
    """Mean of KL(x_i || x_j), eq. 10, over the pairs of a class; an anchor is never the second.

    An anchor as the second would make it infinite; as the first it gives -log x_jy.
    """
    pairs = (labels[:, None] == labels) & ~anchors  # (B, B)
    pairs.fill_diagonal_(False)
    cross = x.new_zeros(len(x), len(x))  # sum_k x_ik log x_jk
    own = x.new_zeros(len(x))  # sum_k x_ik log x_ik
    for block in x.split(COLUMNS, dim=1):
        logs = log(block)
        cross.addmm_(block, logs.T)
        own = own + (block * logs).sum(1)
    total = (own * pairs.sum(1)).sum() - cross.masked_fill_(~pairs, 0).sum()
    return total / pairs.sum().clamp(min=1)


def log(x: Tensor) -> Tensor:
    return x.clamp(min=SMALLEST).log()


# The refinement, eq. 4: X <- X * (W X), rows normalised


def step_(x: Tensor, similarity: Tensor) -> None:
    """One iteration in place. A row that has no support keeps what it has."""
    blocks = x.split(COLUMNS, dim=1)
    total = x.new_zeros(len(x), 1)  # the diagonal of Q in eq. 6
    for block in blocks:
        total += (similarity @ block).mul_(block).sum(1, keepdim=True)
    alone = total <= SMALLEST
    for block in blocks:
        block *= (similarity @ block).div_(total).masked_fill_(alone, 1)


class _Refinement(Function):
    """Overwrite the logits (B, C) with X(T). An anchor starts as the one-hot of its label.

    Forward works in place, a block of columns at a time.

    Backward carries d loss / d log x, which is bounded where d loss / d x is not: probabilities of
    1e-30 give gradients, not NaN.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        similarity: Tensor,
        labels: Tensor,
        anchors: Tensor,
        iterations: int,
        tolerance: float,
    ) -> Tensor:
        overwrite_with_softmax(logits)
        x = logits
        true = x.gather(1, labels[:, None]).masked_fill_(anchors[:, None], 1)
        x.masked_fill_(anchors[:, None], 0).scatter_(1, labels[:, None], true)
        states = []
        for _ in range(iterations):
            if tolerance or any(ctx.needs_input_grad):
                states.append(x.clone())
            step_(x, similarity)
            if tolerance and (states[-1] - x).abs_().max() <= tolerance:
                break
        ctx.mark_dirty(logits)
        ctx.save_for_backward(similarity, *states, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        similarity, *states = ctx.saved_tensors
        by_log = gradient * states[-1]  # d loss / d log x
        by_similarity = torch.zeros_like(similarity)
        for before, after in zip(states[-2::-1], states[:0:-1], strict=True):
            support = similarity @ before
            alone = (before * support).sum(1, keepdim=True) <= SMALLEST
            moved = by_log - after * by_log.sum(1, keepdim=True)
            by_support = (moved / support.clamp_(min=SMALLEST)).masked_fill_(alone, 0)
            by_similarity += by_support @ before.T
            by_log = moved + before * (similarity.T @ by_support)
        # For an anchor, whose x is one-hot, this is 0; for a row without support the subtraction
        # above changes nothing here.
        by_logits = by_log - states[0] * by_log.sum(1, keepdim=True)
        return by_logits, by_similarity, None, None, None, None
