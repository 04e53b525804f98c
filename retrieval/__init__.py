"""Evaluation of embeddings: files in and out, exact ranks, neighbours, clusters, metrics. No torch.

from retrieval import evaluate
result = evaluate(vectors, labels)  # (N, D), (N,) -> dict, the JSON shape of docs/json.md
"""

_EXPORTS = {
    "DmlError": "retrieval.errors",
    "compare": "retrieval.comparison",
    "evaluate": "retrieval.evaluation",
    "load": "retrieval.loading",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    # Resolved on first use: importing one module of the package must not pay for all of them.
    if name in _EXPORTS:
        from importlib import import_module

        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'retrieval' has no attribute {name!r}")
