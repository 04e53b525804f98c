"""Files with one JSON object per line."""

import json

import numpy as np
import pytest
from hypothesis import given

from retrieval.errors import DmlError
from retrieval.loading.load import load
from tests.retrieval.formats.samples import ROUND, items


@ROUND
@given(item=items(finite=True))
def test_jsonl_round_trip(tmp_path, item):
    x, y = item
    with (tmp_path / "x.jsonl").open("w") as file:
        for row, label in zip(x, y.tolist(), strict=True):
            numbers = [float(str(value)) for value in row]
            file.write(json.dumps({"embedding": numbers, "label": label}) + "\n")
    found = load(tmp_path / "x.jsonl").splits["test"]
    np.testing.assert_array_equal(found.vectors.astype(x.dtype), x)
    np.testing.assert_array_equal(found.labels, y)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: the line is not valid JSON"),
        ("[1]", "line 2: this is not a JSON object"),
        ('{"e": [1, 2, 3], "label": 1}', "line 2: e is a list of 3"),
        ('{"e": [1, "2"], "label": 1}', "line 2: e holds values that are not numbers"),
        ('{"e": [1, 2]}', "line 2: label is missing"),
        ('{"e": [1, 2], "label": "x"}', "labels of the types int, str"),
    ],
)
def test_jsonl_errors_carry_the_line(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_text('{"e": [1, 2], "label": 1}\n' + line + "\n")
    with pytest.raises(DmlError, match=message):
        load(tmp_path / "x.jsonl")
