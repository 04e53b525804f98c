"""Files of other libraries and layouts: what is found in them, and what is an error."""

import json
import sys

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from retrieval.errors import DmlError
from retrieval.loading import load

X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
Y = np.array([5, 5, 2**53 + 1, 2**53 + 2, 7, 7])
NAMES = np.array(["a", "b", "b", "ü", "a", "c"])


def only(found):
    (split,) = found.splits.values()
    return split


def equal(vectors, wanted):
    # Text is read as float64, where the shortest digits of a float32 name a neighbour of it.
    text = vectors.dtype == np.float64
    np.testing.assert_array_equal(vectors.astype(np.float32) if text else vectors, wanted)


def check(found, y=Y):
    equal(only(found).vectors, X)
    np.testing.assert_array_equal(only(found).labels, y)


def test_ann_benchmarks_train_is_the_gallery_and_test_the_queries(tmp_path):
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["train"], file["test"] = X, X[:2]
        file["neighbors"], file["distances"] = np.zeros((2, 3), int), np.zeros((2, 3))
    np.save(tmp_path / "g.npy", Y)
    (tmp_path / "q.txt").write_text("5\n5\n")
    found = load(tmp_path / "a.hdf5", labels=tmp_path / "q.txt", gallery_labels=tmp_path / "g.npy")
    assert found.format == "ann-benchmarks"
    np.testing.assert_array_equal(found.splits["gallery"].vectors, X)
    np.testing.assert_array_equal(found.splits["query"].vectors, X[:2])
    np.testing.assert_array_equal(found.splits["gallery"].labels, Y)
    np.testing.assert_array_equal(found.splits["query"].labels, [5, 5])


@pytest.mark.parametrize("names", [("X", "y"), ("feats", "targets"), ("foo", "bar")])
def test_npz_of_one_pair_needs_no_key(tmp_path, names):
    np.savez(tmp_path / "x.npz", **{names[0]: X, names[1]: Y, "scale": np.float32(3)})
    check(load(tmp_path / "x.npz"))


def test_well_known_names_win_over_others(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=X, boxes=X * 2, labels=Y, camera=Y * 0)
    check(load(tmp_path / "x.npz"))


@pytest.mark.parametrize("names", ["{}_{}", "{}/{}", "{}.{}"])
@pytest.mark.parametrize("splits", [("query", "gallery"), ("train", "test")])
def test_names_of_splits_are_recognised(tmp_path, names, splits):
    file = {}
    for n, split in enumerate(splits):
        file[names.format(split, "embeddings")] = X + n
        file[names.format(split, "labels")] = Y + n
    np.savez(tmp_path / "x.npz", distances=np.zeros((6, 6)), **file)
    found = load(tmp_path / "x.npz")
    assert set(found.splits) == set(splits)
    for n, split in enumerate(splits):
        np.testing.assert_array_equal(found.splits[split].vectors, X + n)
        np.testing.assert_array_equal(found.splits[split].labels, Y + n)


