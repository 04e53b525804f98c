"""ann-benchmarks files against the neighbours that they list."""

import json

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.neighbors import NearestNeighbors

from cli import main
from retrieval import ground_truth
from retrieval.errors import DmlError
from retrieval.evaluation import Settings
from retrieval.ground_truth import agreement
from retrieval.loading.load import load

RNG = np.random.default_rng(0)
TRAIN, TEST = (RNG.standard_normal((n, 8)).astype(np.float32) for n in (500, 40))


def nearest(metric, k=20):
    return (
        NearestNeighbors(n_neighbors=k, metric=metric, algorithm="brute")
        .fit(TRAIN)
        .kneighbors(TEST)
    )


def save(path, neighbours, distance="angular", train=TRAIN):
    with h5py.File(path, "w") as file:
        file["train"], file["test"], file["neighbors"] = train, TEST, neighbours
        file["distances"] = np.zeros(np.shape(neighbours), np.float32)
        file.attrs["distance"] = distance
    return path


@pytest.mark.parametrize(
    ("name", "metric", "own"), [("angular", "cosine", "cos"), ("euclidean", "euclidean", "l2")]
)
def test_true_neighbours_agree_by_their_own_distance_and_not_by_the_other(
    tmp_path, name, metric, own
):
    data = load(save(tmp_path / "x.hdf5", nearest(metric)[1].astype(np.int32), name))
    assert data.has_only_neighbours
    result = agreement(data, Settings(recall_at=(1, 10, 20)))
    assert result["distance"] == own
    assert result["distances"][own]["recall"] == {"1": 1.0, "10": 1.0, "20": 1.0}
    other = "l2" if own == "cos" else "cos"
    exact = nearest("euclidean" if other == "l2" else "cosine")[1]
    ours = nearest(metric)[1]
    for k in (1, 10, 20):
        wanted = np.mean([len({*a[:k]} & {*b[:k]}) / k for a, b in zip(ours, exact, strict=True)])
        assert result["distances"][other]["recall"][str(k)] == pytest.approx(wanted)


def test_wrong_and_repeated_neighbours_count_against_the_lists(tmp_path):
    lists = nearest("cosine")[1]
    lists[:10, 0] = 499 - lists[:10, 19]
    lists[10:20, 1:3] = lists[10:20, :1]
    data = load(save(tmp_path / "x.hdf5", lists))
    recall = agreement(data, Settings(recall_at=(1, 2, 3)))["distances"]["cos"]["recall"]
    assert recall["1"] == pytest.approx(30 / 40, abs=0.03)
    assert recall["2"] == pytest.approx((40 - 5 - 5) / 40, abs=0.03)
    assert recall["3"] == pytest.approx((120 - 10 - 20) / 120, abs=0.03)


def test_a_tie_with_the_last_neighbour_counts(tmp_path):
    train = np.repeat(TRAIN[:50], 3, axis=0)
    first = NearestNeighbors(n_neighbors=1, metric="cosine").fit(train).kneighbors(TEST)[1] // 3 * 3
    data = load(save(tmp_path / "x.hdf5", first + 2, train=train))
    recall = agreement(data, Settings(recall_at=(1,), distances=("cos",)))["distances"]["cos"]
    assert recall == {"recall": {"1": 1.0}}


def test_the_cosine_of_a_row_of_zeros_is_0(tmp_path):
    """Beside an item at an angle of 80 degrees, the row of zeros is not the nearest one."""
    train = np.array([[0, 0], [np.cos(1.4), np.sin(1.4)]], np.float32)
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["train"], file["test"] = train, np.array([[2, 0]], np.float32)
        file["neighbors"], file["distances"] = [[0]], np.zeros((1, 1))
        file.attrs["distance"] = "angular"
    recall = agreement(load(tmp_path / "x.hdf5"), Settings(recall_at=(1,), distances=("cos",)))
    assert recall["distances"]["cos"] == {"recall": {"1": 0.0}}


def test_rows_with_nan_are_left_out_of_queries_and_lists_on_request(tmp_path):
    lists, train = nearest("cosine")[1], TRAIN.copy()
    train[lists[5, 0]] = np.nan  # the file lists it first for query 5
    path = save(tmp_path / "x.hdf5", lists, train=train)
    with h5py.File(path, "r+") as file:
        file["test"][3, 0] = np.inf
    found = CliRunner().invoke(main, ["eval", str(path)])
    assert "x.hdf5: 1 of 40 embeddings holds NaN or Inf (row 3, counted from 0)" in found.stderr
    arguments = ["eval", str(path), "--drop-nonfinite", "--recall-at", "1"]
    found = CliRunner().invoke(main, arguments)
    assert "rows with NaN or Inf, left out: 2" in found.stderr
    result = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert (result["queries"], result["gallery"]) == (39, 499)
    assert result["checks"] == {"nonfinite_rows": 2}
    left = np.delete(lists[:, 0], 3) != lists[5, 0]  # first of its list, and still there
    assert result["distances"]["cos"]["recall"]["1"] == pytest.approx(left.mean())


def test_eval_of_an_ann_benchmarks_file(tmp_path):
    path = save(tmp_path / "x.hdf5", nearest("cosine")[1])
    found = CliRunner().invoke(main, ["eval", str(path), "--recall-at", "1,10"])
    assert found.exit_code == 0, found.output
    assert "cos (the file's own)" in found.stdout
    assert "100.00" in found.stdout
    assert "vectors from test" in found.stderr
    found = CliRunner().invoke(main, ["eval", str(path), "--json", "--queries", "7"])
    result = json.loads(found.stdout)
    assert result["queries"] == 7
    assert set(result["distances"]["cos"]["recall"].values()) == {1.0}  # of their own lists
    lists = nearest("cosine")[1][:, ::-1]
    save(path, lists)
    found = CliRunner().invoke(main, ["eval", str(path)])
    assert "not those of exact search by cos" in found.stderr
    found = CliRunner().invoke(main, ["eval", str(path), "--recall-at", "21"])
    assert "lists 20 neighbours" in found.stderr


@pytest.mark.parametrize("bad", [[[500]] * 40, [[-1]] * 40, [[0]] * 39, [0] * 40, [[0.5]] * 40])
def test_neighbours_that_are_no_rows_are_an_error(tmp_path, bad):
    with pytest.raises(DmlError, match="neighbors has shape"):
        load(save(tmp_path / "x.hdf5", bad))


def test_a_file_that_changes_while_its_lists_are_compared_is_an_error(tmp_path, monkeypatch):
    path = save(tmp_path / "x.hdf5", nearest("cosine")[1])

    def change(*args, **options):
        found = agreement(*args, **options)
        with path.open("ab") as file:
            file.write(b"more")
        return found

    monkeypatch.setattr(ground_truth, "agreement", change)
    found = CliRunner().invoke(main, ["eval", str(path)])
    assert found.exit_code == 1
    assert "was changed while it was read" in found.stderr
    assert "Recall" not in found.stdout
