"""Files on servers: listed and downloaded, and what a server refuses.

The servers are fsspec's memory, web servers of Python, and moto for S3, all on this machine. The
tests of S3 need s3fs and moto: pip install "moto[server]"
"""

import gzip
import importlib
import io
import logging
import os
import subprocess
import sys
import threading
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.hdf5.writing import write
from retrieval.loading.load import load
from retrieval.loading.sources import locate
from retrieval.remote import cache_limit, ranges
from retrieval.remote.address import parse
from retrieval.remote.store import Store
from tests.buckets import empty_bucket
from tests.retrieval.remote.copies import npy
from tests.retrieval.remote.servers import Service, listening


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


ENCODINGS = {".gz": "gzip", ".zst": "zstd", ".csv": "gzip"}


def write_compressed(folder):
    """Vectors in a file and in shards, labels, and a pair of the projector, by gzip and zstd."""
    pa = pytest.importorskip("pyarrow")
    for suffix in (".gz", ".zst"):
        pack = (
            gzip.compress if suffix == ".gz" else partial(pa.compress, codec="zstd", asbytes=True)
        )
        files = {f"shards-{suffix[1:]}/part-{n}.npy": npy(np.full((2, 3), n)) for n in (2, 10)}
        files |= {
            f"pair-{suffix[1:]}/vectors.tsv": b"0.5\t2\n3\t4\n",
            "x.npy": npy(np.ones((2, 3))),
        }
        files |= {f"pair-{suffix[1:]}/metadata.tsv": b"a\nb\n", "y.txt": b"a\nb\n"}
        for name, content in files.items():
            path = folder / f"{name}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pack(content))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder, its address, and the requests that came.

    Files below encoded/ are sent with the Content-Encoding of their suffix.
    """
    pytest.importorskip("aiohttp")
    root, requests = tmp_path_factory.mktemp("served"), []

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(root))

        def log_message(self, *_):
            requests.append((self.command, self.path))

        def end_headers(self):
            if "/encoded/" in self.path and (kind := ENCODINGS.get(Path(self.path).suffix)):
                self.send_header("Content-Encoding", kind)
            super().end_headers()

        def do_GET(self):
            if "secret" in self.path and "token=1" not in self.path:
                self.send_error(403)
            elif "failing" in self.path:
                self.send_error(503)
            elif "busy" in self.path:
                self.send_error(429)
            elif "moved" in self.path:
                self.send_response(302)
                self.send_header("Location", "file:///etc/hostname")
                self.end_headers()
            elif "short" in self.path:
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"x" * 10)
            else:
                super().do_GET()

        def do_HEAD(self):
            if "secret" in self.path and "token=1" not in self.path:
                self.send_error(403)
            elif "failing" in self.path:
                self.send_error(503)
            elif "busy" in self.path or "moved" in self.path:
                self.do_GET()
            else:
                super().do_HEAD()

    (root / "x").mkdir()
    for n in (2, 10):
        np.save(root / "x" / f"part-{n}.npy", np.full((2, 3), n, np.float32))
    for name, links in (("sorted", "?C=N;O=D ?C=M;O=A a.npy"), ("twice", "a.npy?v=1 a.npy?v=2")):
        (root / name).mkdir()
        np.save(root / name / "a.npy", np.ones((2, 3)))
        page = "".join(f'<a href="{link}">x</a>' for link in links.split())
        (root / name / "index.html").write_text(page)
    np.save(root / "secret.npy", np.ones((2, 3)))
    (root / "labels.txt").write_text("a\nb\n")
    (root / "short.npy").write_bytes(b"x" * 1000)
    for name in ("plain", "encoded"):
        write_compressed(root / name)
    (root / "encoded" / "x.csv").write_bytes(gzip.compress(b"e0,e1,label\n1,2,a\n3,4,b\n"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
        server.shutdown()


def test_a_file_a_pattern_and_a_folder_are_read(served):
    address, requests = served
    requests.clear()
    for _ in range(2):
        assert load(f"{address}/x/part-2.npy").splits["test"].vectors.shape == (2, 3)
    assert [request for request in requests if request[0] == "GET"] == [("GET", "/x/part-2.npy")]
    for name in ("x/*.npy", "x/"):
        found = load(f"{address}/{name}")
        assert found.splits["test"].vectors[:, 0].tolist() == [2, 2, 10, 10]
        assert found.source == f"{address}/{name}"


def test_links_that_sort_a_listing_are_no_files_and_two_links_of_one_name_are_an_error(served):
    assert load(f"{served[0]}/sorted/").splits["test"].vectors.shape == (2, 3)
    with pytest.raises(DmlError, match=r"several links to a\.npy with different queries"):
        load(f"{served[0]}/twice/")


def test_a_query_is_sent_and_not_recorded(served):
    address, _ = served
    name = f"{address}/secret.npy?token=1"
    found = load(name, labels=name.replace("secret.npy", "labels.txt"))
    assert found.source == f"{address}/secret.npy"
    assert found.splits["test"].taken == {"labels": f"{address}/labels.txt"}


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("root", ["plain", "encoded"])
def test_compressed_files_are_read_with_and_without_content_encoding(served, root, suffix):
    address = f"{served[0]}/{root}"
    found = load(f"{address}/x.npy{suffix}", labels=f"{address}/y.txt{suffix}").splits["test"]
    assert found.vectors.shape == (2, 3)
    assert found.labels.tolist() == ["a", "b"]
    for name in (f"shards-{suffix[1:]}/", f"shards-{suffix[1:]}/*{suffix}"):
        shards = load(f"{address}/{name}").splits["test"]
        assert shards.vectors[:, 0].tolist() == [2, 2, 10, 10]
    pair = load(f"{address}/pair-{suffix[1:]}/").splits["test"]
    assert pair.vectors.tolist() == [[0.5, 2], [3, 4]]
    assert pair.labels.tolist() == ["a", "b"]


def test_a_file_that_the_server_compresses_for_the_transfer_is_inflated(served):
    found = load(f"{served[0]}/encoded/x.csv").splits["test"]
    assert found.vectors.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("name", ["x/*.npy", "x/"])
def test_a_password_is_sent_for_a_folder_and_not_recorded(served, name):
    address = served[0]
    found = load(f"{address.replace('://', '://me:password@')}/{name}")
    assert found.splits["test"].vectors[:, 0].tolist() == [2, 2, 10, 10]
    assert found.source == f"{address}/{name}"


def test_a_query_is_in_no_error(served):
    address, _ = served
    for name in ("secret.npy", "nothing.npy", "failing.npy", "labels.txt"):
        with pytest.raises(DmlError) as error:
            load(f"{address}/x/", labels=f"{address}/{name}?token=password")
        assert "password" not in "".join(map(str, vars(error.value).values()))
    with pytest.raises(DmlError, match=r"ftp://host/x\.npy cannot be opened"):
        load("ftp://me:password@host/x.npy")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nothing.npy", "nothing.npy does not exist"),
        ("secret.npy", "Access to .*secret.npy was refused"),
        ("short.npy", "The download of .*short.npy broke off"),
        ("failing.npy", "The server of .*failing.npy fails"),
        ("busy.npy", "The server of .*busy.npy fails"),
        ("moved.npy", "moved.npy cannot be read"),
    ],
)
def test_what_a_server_refuses_is_named(served, tmp_path, name, what):
    address, _ = served
    with pytest.raises(DmlError, match=what) as error:
        load(f"{address}/{name}")
    assert "FileNotFoundError" not in error.value.why
    assert str(tmp_path) not in str(error.value)
    assert not list(tmp_path.rglob("*.npy"))


def test_a_server_that_is_not_there_is_named():
    pytest.importorskip("aiohttp")
    with pytest.raises(DmlError, match=r"http://127\.0\.0\.1:9/x\.npy cannot be reached") as error:
        load("http://127.0.0.1:9/x.npy")
    assert "network" in error.value.fix
    assert "Cannot connect to host" in error.value.why


# boto's own use of what Python deprecates is not ours to mend.
boto = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def bucket():
    """A bucket with shards and labels."""
    with empty_bucket() as fs:
        for n in (2, 10):
            for kind, array in (("x", np.full((2, 3), n, np.float32)), ("y", np.arange(2))):
                out = io.BytesIO()
                np.save(out, array)
                fs.pipe(f"bucket/{kind}/part-{n}.npy", out.getvalue())
        for name in ("x/", "x/more/"):  # as the web pages of Amazon make a folder
            fs.pipe(f"bucket/{name}", b"")
        yield fs


@boto
@pytest.mark.parametrize("name", ["x/*.npy", "x/**", "x", "x/"])
def test_patterns_and_folders_are_read_with_labels(bucket, name):
    found = load(f"s3://bucket/{name}", labels="s3://bucket/y/part-*.npy").splits["test"]
    assert found.vectors[:, 0].tolist() == [2, 2, 10, 10]
    assert found.labels.tolist() == [0, 1, 0, 1]


@boto
def test_a_new_version_is_noticed_by_its_etag(bucket):
    name = "s3://bucket/new.npy"
    for value in (1, 2):
        out = io.BytesIO()
        np.save(out, np.full((2, 3), value, np.float32))
        bucket.pipe("bucket/new.npy", out.getvalue())
        assert load(name).splits["test"].vectors[0, 0] == value


@boto
def test_a_compressed_file_with_a_content_encoding_is_read(bucket):
    data = gzip.compress(npy(np.ones((2, 3))))
    bucket.pipe("bucket/packed.npy.gz", data, ContentEncoding="gzip")
    assert load("s3://bucket/packed.npy.gz").splits["test"].vectors.shape == (2, 3)


@boto
@pytest.mark.usefixtures("tried")
def test_only_the_split_that_is_scored_is_downloaded(bucket, tmp_path):
    train, test = (np.full((rows, 64), n, np.float32) for n, rows in ((1, 1 << 16), (2, 100)))
    write(tmp_path / "x.h5", {"train": Split(train), "test": Split(test)})
    bucket.put(str(tmp_path / "x.h5"), "bucket/x.h5")
    found = load("s3://bucket/x.h5", train=False).splits["test"].vectors
    np.testing.assert_array_equal(found, test)
    (copy,) = locate("s3://bucket/x.h5").files
    assert cache_limit.on_disk(copy.parent) < copy.stat().st_size / 8


@boto
@pytest.mark.parametrize("name", ["s3://bucket/nothing.npy", "s3://nothing/x.npy"])
def test_a_missing_file_or_bucket_is_named(bucket, name):
    with pytest.raises(DmlError, match=f"{name} does not exist"):
        load(name)


@boto
def test_wrong_credentials_are_named(bucket):
    require_credentials("0")
    try:
        with pytest.raises(DmlError, match=r"Access to s3://bucket/x was refused") as error:
            load("s3://bucket/x")
    finally:
        require_credentials("inf")
    assert "AWS_PROFILE" in error.value.fix


def require_credentials(after: str):
    """Let the server check who asks, after so many requests."""
    address = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    request = urllib.request.Request(address, after.encode(), {"Content-Type": "text/plain"})
    urllib.request.urlopen(request).close()


@boto
def test_an_s3_server_that_is_not_there_is_named(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    type(bucket).clear_instance_cache()
    with pytest.raises(DmlError, match=r"s3://bucket/x\.npy cannot be reached"):
        load("s3://bucket/x.npy")
    type(bucket).clear_instance_cache()


@boto
def test_a_profile_that_is_not_there_is_named(bucket, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    type(bucket).clear_instance_cache()
    try:
        with pytest.raises(DmlError, match="was refused") as error:
            load("s3://bucket/x")
    finally:
        type(bucket).clear_instance_cache()
    assert "nobody" in error.value.why
    assert "AWS_PROFILE" in error.value.fix


@boto
def test_s3_without_credentials_says_how_to_give_them(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "nothing"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    type(bucket).clear_instance_cache()
    require_credentials("0")
    try:
        with pytest.raises(DmlError, match=r"Access to s3://bucket/x was refused") as error:
            load("s3://bucket/x")
    finally:
        require_credentials("inf")
        type(bucket).clear_instance_cache()
    assert "AWS_ACCESS_KEY_ID" in error.value.fix
    assert "FSSPEC_S3_ANON=true" in error.value.fix


# Google Cloud Storage and Hugging Face


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A server with the interfaces of both, which has a small file, a large one and shards."""
    vectors, path = np.full((2, 3), 7.0), tmp_path_factory.mktemp("service") / "x.h5"
    write(path, {"train": Split(np.ones((1 << 17, 3))), "test": Split(vectors)})
    files = {"x.npy": npy(vectors), "x.h5": path.read_bytes()}
    files |= {f"shards/part-{n}.npy": npy(np.full((2, 3), n)) for n in (2, 10)}
    handler = type("Handler", (Service,), {"files": files})
    with listening(handler) as address:
        yield address


