"""TensorBoard: what its event files hold."""

import pytest

from tests.trainer.trackers.logs import logged


def test_tensorboard_gets_every_record_once(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
    assert [e.step for e in events.Scalars("scores/cos")] == [0, 1, 2]
    assert [(e.step, e.value) for e in events.Scalars("test/cos recall@1")] == [(2, 0.625)]
