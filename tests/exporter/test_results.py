"""Results of exports and inspections have the keys and values that their types name."""

import json

import onnx

from exporter.embedding.embed import embed
from exporter.exporting import export
from exporter.inspection import check_model, inspect_model
from exporter.results import CheckResult, EmbeddingsResult, ExportResult, ModelInspection
from tests.exporter.models import FLOAT, mean_model
from tests.retrieval.typed import faults


def test_an_export_and_its_model_are_as_their_types_say(run, tmp_path, trained):
    assert faults(export(run, half=True), ExportResult) == []
    assert faults(json.loads((run / "export.json").read_text()), ExportResult) == []
    assert faults(export(run, embeddings=False, resume=True), ExportResult) == []
    found, model = inspect_model(run / "model.onnx")
    assert faults(found, ModelInspection) == []
    assert faults(check_model(model, [run]), CheckResult) == []
    embedded = embed(run / "model.onnx", trained / "pictures", tmp_path / "rows.h5")
    assert faults(embedded, EmbeddingsResult) == []


def test_the_inspection_of_any_model_is_as_its_type_says(tmp_path):
    shapes = {"foreign": ("batch", 3, 8, 8), "odd": ("batch", 5, 8, 8)}  # five colours: no images
    for name, shape in shapes.items():
        path = tmp_path / f"{name}.onnx"
        onnx.save(mean_model(shape, FLOAT, axes=(2, 3)), path)
        found, model = inspect_model(path)
        assert faults(found, ModelInspection) == []
        assert ("problem" in found) == (model is None) == (name == "odd")