@pytest.fixture
def google(service, monkeypatch, tmp_path):
    """gs:// addresses lead to the server; without credentials, which are looked for nowhere."""
    gcsfs = pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", service)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield
    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture
def hugging_face(service, monkeypatch):
    """hf:// addresses lead to the server, as if HF_ENDPOINT had been set before the import."""
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    constants = importlib.import_module("huggingface_hub.constants")
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, service)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", service)
    hub.HfFileSystem.clear_instance_cache()
    yield
    hub.HfFileSystem.clear_instance_cache()


SERVICES = [("google", "gs://bucket"), ("hugging_face", "hf://datasets/name/set")]


@pytest.mark.parametrize(("fixture", "root"), SERVICES)
def test_a_file_of_a_service_is_read_and_kept(fixture, root, request, downloads):
    request.getfixturevalue(fixture)
    for _ in range(2):
        found = load(f"{root}/x.npy")
        np.testing.assert_array_equal(found.splits["test"].vectors, np.full((2, 3), 7.0))
        assert found.source == f"{root}/x.npy"
    assert downloads == ["x.npy"]


@pytest.mark.parametrize("name", ["shards/*.npy", "shards", "shards/"])
@pytest.mark.parametrize(("fixture", "root"), SERVICES)
def test_patterns_and_folders_of_a_service_are_read(fixture, root, name, request):
    request.getfixturevalue(fixture)
    found = load(f"{root}/{name}").splits["test"].vectors
    assert found[:, 0].tolist() == [2, 2, 10, 10]


