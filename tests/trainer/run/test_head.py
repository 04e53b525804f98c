"""H(Y) - CE by the head of a run, against loops over float64 numbers."""

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from retrieval.embeddings import Embeddings, Split
from retrieval.errors import DmlError
from retrieval.files import sha256
from retrieval.inspection import inspect, with_entropy
from retrieval.tables import inspection_table
from tests.trainer.small import small_config
from trainer.config import Loss
from trainer.run import checkpoint, train
from trainer.run.head import head_information, load_head, with_head


@pytest.fixture(scope="module", params=[0.0, 4.0])
def run(request, pictures, tmp_path_factory):
    """The folder of a run, to read only."""
    config = small_config(pictures)
    config = replace(
        config,
        loss=Loss("ce", length=request.param),
        schedule=replace(config.schedule, epochs=1),
    )
    folder = tmp_path_factory.mktemp("head") / "run"
    train.train(config, folder, test=False)
    return folder


def embeddings(labels, label_names=None, dim=None, attrs=None):
    vectors = np.random.default_rng(1).standard_normal((len(labels), dim)).astype(np.float32)
    split = Split(vectors, np.asarray(labels))
    return Embeddings(
        Path("x.h5"), "h5", {"train": split}, label_names=label_names, attrs=attrs or {}
    )


def loop_cross_entropy(rows, targets, weight, bias, length):
    total = 0.0
    for row, y in zip(rows, targets, strict=True):
        if length:
            row = [length * x / math.hypot(*row) for x in row]
        logits = [
            sum(w * x for w, x in zip(weights, row, strict=True)) + b
            for weights, b in zip(weight, bias, strict=True)
        ]
        total += math.log(sum(math.exp(v) for v in logits)) - logits[y]
    return total / len(rows)


def test_cross_entropy_is_that_of_the_head_on_the_classes_it_knows(run):
    state = checkpoint.load(run / "best.pt")
    names, weight = state["label_names"], state["loss"]["head.weight"].double()
    length = state["config"]["loss"]["length"]
    labels = [names[2], "never seen", names[0], names[2], names[5], "never seen", names[0]]
    data = embeddings(labels, dim=weight.shape[1])
    found = head_information(load_head(run), data, data.splits["train"])
    known = [i for i, name in enumerate(labels) if name in names]
    rows = data.splits["train"].vectors[known].astype(float).tolist()
    bias = state["loss"]["head.bias"].double().tolist()
    targets = [names.index(labels[i]) for i in known]
    expected = loop_cross_entropy(rows, targets, weight.tolist(), bias, length)
    assert found["rows"] == 5
    assert found["cross_entropy"] == pytest.approx(expected, rel=1e-10)
    shares = (2 / 5, 2 / 5, 1 / 5)
    entropy = -sum(p * math.log(p) for p in shares)
    assert found["label_entropy"] == pytest.approx(entropy)
    assert found["difference"] == pytest.approx(entropy - expected, rel=1e-9)


def test_numbers_are_looked_up_in_the_names_of_the_file(run):
    names = checkpoint.load(run / "best.pt")["label_names"]
    dim = load_head(run).weight.shape[1]
    text = embeddings([names[1], names[3], names[1]], dim=dim)
    file_names = np.array(["other", names[3], names[1]])
    numbers = embeddings([2, 1, 2], file_names, dim=dim)
    head = load_head(run)
    one, other = (head_information(head, data, data.splits["train"]) for data in (text, numbers))
    assert one == other


def test_splits_of_unseen_classes_have_no_cross_entropy_and_a_note(run):
    data = embeddings(["x", "y", "x"], dim=load_head(run).weight.shape[1])
    result = with_head(with_entropy(inspect(data), data), data, run)
    assert result["splits"]["train"]["entropy"]["head"] is None
    assert "none of its classes" in result["notes"][0]
    partly = embeddings(["x", load_head(run).classes[0], "y"], dim=load_head(run).weight.shape[1])
    result = with_head(with_entropy(inspect(partly), partly), partly, run)
    assert result["splits"]["train"]["entropy"]["head"]["rows"] == 1
    assert "1 of 3 rows" in result["notes"][0]