def test_two_possible_vectors_are_an_error_that_lists_them(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["image"], file["caption"], file["y"] = X, X[:, :3], Y
    with pytest.raises(DmlError) as error:
        load(tmp_path / "x.h5")
    assert "(6, 4) float32" in str(error.value)
    assert "caption  (6, 3)" in str(error.value)
    assert "x.h5::" in error.value.fix
    check(load(f"{tmp_path / 'x.h5'}::image"))


def test_two_possible_labels_are_an_error_and_a_key_picks(tmp_path):
    np.savez(tmp_path / "x.npz", emb=X, breed=Y, colour=Y * 0)
    with pytest.raises(DmlError, match="could be the labels"):
        load(tmp_path / "x.npz")
    check(load(f"{tmp_path / 'x.npz'}::emb,breed"))
    check(load(f"{tmp_path / 'x.npz'}::,breed"))
    np.save(tmp_path / "y.npy", Y)
    check(load(tmp_path / "x.npz", labels=tmp_path / "y.npy"))


def test_an_unknown_key_names_the_nearest(tmp_path):
    np.savez(tmp_path / "x.npz", embeddings=X, labels=Y)
    with pytest.raises(DmlError, match="Did you mean embeddings"):
        load(f"{tmp_path / 'x.npz'}::embedings")


def test_groups_and_soft_links_inside_hdf5_are_followed(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["deep/er/vectors"] = X
        file["deep/er/label"] = [name.encode() for name in NAMES]
        file["alias"] = h5py.SoftLink("/deep/er/vectors")
        file["deep/self"] = file["deep"]
    check(load(f"{tmp_path / 'x.h5'}::deep"), NAMES)


def test_big_endian_and_bfloat16_hdf5_are_converted(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=X, dtype=">f4")
        file.create_dataset("y", data=Y, dtype=">i8")
    found = load(tmp_path / "x.h5")
    check(found)
    assert only(found).vectors.dtype.isnative


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint8"])
def test_torch_and_safetensors_dtypes(tmp_path, dtype):
    x = (torch.from_numpy(X) * 20).to(getattr(torch, dtype))
    both = {"embeddings": x, "labels": torch.from_numpy(Y)}
    torch.save(both, tmp_path / "x.pt")
    safetensors.torch.save_file(both, tmp_path / "x.safetensors")
    wanted = x.float().numpy() if dtype == "bfloat16" else x.numpy()
    for name in ("x.pt", "x.safetensors"):
        found = only(load(tmp_path / name))
        np.testing.assert_array_equal(found.vectors, wanted, strict=True)
        np.testing.assert_array_equal(found.labels, Y)


def test_torch_tensor_alone_tuples_and_old_files(tmp_path):
    x, y = torch.from_numpy(X).requires_grad_(), torch.from_numpy(Y)
    torch.save(x, tmp_path / "x.pt")
    torch.save(y, tmp_path / "y.pt")
    check(load(tmp_path / "x.pt", labels=tmp_path / "y.pt"))
    torch.save((x, y), tmp_path / "z.pth")
    check(load(tmp_path / "z.pth"))
    torch.save({"test": {"X": x.T.contiguous().T, "y": list(NAMES.tolist())}}, tmp_path / "d.pt")
    check(load(tmp_path / "d.pt"), NAMES)
    old = tmp_path / "old.pt"
    torch.save({"x": x, "y": y}, old, _use_new_zipfile_serialization=False)
    check(load(old))


def test_ml_dtypes_style_bfloat16_npy(tmp_path):
    bits = (X.view(np.uint32) >> 16).astype(np.uint16)
    np.save(tmp_path / "x.npy", bits.view("V2"))
    found = only(load(tmp_path / "x.npy")).vectors
    np.testing.assert_array_equal(found, (bits.astype(np.uint32) << 16).view(np.float32))


def test_integers_become_float64_only_if_exact(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1, 2**53]]))
    assert only(load(tmp_path / "x.npy")).vectors.dtype == np.float64
    np.save(tmp_path / "x.npy", np.array([[1, 2**53 + 1]]))
    with pytest.raises(DmlError, match="2\\^53"):
        load(tmp_path / "x.npy")


