"""Evaluate embeddings: files in and out, exact ranks, clusters, metrics, reports. No torch.

from retrieval import evaluate
result = evaluate("embeddings.h5")  # or vectors (N, D) and labels (N,); see docs/json.md
"""

TYPE_CHECKING = False  # what `typing` calls so; importing that would slow down every command
if TYPE_CHECKING:
    from retrieval.comparison import compare as compare
    from retrieval.embeddings import Embeddings as Embeddings
    from retrieval.embeddings import Split as Split
    from retrieval.errors import DmlError as DmlError
    from retrieval.evaluation import Settings as Settings
    from retrieval.evaluation import evaluate as evaluate
    from retrieval.loading.load import load as load
    from retrieval.loading.load import save as save
    from retrieval.reporting.report import report as report

PUBLIC = {
    "DmlError": "retrieval.errors",
    "Embeddings": "retrieval.embeddings",
    "Settings": "retrieval.evaluation",
    "Split": "retrieval.embeddings",
    "compare": "retrieval.comparison",
    "evaluate": "retrieval.evaluation",
    "load": "retrieval.loading.load",
    "report": "retrieval.reporting.report",
    "save": "retrieval.loading.load",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, PUBLIC, name)


def lazy_attribute(package: str, public: dict[str, str], name: str) -> object:
    """Import a public name of a package on its first use, from the module that `public` names."""
    if name not in public:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(public[name]), name)
