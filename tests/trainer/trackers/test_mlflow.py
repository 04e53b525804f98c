"""MLflow: what its stores hold."""

from importlib.util import find_spec

import pytest

from tests.trainer.trackers.logs import NOT_INSTALLED, logged


@pytest.mark.skipif(find_spec("mlflow") is None, reason=f"MLflow is {NOT_INSTALLED}")
@pytest.mark.filterwarnings("ignore")  # its own, of deprecated functions
@pytest.mark.parametrize("store", ["sqlite:///{}/mlflow.db", "file://{}/mlruns"])
def test_mlflow_gets_every_record_once_in_one_run(store, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.format(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = logged("mlflow", tmp_path / "run")
    client = MlflowClient()
    found = client.get_experiment_by_name("dmltool")
    (only,) = client.search_runs([found.experiment_id])
    assert (only.info.run_id, only.info.status) == (run, "FINISHED")
    assert only.data.params["optimizer.lr"] == "0.001"
    history = client.get_metric_history(run, "loss")
    assert [(m.step, m.value) for m in history] == [(1, 2.5), (2, 1.5)]
    assert only.data.metrics["test/cos recall_at_1"] == 0.625