def test_a_head_of_another_checkpoint_than_the_embeddings_gets_a_note(run):
    head = load_head(run)
    for written, notes in ((sha256(run / "best.pt"), 0), ("0" * 64, 1)):
        attrs = {"checkpoint_sha256": written}
        data = embeddings(head.classes[:3], dim=head.weight.shape[1], attrs=attrs)
        for named in (run, run / "best.pt"):
            result = with_head(with_entropy(inspect(data), data), data, named)
            assert [
                f"another checkpoint than {run / 'best.pt'}; name the run" in note
                for note in result["notes"]
            ] == [True] * notes


def test_rows_that_are_not_finite_are_left_out_and_counted(run):
    head = load_head(run)
    labels = [head.classes[k] for k in (0, 1, 1, 2)]
    whole = embeddings(["x", *labels], dim=head.weight.shape[1])
    vectors = whole.splits["train"].vectors
    expected = head_information(head, whole, whole.splits["train"])
    broken = np.vstack([vectors, np.full((1, vectors.shape[1]), 0.5, np.float32)])
    broken[-1, 1] = np.nan
    data = replace(whole, splits={"train": Split(broken, np.array(["x", *labels, labels[0]]))})
    result = with_head(with_entropy(inspect(data), data), data, run)
    found = result["splits"]["train"]["entropy"]["head"]
    assert found == expected
    assert found["rows"] == 4
    assert "4 of 6 rows" in result["notes"][-1]
    assert "NaN or Inf, left out: 1" in result["notes"][-1]
    nothing = replace(whole, splits={"train": Split(broken[-1:], np.array(labels[:1]))})
    result = with_head(with_entropy(inspect(nothing), nothing), nothing, run)
    assert result["splits"]["train"]["entropy"]["head"] is None
    assert "NaN or Inf, left out: 1" in result["notes"][-1]


def test_the_rows_of_the_table_subtract(run):
    head = load_head(run)
    labels = ["x", "y", "z", *(head.classes[k] for k in (0, 1, 1, 2))]
    data = embeddings(labels, dim=head.weight.shape[1])
    result = with_head(with_entropy(inspect(data), data), data, run)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(inspection_table(result))
    shown = {}
    for line in console.export_text().splitlines():
        title, _, value = line.strip().rpartition("  ")
        if title.strip().startswith(("H(Y)", "CE")):
            shown[title.strip()] = float(value)
    assert shown["H(Y)"] == pytest.approx(5 / 7 * math.log(7) - 2 / 7 * math.log(2 / 7), abs=1e-4)
    known = shown["H(Y), head's classes"]
    assert known == pytest.approx(-0.5 * math.log(0.25) - 0.5 * math.log(0.5), abs=1e-4)
    assert shown["H(Y) - CE"] == pytest.approx(known - shown["CE of the head"], abs=2e-4)


def test_what_a_head_cannot_be_applied_to_is_an_error(run):
    head = load_head(run)
    dim = head.weight.shape[1]
    other = embeddings(["x", "y"], dim=dim + 1)
    with pytest.raises(DmlError, match="dimensions"):
        head_information(head, other, other.splits["train"])
    unit = embeddings([head.classes[0]] * 2, dim=dim, attrs={"normalized": True})
    if head.length:
        assert head_information(head, unit, unit.splits["train"])["rows"] == 2
    else:
        with pytest.raises(DmlError, match="scaled to length 1"):
            head_information(head, unit, unit.splits["train"])


def test_a_run_without_a_head_is_named(run, tmp_path):
    state = checkpoint.load(run / "best.pt")
    state["loss"] = {}
    torch.save(state, tmp_path / "best.pt")
    with pytest.raises(DmlError) as caught:
        load_head(tmp_path / "best.pt")
    assert "ce, pce, group, center" in caught.value.why
