"""Export networks to ONNX, compare them with their networks, and embed images into files.

from exporter import export
result = export("runs/letters")  # writes model.onnx and embeddings.h5 there
"""

from retrieval import lazy_attribute

TYPE_CHECKING = False
if TYPE_CHECKING:
    from exporter.embedding.embed import embed as embed
    from exporter.exporting import export as export
    from exporter.onnx.model import Model as Model
    from exporter.onnx.model import describe as describe
    from exporter.onnx.session import Session as Session

PUBLIC = {
    "Model": "exporter.onnx.model",
    "Session": "exporter.onnx.session",
    "describe": "exporter.onnx.model",
    "embed": "exporter.embedding.embed",
    "export": "exporter.exporting",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> object:
    return lazy_attribute(__name__, PUBLIC, name)
