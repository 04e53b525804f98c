"""Files behind addresses: which are taken, and how copies of them are kept. fsspec's memory is the
server."""

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval import evaluate
from retrieval.console import next_step
from retrieval.errors import DmlError
from retrieval.formats.hdf5.writing import write
from retrieval.loading import load
from retrieval.remote.address import parse, without_secrets
from retrieval.remote.cache import Entry
from retrieval.remote.store import Found, Store
from retrieval.sources import Sources, locate
from tests.conftest import call
from tests.retrieval.remote.conftest import npy


@pytest.fixture
def shards(server, clustered):
    """60 vectors and labels in shards whose names sort otherwise than their numbers."""
    X, labels = clustered
    for n, name in ((0, "2"), (20, "9"), (40, "10")):
        server.pipe(f"/b/x/part-{name}.npy", npy(X[n : n + 20]))
        server.pipe(f"/b/y/part-{name}.txt.gz", gzip.compress(lines(labels[n : n + 20])))
    server.pipe("/b/x/_SUCCESS", b"")
    return X, labels


def lines(labels):
    return "\n".join(map(str, labels)).encode()


def test_patterns_and_folders_behind_addresses_have_the_scores_of_one_file(shards):
    X, labels = shards
    wanted = evaluate(X, labels, nmi=False)["distances"]
    for name in ("memory://b/x/*.npy", "memory://b/x"):
        found = evaluate(name, labels="memory://b/y/part-*.txt.gz", nmi=False)
        assert found["distances"] == wanted


def test_results_and_notes_name_the_address_and_not_the_copy(shards, folder):
    out = call("eval", "memory://b/x", "--labels", "memory://b/y/*.gz", "--no-nmi", "--json")
    source = json.loads(out.stdout)["source"]
    assert source["file"] == "memory://b/x"
    assert source["taken"]["test"] == {"labels": "memory://b/y/*.gz"}
    assert str(folder) not in out.output


def test_a_key_a_run_folder_and_a_gallery_are_found_behind_addresses(server, clustered, tmp_path):
    X, labels = clustered
    np.savez(tmp_path / "x.npz", a=X, b=2 * X, y=labels)
    server.put(str(tmp_path / "x.npz"), "/b/x.npz")
    np.testing.assert_array_equal(load("memory://b/x.npz::b").splits["test"].vectors, 2 * X)
    write(tmp_path / "run.h5", {"test": load(tmp_path / "x.npz::a,y").splits["test"]})
    server.put(str(tmp_path / "run.h5"), "/run/embeddings.h5")
    server.pipe("/run/config.toml", b"")
    assert load("memory://run").source == "memory://run/embeddings.h5"
    both = load("memory://b/x.npz::a,y", gallery="memory://run")
    assert len(both.splits["gallery"].vectors) == 60


def test_the_pair_of_the_projector_and_a_hugging_face_folder_are_found(server, clustered):
    pa = pytest.importorskip("pyarrow")
    X, labels = clustered
    server.pipe("/p/vectors.tsv", "\n".join("\t".join(map(str, row)) for row in X).encode())
    server.pipe("/p/metadata.tsv", lines(labels))
    np.testing.assert_array_equal(load("memory://p").splits["test"].labels, labels)
    table = pa.table({"embedding": list(X), "label": labels})
    for split in ("test", "train"):
        out = io.BytesIO()
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
        server.pipe(f"/hf/{split}/data-0.arrow", out.getvalue())
        state = {"_data_files": [{"filename": "data-0.arrow"}]}
        server.pipe(f"/hf/{split}/state.json", json.dumps(state).encode())
    server.pipe("/hf/dataset_dict.json", b'{"splits": ["train", "test"]}')
    found = load("memory://hf").splits
    assert set(found) == {"train", "test"}
    np.testing.assert_array_equal(found["test"].vectors, X)
    server.rm("/hf/test/data-0.arrow")
    with pytest.raises(DmlError, match=r"hf lists test/data-0\.arrow, which is not there"):
        load("memory://hf")


@pytest.fixture
def downloads(monkeypatch):
    """The files that were downloaded."""
    found, real = [], Store.download

    def download(self, file, *args):
        found.append(file.name)
        return real(self, file, *args)

    monkeypatch.setattr(Store, "download", download)
    return found


def test_files_of_train_are_downloaded_only_if_they_are_read_and_then_kept(
    server, downloads, clustered
):
    X, _ = clustered
    for n, name in ((0, "train"), (20, "test")):
        server.pipe(f"/b/{name}-0.npy", npy(X[n : n + 20]))
        server.pipe(f"/b/{name}/0.npy", npy(X[n : n + 20]))
    for name in ("memory://b", "memory://b/*.npy", "memory://b/**/0.npy"):
        found = load(name, train=False).splits
        np.testing.assert_array_equal(found["test"].vectors, X[20:40])
    assert downloads == ["test-0.npy", "test-0.npy", "test/0.npy"]
    assert set(load("memory://b").splits) == {"train", "test"}
    load("memory://b", train=False)
    (copy,) = Sources("memory://b", train=False).files
    assert copy.with_name("train-0.npy").exists()