@pytest.mark.usefixtures("tried")
@pytest.mark.parametrize(("fixture", "root"), SERVICES)
def test_a_large_file_of_a_service_is_downloaded_in_parts(fixture, root, request, monkeypatch):
    request.getfixturevalue(fixture)
    for name in ("BLOCK", "LEAST", "PIECE"):
        monkeypatch.setattr(ranges, name, getattr(ranges, name) // 16)
    found = load(f"{root}/x.h5", train=False).splits["test"].vectors
    np.testing.assert_array_equal(found, np.full((2, 3), 7.0))
    (copy,) = locate(f"{root}/x.h5").files
    assert cache_limit.on_disk(copy.parent) < copy.stat().st_size / 8


@pytest.mark.parametrize("status", ["401", "403"])
@pytest.mark.parametrize(
    ("fixture", "root", "fix"),
    [
        ("google", "gs://", "gcloud auth application-default login"),
        ("hugging_face", "hf://datasets/name/", "hf auth login"),
    ],
)
def test_a_service_that_refuses_access_says_how_to_log_in(fixture, root, fix, status, request):
    request.getfixturevalue(fixture)
    with pytest.raises(DmlError, match=f"Access to {root}{status}/x.npy was refused") as error:
        load(f"{root}{status}/x.npy")
    assert fix in error.value.fix


@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        ("google", "gs://404/x.npy"),
        ("hugging_face", "hf://datasets/name/404/x.npy"),
        *((fixture, f"{root}/nothing.npy") for fixture, root in SERVICES),
    ],
)
def test_a_file_that_a_service_does_not_have_is_named(fixture, name, request):
    request.getfixturevalue(fixture)
    with pytest.raises(DmlError, match=f"{name} does not exist"):
        load(name)


