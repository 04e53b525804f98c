"""The losses of pytorch-metric-learning behind our interface."""

import inspect
from typing import Any

from torch import Tensor

from retrieval.errors import DmlError
from retrieval.registry import nearest, unknown
from trainer.losses import check_options
from trainer.losses.base import Loss

try:
    from pytorch_metric_learning import distances, losses, reducers, regularizers
except ImportError as error:
    raise DmlError(
        "This loss needs pytorch-metric-learning.",
        f"{error}.",
        "Install it: pip install pytorch-metric-learning",
    ) from error

SIZES = {"num_classes": "num_classes", "embedding_size": "dim", "descriptors_dim": "dim"}
MODULES = {  # options that are objects are given by the name of their class
    "distance": distances,
    "reducer": reducers,
    "embedding_regularizer": regularizers,
    "weight_regularizer": regularizers,
}
PARTS = {"pos_loss": "tightness", "neg_loss": "contrastive"}
WITHOUT = {
    "BaseMetricLossFunction": "It is a base class.",
    "GenericPairLoss": "It is a base class.",
    "DynamicSoftMarginLoss": "Its histogram keeps the graph of the step before.",
    "ManifoldLoss": "It takes no labels.",
    "VICRegLoss": "It takes no labels.",
}


class MetricLearning(Loss):
    """`loss` is the name of a class; its parameters are parameters of this module."""

    def __init__(self, num_classes: int, dim: int, *, loss: str, **options: Any) -> None:
        super().__init__(num_classes, dim)
        target = loss_class(loss)
        check_options(loss, options, accepted(target))
        sizes = {"num_classes": num_classes, "dim": dim}
        needed = required(target)
        filled = {name: sizes[SIZES[name]] for name in needed if name in SIZES}
        missing = [name for name in needed if name not in filled and name not in options]
        if missing:
            raise DmlError(
                f"The loss {loss!r} needs the option {missing[0]!r}.",
                f"It has no default for: {', '.join(missing)}.",
                f"--set loss.options.{missing[0]}=...",
            )
        objects = {key: instance(key, value) for key, value in options.items()}
        try:
            self.loss = target(**{**filled, **objects})
        except (AssertionError, TypeError, ValueError) as error:
            raise DmlError(
                f"{loss} refuses its options.", f"{error}", f"Given: {options}."
            ) from error
        if type(self.loss.reducer) is reducers.MultipleReducers:
            self.loss.reducer = Apart(self.loss.reducer.reducers)

    def split(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        value = self.loss(embeddings, labels)
        if value.ndim == 0:
            return {"loss": value}
        names = (PARTS.get(name, name) for name in self.loss.sub_loss_names())
        return dict(zip(names, value, strict=True))


class Apart(reducers.MultipleReducers):
    """Leaves the parts of a loss unsummed, so that they can be named."""

    def sub_loss_reduction(self, sub_losses: Tensor, *_: Any) -> Tensor:
        return sub_losses


def loss_classes() -> dict[str, type]:
    """The classes that take embeddings and labels."""
    base = losses.BaseMetricLossFunction
    found = inspect.getmembers(losses, lambda x: inspect.isclass(x) and issubclass(x, base))
    return {name: target for name, target in found if name not in WITHOUT}


def loss_class(name: str) -> type:
    known = loss_classes()
    if name in WITHOUT:
        near = nearest(name, known)
        raise DmlError(
            f"The loss 'pml:{name}' cannot be used.",
            WITHOUT[name],
            f"Choose another one: --loss pml:{near or 'ContrastiveLoss'}",
        )
    if name not in known:
        raise unknown("loss", f"pml:{name}", [f"pml:{other}" for other in known], "--loss")
    return known[name]


def accepted(target: type) -> list[str]:
    """Keywords of the constructor and of those that it hands its rest to, without the sizes."""
    return [
        name for name in constructor(target) if name not in SIZES or name not in required(target)
    ]


def required(target: type) -> list[str]:
    return [p.name for p in constructor(target).values() if p.default is p.empty]


def constructor(target: type) -> dict[str, inspect.Parameter]:
    parameters: dict[str, inspect.Parameter] = {}
    for base in target.__mro__:
        if not base.__module__.startswith("pytorch_metric_learning"):
            break
        if "__init__" not in vars(base):
            continue
        for name, parameter in inspect.signature(base).parameters.items():
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD or (
                parameter.kind is parameter.KEYWORD_ONLY
            ):
                parameters.setdefault(name, parameter)
    parameters.pop("mat_based_loss", None)  # the subclasses set it
    return parameters


def instance(option: str, value: Any) -> Any:
    """An object for options that are objects: "CosineSimilarity" becomes CosineSimilarity()."""
    if option not in MODULES or not isinstance(value, str):
        return value
    known = dict(inspect.getmembers(MODULES[option], inspect.isclass))
    if value not in known:
        raise unknown(option, value, known)
    return known[value]()
