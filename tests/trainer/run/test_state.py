"""What a checkpoint keeps of a run."""

from dataclasses import replace

import numpy as np
import torch

from trainer.data.datasets.records import DataSet, FileReader
from trainer.run import checkpoint, state


def data_set(root):
    labels, splits = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1], np.int8)
    return DataSet("x", root, ("a", "b", "c", "d"), labels, ("u", "v"), splits, FileReader("/"))


def test_the_fingerprint_of_a_data_set_is_of_its_columns_and_not_of_its_place(tmp_path):
    data = data_set(tmp_path)
    assert state.fingerprint(data) == state.fingerprint(data_set(tmp_path / "elsewhere"))
    others = [
        replace(data, paths=("a", "b", "c", "e")),
        replace(data, label_names=("u", "w")),
        replace(data, labels=np.array([0, 1, 1, 1])),
        replace(data, splits=np.array([0, 0, 0, 1], np.int8)),
    ]
    assert len({state.fingerprint(each) for each in (data, *others)}) == 5


def test_a_checkpoint_keeps_what_the_preprocessing_of_images_needs(config, finished):
    saved = checkpoint.load(finished)
    expected = state.preprocessing(config)
    assert expected.items() <= saved["preprocessing"].items()
    assert {"mean", "std"} <= saved["preprocessing"].keys()
    assert saved["threads"] == torch.get_num_threads()
    assert saved["epoch"] == config.schedule.epochs
