"""Lance tables."""

import warnings

import numpy as np
import pytest

from retrieval.loading.load import load
from retrieval.loading.sources import locate


def test_lance_tables_are_read(tmp_path, clustered):
    lance, pa = pytest.importorskip("lance"), pytest.importorskip("pyarrow")
    X, labels = clustered
    column = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), X.shape[1])
    table = pa.table({"vector": column, "label": labels})
    lance.write_dataset(table, str(tmp_path / "x.lance"), max_rows_per_file=25)
    found = load(tmp_path / "x.lance").splits["test"]
    np.testing.assert_array_equal(found.vectors, X)
    np.testing.assert_array_equal(found.labels, labels)
    assert locate(tmp_path / "x.lance").files == (tmp_path / "x.lance",)


@pytest.mark.usefixtures("tried")
def test_files_are_tried_without_a_warning_after_lance_was_imported(files):
    pytest.importorskip("lance")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load(files / "a.h5")
    assert told == []