def test_all_files_of_a_set_of_labels_are_downloaded_whatever_their_names(
    server, downloads, clustered
):
    X, labels = clustered
    for n, name in ((0, "train"), (20, "test")):
        server.pipe(f"/b/y/{name}-0.npy", npy(labels[n : n + 20]))
    server.pipe("/all.npy", npy(X[:40]))
    found = load("memory://all.npy", labels="memory://b/y", train=False).splits["test"]
    assert found.labels.tolist() == [*labels[20:40], *labels[:20]]
    assert sorted(downloads) == ["all.npy", "test-0.npy", "train-0.npy"]
    out = call("eval", "memory://all.npy", "--labels", "memory://b/y", "--no-nmi")
    assert out.exit_code == 0, out.output
    both = Sources("memory://b/y::a", labels=["memory://b/y::b"], train=False)
    assert [len(place.files) for place in both.places.values()] == [2, 2]


def test_files_of_train_are_left_out_only_if_the_others_mean_the_same_without_them(
    server, clustered, tmp_path
):
    for name in ("test/query-0", "test/gallery-0", "train/0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / f"{name}.npy", clustered[0])
    server.put(str(tmp_path / "t*"), "/b", recursive=True)
    for where in (tmp_path, "memory://b"):
        assert list(load(f"{where}/**/*.npy", train=False).splits) == ["test"]


def test_a_file_is_downloaded_again_only_if_it_has_changed(server, downloads):
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    for _ in range(2):
        load("memory://b/x.npy")
    assert downloads == ["x.npy"]
    server.pipe("/b/x.npy", npy(np.zeros((2, 2))))
    assert not load("memory://b/x.npy").splits["test"].vectors.any()
    assert downloads == ["x.npy"] * 2


def test_of_files_that_are_up_to_date_only_the_version_is_read_once(server, monkeypatch):
    for n in range(3):
        server.pipe(f"/b/{n}.npy", npy(np.ones((2, 2))))
    locate("memory://b")
    real, read = Path.read_text, []

    def read_text(self, *args, **options):
        read.append(self.name)
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(Entry, "_clear_way", None)
    locate("memory://b")
    assert read == ["0.npy", "1.npy", "2.npy"]


def test_a_file_without_a_version_is_downloaded_each_time(server, downloads, monkeypatch):
    monkeypatch.setattr("retrieval.remote.store.VERSIONS", ())
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    for _ in range(2):
        load("memory://b/x.npy")
    assert downloads == ["x.npy"] * 2


def test_a_file_without_a_version_is_evaluated_and_a_change_of_it_noticed(server, monkeypatch):
    monkeypatch.setattr("retrieval.remote.store.VERSIONS", ())
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    sources = Sources("memory://b/x.npy")
    load("memory://b/x.npy")
    sources.check_unchanged()
    server.pipe("/b/x.npy", npy(np.zeros((2, 2))))
    load("memory://b/x.npy")
    with pytest.raises(DmlError, match=r"memory://b/x\.npy was changed while it was read"):
        sources.check_unchanged()


def test_a_change_between_two_looks_is_noticed(server):
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    sources = Sources("memory://b/x.npy")
    server.pipe("/b/x.npy", npy(np.zeros((3, 2))))
    load("memory://b/x.npy")
    with pytest.raises(DmlError, match=r"memory://b/x\.npy was changed while it was read"):
        sources.check_unchanged()


def test_copies_of_files_that_are_gone_are_removed(server):
    for n in (1, 2):
        server.pipe(f"/b/{n}.npy", npy(np.ones((1, 2))))
    (copy, gone) = locate("memory://b").files
    server.rm("/b/2.npy")
    assert locate("memory://b").files == (copy,)
    assert not gone.exists()


def test_a_transfer_that_is_cut_short_leaves_no_copy(server, folder, monkeypatch):
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    monkeypatch.setattr(
        type(server),
        "get_file",
        lambda self, path, target, **_: Path(target).write_bytes(b"short"),
    )
    with pytest.raises(DmlError, match=r"memory://b/x\.npy was cut short") as error:
        load("memory://b/x.npy")
    assert "5 of 160 bytes" in error.value.why
    assert not list(folder.rglob("*.npy"))


def test_a_transfer_that_breaks_off_is_tried_again(server, monkeypatch):
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    real, failures = type(server).get_file, [ConnectionResetError("reset")] * 2

    def get_file(self, *args, **options):
        if failures:
            raise failures.pop()
        return real(self, *args, **options)

    monkeypatch.setattr(type(server), "get_file", get_file)
    seen = []
    load("memory://b/x.npy", progress=lambda *told: seen.append(told))
    assert seen[-1] == ("downloading x.npy", 160, 160)


def test_a_part_that_breaks_off_is_tried_again(server, monkeypatch):
    server.pipe("/b/x.npy", b"0123456789")
    real, failures = type(server).cat_file, [ConnectionResetError("reset")] * 2

    def cat_file(self, *args, **options):
        if failures:
            raise failures.pop()
        return real(self, *args, **options)

    monkeypatch.setattr(type(server), "cat_file", cat_file)
    store = Store(parse("memory://b/x.npy"))
    assert store.read(store.file(), 2, 5) == b"234"
    failures += [ConnectionResetError("reset")] * 3
    with pytest.raises(DmlError, match=r"memory://b/x\.npy cannot be reached"):
        store.read(store.file(), 2, 5)


@pytest.mark.parametrize("name", ["../x.npy", "a//x.npy", "a/./x.npy", "x\0.npy"])
def test_names_that_lead_out_of_the_cache_are_refused(server, monkeypatch, name):
    there = [{"name": f"/b/{name}", "size": 1, "type": "file"}]
    monkeypatch.setattr(type(server), "ls", lambda *_, **__: there)
    with pytest.raises(DmlError, match="has a file called"):
        Store(parse("memory://b")).below()


PROCESS = """
import fsspec, sys, time
from retrieval.remote.store import Store
from retrieval.sources import locate
fs = fsspec.filesystem("memory")
fs.pipe("/b/x.npy", b"x" * 1000)
fs.store["/b/x.npy"].modified = fs.store["/b/x.npy"].created = __import__("datetime").datetime(
    2020, 1, 1, tzinfo=__import__("datetime").timezone.utc)
real = Store.download
def download(self, *args):
    print("downloads", flush=True)
    time.sleep(1)
    return real(self, *args)
Store.download = download
print(locate("memory://b/x.npy").files[0].stat().st_size)
"""


def test_a_second_process_waits_for_the_download_of_the_first():
    start = [sys.executable, "-c", PROCESS]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "downloads\n"
        second = subprocess.run(start, capture_output=True, text=True, check=True)
        assert first.stdout.read() == second.stdout == "1000\n"


def test_users_passwords_and_queries_are_left_out_whatever_signs_they_have():
    for password in ("secret", "sec/ret", "sec@ret", "sec:ret", "1234/ab"):
        text = f"cannot open postgresql://me:{password}@host/name?password={password} now"
        assert without_secrets(text) == "cannot open postgresql://host/name now"
    assert without_secrets("https://me:1234567/ab@host/x") == "https://host/x"
    assert without_secrets("'https://token@host/x.npy?sig=1'") == "'https://host/x.npy'"
    assert without_secrets("https://host/x?a=b::secret=1::key,y now") == "https://host/x::key,y now"
    assert without_secrets("https://host/x?a=[::1]&b=secret") == "https://host/x"
    paths = ("http://host:80/a@b", "http://[::1]:80/a@b", "hf://datasets/a@b")
    for text in ("http://host:80/x", "s3://b/part-?/x", *paths):
        assert without_secrets(text) == text


def test_the_next_step_names_no_secrets(capsys):
    next_step("report", "https://me:password@host/x.npz?token=1::key", "--labels", "y.txt")
    said = capsys.readouterr().err
    assert said == "Next: dmltool report https://host/x.npz::key --labels y.txt\n"


def test_a_file_that_is_also_a_folder_is_named_and_one_that_becomes_a_folder_is_read(server):
    server.pipe("/b/a.npy", npy(np.ones((2, 2))))
    assert load("memory://b/**/*.npy").splits["test"].vectors.shape == (2, 2)
    both = [Found(f"/b/{name}", name, 1, "1") for name in ("a.npy", "a.npy/b.npy")]
    address = parse("memory://b/**/*.npy")
    with pytest.raises(DmlError, match=r"has a file a\.npy and files below a\.npy/"):
        Entry(Store(address), address.root).fetch(both)
    server.rm("/b/a.npy")
    server.pipe("/b/a.npy/b.npy", npy(np.ones((3, 2))))
    assert load("memory://b/**/*.npy").splits["test"].vectors.shape == (3, 2)


def test_addresses_in_all_their_parts():
    found = parse("https://me:secret@host.org/a/x.npy?token=abc::test/x")
    assert (found.key, found.name, found.shown) == ("test/x", "x.npy", "https://host.org/a/x.npy")
    assert not found.is_pattern
    found = parse("s3://bucket/a/part-?/x*.npy")
    assert found.is_pattern
    assert found.root == "s3://bucket/a"
    assert parse("http://[::1]:80/x.npy").key is None
    assert parse("s3:/bucket/x.npy").url == "s3://bucket/x.npy"  # of Path
    with pytest.raises(DmlError, match=r"file:///x\.npy cannot be opened"):
        parse("file:///x.npy")