@pytest.mark.usefixtures("google")
def test_what_a_library_logs_is_not_printed_beside_the_error(monkeypatch, capsys):
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest
    with pytest.raises(DmlError, match="refused"):
        load("gs://401/x.npy")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("google")
def test_what_a_library_logs_is_told_to_who_wants_it(caplog):
    with pytest.raises(DmlError, match="refused"):
        load("gs://401/x.npy")
    assert "gcsfs" in {record.name for record in caplog.records}


@pytest.mark.usefixtures("google", "tried")
def test_a_service_without_grpc_is_read_soon_and_grpc_prints_nothing(monkeypatch):
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")  # else gcsfs would not ask by gRPC
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    command = [sys.executable, "-m", "cli", "inspect", "gs://bucket/x.h5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=True)
    told = [line for line in done.stderr.splitlines() if not line.startswith("downloading")]
    assert told == ["Next: dmltool eval gs://bucket/x.h5 --labels labels.txt"]


@pytest.mark.parametrize(
    ("address", "package"),
    [
        ("s3://bucket/x.npy", "s3fs"),
        ("gs://bucket/x.npy", "gcsfs"),
        ("hf://datasets/name/set/x.npy", "huggingface_hub"),
        ("http://host/x.npy", "aiohttp"),
        ("https://host/x.npy", "aiohttp"),
        ("memory://b/x.npy", "fsspec"),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(address, package, monkeypatch):
    known = importlib.import_module("fsspec.registry")._registry  # what was imported before
    monkeypatch.delitem(known, address.partition(":")[0], raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DmlError, match=f"{address} needs {package}, which is not") as error:
        load(address)
    assert '".[remote]"' in error.value.fix
