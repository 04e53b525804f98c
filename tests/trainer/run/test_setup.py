"""What is checked and noted before the first step."""

import pytest

from retrieval.errors import DmlError
from trainer.config import Config, Optimizer, Phase
from trainer.run import train
from trainer.run.setup import tell_unused
from trainer.run.watch import Watch


def test_a_run_inside_its_data_is_refused(config, pictures):
    with pytest.raises(DmlError, match="inside its data set"):
        train.train(config, pictures / "run")
    assert not (pictures / "run").exists()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Config(optimizer=Optimizer("adam", momentum=0.9)), True),
        (Config(optimizer=Optimizer("adam")), False),
        (Config(optimizer=Optimizer("sgd", momentum=0.9)), False),
        (
            Config(
                optimizer=Optimizer("adam", momentum=0.9),
                phase=Phase(epochs=1, optimizer={"name": "sgd"}),
            ),
            False,
        ),
    ],
)
def test_a_momentum_that_no_optimiser_uses_is_noted(config, told):
    watch = Watch()
    watch.note = (notes := []).append
    tell_unused(config, watch)
    assert bool(notes) == told
