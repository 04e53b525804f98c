"""The losses and miners of pytorch-metric-learning behind our interface."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from retrieval.errors import DmlError, install
from retrieval.registry import nearest, unknown
from trainer.losses.base import Loss

try:
    from pytorch_metric_learning import distances, losses, miners, reducers, regularizers

    from trainer.losses import pairwise
except ImportError as error:
    raise DmlError(
        "This loss needs pytorch-metric-learning.",
        f"{error}.",
        install("cpu"),
    ) from error

SIZES = ("num_classes", "embedding_size", "descriptors_dim")  # filled in, not options
MODULES = {  # options that are objects are given by the name of their class
    "distance": distances,
    "reducer": reducers,
    "embedding_regularizer": regularizers,
    "weight_regularizer": regularizers,
}
KINDS = {  # the module, the base of its classes, and what `dmltool list` calls ours
    "loss": (losses, losses.BaseMetricLossFunction, "losses"),
    "miner": (miners, miners.BaseMiner, "miners"),
}
REFUSALS = (AssertionError, TypeError, ValueError)
"""What the library raises if it has looked at a value; other errors come of using it."""
WITHOUT = {
    "BaseMetricLossFunction": "It is a base class.",
    "GenericPairLoss": "It is a base class.",
    "DynamicSoftMarginLoss": "Its histogram keeps the graph of the step before.",
    "ManifoldLoss": "It takes no labels.",
    "VICRegLoss": "It takes no labels.",
    "BaseMiner": "It is a base class.",
    "EmbeddingsAlreadyPackagedAsTriplets": "Batches are not made of triplets here.",
}


class MetricLearning(Loss):
    """A loss of the library, by the name of its class; its parameters are those of this module.

    miner: chooses the pairs or triplets of a batch that the loss sees; None: it sees all.
    """

    def __init__(self, num_classes: int, dim: int, *, loss: str, **options: Any) -> None:
        super().__init__(num_classes, dim)
        self.loss = apart(made("loss", loss, options, (num_classes, dim, dim)))
        self.miner: nn.Module | None = None

    def split(self, embeddings: Tensor, labels: Tensor) -> dict[str, Tensor]:
        chosen = None if self.miner is None else self.miner(embeddings, labels)
        value = self.loss(embeddings, labels, chosen)
        if value.ndim == 0:
            return {"loss": value}
        names = (pairwise.PARTS.get(name, name) for name in self.loss.sub_loss_names())
        return dict(zip(names, value, strict=True))


class Apart(reducers.MultipleReducers):
    """Leaves the parts of a loss unsummed, so that they can be named."""

    def sub_loss_reduction(self, sub_losses: Tensor, *_: Any) -> Tensor:
        return sub_losses


def apart(loss: losses.BaseMetricLossFunction) -> losses.BaseMetricLossFunction:
    """The loss; if it has several parts, they are not summed."""
    if type(loss.reducer) is reducers.MultipleReducers:
        loss.reducer = Apart(loss.reducer.reducers)
    return loss


def build_miner(*, miner: str, **options: Any) -> nn.Module:
    """Build a miner of the library by the name of its class."""
    return made("miner", miner, options)


def made(kind: str, name: str, options: Mapping[str, Any], sizes: tuple[int, ...] = ()) -> Any:
    """An object of a class of the library; `kind` is loss or miner, `sizes` the values of SIZES."""
    target = library_class(kind, name)
    if "reducer" not in options:  # another one need not give the sum of the parts
        target = pairwise.IN_PARTS.get(name, target)
    parameters = constructor(target)
    filled = {n: size for n, size in zip(SIZES, sizes, strict=False) if n in parameters}
    given = filled.keys() | options.keys()
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in given]
    table = "loss.options" if kind == "loss" else "loss.miner_options"
    if missing:
        raise DmlError(
            f"The {kind} {name!r} needs the option {missing[0]!r}.",
            f"It has no default for: {', '.join(missing)}.",
            f"--set {table}.{missing[0]}=...",
        )
    objects = {key: instance(key, value, table) for key, value in options.items()}
    return called(target, filled | objects, {f"{table}.{k}": v for k, v in options.items()})


def called(target: type, values: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """An object of a class; DmlError if it refuses the values, which were given as settings."""
    try:
        return target(**values)
    except Exception as error:  # the library raises nearly anything
        raise refused(target.__name__, given, error) from error


def refused(what: str, given: Mapping[str, Any], error: Exception) -> DmlError:
    """The error for a loss or miner that fails with the values that were given as settings."""
    named = ", ".join(f"{key} = {value!r}" for key, value in given.items())
    kind = "" if isinstance(error, REFUSALS) else f"{type(error).__name__}: "
    reason = f"{kind}{str(error).rstrip('.')}. " if str(error) else ""
    return DmlError(
        f"{what} refuses its options.",
        f"{reason}They are: {named or 'the defaults'}.",
        f"Give other values, or leave them out: --set {next(iter(given))}=..."
        if given
        else "Choose another: dmltool list losses",
    )


def classes(kind: str) -> dict[str, type]:
    """The classes of the library that can be used; `kind` is loss or miner."""
    module, base, _ = KINDS[kind]
    found = inspect.getmembers(module, lambda x: inspect.isclass(x) and issubclass(x, base))
    return {name: target for name, target in found if name not in WITHOUT}


def parameters_of(kind: str, name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a class of the library that are options."""
    found = constructor(library_class(kind, name))
    return {name: parameter for name, parameter in found.items() if name not in SIZES}


def library_class(kind: str, name: str) -> type:
    """The class of that name; DmlError names the nearest one. kind: loss or miner."""
    known = classes(kind)
    if name in WITHOUT:
        near = nearest(name, known) or next(iter(known))
        raise DmlError(
            f"The {kind} 'pml:{name}' cannot be used.",
            WITHOUT[name],
            f"Choose another one: --{kind} pml:{near}",
        )
    if name not in known:
        names = [f"pml:{other}" for other in known]
        raise unknown(kind, f"pml:{name}", names, f"--{kind}", listed=KINDS[kind][2])
    return known[name]


def constructor(target: type) -> dict[str, inspect.Parameter]:
    """Keywords of the constructor and of those that it hands its rest to."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in target.__mro__[: target.__mro__.index(nn.Module)]:
        if "__init__" in vars(base):
            for name, parameter in inspect.signature(base).parameters.items():
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    parameters.setdefault(name, parameter)
    parameters.pop("mat_based_loss", None)  # the subclasses set it
    return parameters


def instance(option: str, value: Any, table: str) -> Any:
    """An object for options that are objects.

    "CosineSimilarity" becomes CosineSimilarity(), {"name": "LpDistance", "power": 2} becomes
    LpDistance(power=2).
    """
    if option not in MODULES or not isinstance(value, str | Mapping):
        return value
    own = {"name": value} if isinstance(value, str) else dict(value)
    known = dict(inspect.getmembers(MODULES[option], inspect.isclass))
    name = str(own.pop("name", ""))
    if name not in known:
        raise unknown(option, name, known)
    return called(known[name], own, {f"{table}.{option}": value})