def frame(prefix="f"):
    table = pd.DataFrame(X, columns=[f"{prefix}{n}" for n in range(4)])
    table["label"] = Y
    return table


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("prefix", ["", "f", "emb_"])
@pytest.mark.parametrize(("suffix", "sep"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
def test_pandas_csv(tmp_path, index, prefix, suffix, sep):
    path = tmp_path / f"x.{suffix}"
    frame(prefix).to_csv(path, index=index, sep=sep)
    check(load(path))


@pytest.mark.parametrize("index", [True, False])
def test_pandas_parquet(tmp_path, index):
    table = frame()
    table.index = table.index * 3 + 1
    table["width"] = 3.5
    table.to_parquet(tmp_path / "x.parquet", index=index)
    check(load(tmp_path / "x.parquet"))
    lists = pd.DataFrame({"vec": list(X), "label": pd.Categorical(NAMES), "path": NAMES})
    lists.to_parquet(tmp_path / "y.parquet")
    check(load(tmp_path / "y.parquet"), NAMES)
    np.testing.assert_array_equal(only(load(tmp_path / "y.parquet")).paths, NAMES)


def test_csv_without_header(tmp_path):
    path = tmp_path / "x.csv"
    frame().to_csv(path, index=False, header=False)
    check(load(path))
    table = frame()
    table["label"] = NAMES
    table.to_csv(path, index=False, header=False)
    check(load(path), NAMES)
    np.savetxt(path, X, delimiter=",")
    assert only(load(path)).labels is None
    np.testing.assert_array_equal(only(load(path)).vectors.astype(np.float32), X)


def test_csv_of_lists(tmp_path):
    table = pd.DataFrame({"embedding": [str(row.tolist()) for row in X], "class": NAMES})
    table.to_csv(tmp_path / "x.csv")
    check(load(tmp_path / "x.csv"), NAMES)
    table["embedding"] = [str(row) for row in X.astype(np.float64)]
    table.to_csv(tmp_path / "x.csv")
    np.testing.assert_allclose(only(load(tmp_path / "x.csv")).vectors, X, atol=1e-7)


def test_csv_labels_keep_leading_zeros_and_huge_numbers_apart(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a0,a1,label\n1,2,007\n1,2,7\n")
    assert only(load(path)).labels.tolist() == ["007", "7"]
    path.write_text(f"a0,a1,label\n1,2,{2**63}\n1,2,{2**63 + 1}\n")
    assert only(load(path)).labels.tolist() == [2**63, 2**63 + 1]
    path.write_text("a0,a1,label\n1,2,3.0\n1,2,4.0\n")
    assert only(load(path)).labels.tolist() == [3, 4]


def test_a_split_column_makes_splits(tmp_path):
    table = frame()
    table["split"] = ["query", "gallery", "query", "train", "gallery", "gallery"]
    table["path"] = NAMES
    table.to_csv(tmp_path / "x.csv", index=False)
    table.to_parquet(tmp_path / "x.parquet")
    with (tmp_path / "x.jsonl").open("w") as file:
        for n, row in table.iterrows():
            record = {"vector": X[n].tolist(), "label": int(row.label), "path": row.path}
            file.write(json.dumps({**record, "split": row.split}) + "\n")
    for suffix in ("csv", "parquet", "jsonl"):
        found = load(tmp_path / f"x.{suffix}").splits
        assert set(found) == {"query", "gallery", "train"}
        equal(found["gallery"].vectors, X[[1, 4, 5]])
        np.testing.assert_array_equal(found["query"].labels, Y[[0, 2]])
        np.testing.assert_array_equal(found["query"].paths, NAMES[[0, 2]])


def test_an_unknown_split_is_an_error(tmp_path):
    (tmp_path / "x.csv").write_text("f0,f1,label,split\n1,2,3,tset\n1,2,3,test\n")
    with pytest.raises(DmlError, match="tset"):
        load(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f0,f1,label\n1,2,a\n1,x,a\n", "line 3, column 2"),
        ("f0,f1,label\n1,2,a\n1,2\n", "line 3: there are 2 cells"),
        ("f0,f1,label\n1,2,a\n1,2,\n", "line 3: the label is empty"),
        ("e,label\n[1 2],a\n[1 2 3],b\n", "line 3: the vector has 3 numbers"),
        ("f0,f1,label\n", "no rows"),
        ("\n\n", "no rows"),
    ],
)
def test_csv_errors_carry_the_line(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DmlError, match=message):
        load(tmp_path / "x.csv")


def test_csv_error_far_down_carries_the_line(tmp_path):
    lines = ["f0,f1,label", *["0.5,0.25,3"] * 5000]
    lines[4321] = "0.5,oops,3"
    (tmp_path / "x.csv").write_text("\n".join(lines))
    with pytest.raises(DmlError, match=r"line 4322, column 2 \(f1\): 'oops'"):
        load(tmp_path / "x.csv")


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


def test_parquet_nulls_and_ragged_rows_are_errors(tmp_path):
    for column, message in (([[1.0, 2.0], None], "row 1.*null"), ([[1.0], [1.0, 2.0]], "row 1")):
        pq.write_table(pa.table({"e": column, "label": [1, 2]}), tmp_path / "x.parquet")
        with pytest.raises(DmlError, match=message):
            load(tmp_path / "x.parquet")
    pq.write_table(pa.table({"e": [[1.0], [2.0]], "label": [1, None]}), tmp_path / "x.parquet")
    with pytest.raises(DmlError, match="empty cells"):
        load(tmp_path / "x.parquet")


def label_files(tmp_path):
    np.save(tmp_path / "y.npy", Y.reshape(-1, 1))
    np.savez(tmp_path / "y.npz", Y)
    (tmp_path / "y.txt").write_text("\n".join(map(str, Y)) + "\n\n")
    (tmp_path / "y.json").write_text(json.dumps(Y.tolist()))
    pd.DataFrame({"label": Y, "image": NAMES}).to_csv(tmp_path / "y.csv")
    pd.DataFrame({"anything": Y}).to_csv(tmp_path / "y.tsv", index=False, sep="\t")
    pd.DataFrame({"label": Y}).to_parquet(tmp_path / "y.parquet")
    (tmp_path / "y.jsonl").write_text("".join(f'{{"label": {y}}}\n' for y in Y))
    torch.save(torch.from_numpy(Y), tmp_path / "y.pt")
    safetensors.torch.save_file({"y": torch.from_numpy(Y)}, tmp_path / "y.safetensors")
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["a"], file["labels"] = Y * 0, Y
    return sorted(tmp_path.glob("y.*"))


def test_labels_come_from_files_of_any_format(tmp_path):
    np.save(tmp_path / "x.npy", X)
    files = label_files(tmp_path)
    assert len(files) == 11
    for file in files:
        check(load(tmp_path / "x.npy", labels=file))
    check(load(tmp_path / "x.npy", labels=f"{tmp_path / 'y.h5'}::a"), Y * 0)
    rows = np.array([[1, label % 1000] for label in Y], "<i4")
    rows.tofile(tmp_path / "z.ivecs")
    check(load(tmp_path / "x.npy", labels=tmp_path / "z.ivecs"), Y % 1000)


def test_text_labels_from_lines(tmp_path):
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "y.txt").write_text("\n".join(NAMES), encoding="utf-8")
    check(load(tmp_path / "x.npy", labels=tmp_path / "y.txt"), NAMES)
    (tmp_path / "y.csv").write_text("\n".join(NAMES), encoding="utf-8")
    check(load(tmp_path / "x.npy", labels=tmp_path / "y.csv"), NAMES)
    (tmp_path / "y.txt").write_text("a\n\nb\n")
    with pytest.raises(DmlError, match="line 2: the label is empty"):
        load(tmp_path / "x.npy", labels=tmp_path / "y.txt")


@pytest.mark.parametrize("bad", [0.5, np.nan, np.inf, 2.0**53 + 2])
def test_float_labels_must_be_whole_and_exact(tmp_path, bad):
    np.savez(tmp_path / "x.npz", x=X, y=np.array([1.0, 2, 3, 4, 5, 6]))
    check(load(tmp_path / "x.npz"), [1, 2, 3, 4, 5, 6])
    np.savez(tmp_path / "x.npz", x=X, y=np.array([1.0, 2, 3, 4, 5, bad]))
    with pytest.raises(DmlError, match="row 5"):
        load(tmp_path / "x.npz")


def test_float32_labels_beyond_their_precision_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", x=X, y=np.full(6, 2.0**24 + 2, np.float32))
    with pytest.raises(DmlError, match="16777216"):
        load(tmp_path / "x.npz")


@pytest.mark.parametrize(("library", "file"), [("pyarrow", "x.parquet"), ("torch", "x.pt")])
def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, library, file):
    (tmp_path / file).write_bytes(b"whatever")
    monkeypatch.delitem(sys.modules, "retrieval.formats.arrow", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DmlError, match="pip install"):
        load(tmp_path / file)
