"""Files on an S3 server, which is moto on this machine: pip install "moto[server]" to run these."""

import io
import os
import urllib.request

import numpy as np
import pytest

from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.hdf5.writing import write
from retrieval.loading import load
from retrieval.remote import room
from retrieval.sources import locate

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
moto_server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
# boto's own use of what Python deprecates is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def bucket():
    """A bucket with shards and labels."""
    server = moto_server.ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        fs = s3fs.S3FileSystem()
        fs.mkdir("bucket")
        for n in (2, 10):
            for kind, array in (("x", np.full((2, 3), n, np.float32)), ("y", np.arange(2))):
                out = io.BytesIO()
                np.save(out, array)
                fs.pipe(f"bucket/{kind}/part-{n}.npy", out.getvalue())
        yield fs
    server.stop()


@pytest.mark.parametrize("name", ["s3://bucket/x/*.npy", "s3://bucket/x", "s3://bucket/x/"])
def test_patterns_and_folders_are_read_with_labels(bucket, name):
    found = load(name, labels="s3://bucket/y/part-*.npy").splits["test"]
    assert found.vectors[:, 0].tolist() == [2, 2, 10, 10]
    assert found.labels.tolist() == [0, 1, 0, 1]


def test_a_new_version_is_noticed_by_its_etag(bucket):
    name = "s3://bucket/new.npy"
    for value in (1, 2):
        out = io.BytesIO()
        np.save(out, np.full((2, 3), value, np.float32))
        bucket.pipe("bucket/new.npy", out.getvalue())
        assert load(name).splits["test"].vectors[0, 0] == value


@pytest.mark.usefixtures("tried")
def test_only_the_split_that_is_scored_is_downloaded(bucket, tmp_path):
    train, test = (np.full((rows, 64), n, np.float32) for n, rows in ((1, 1 << 16), (2, 100)))
    write(tmp_path / "x.h5", {"train": Split(train), "test": Split(test)})
    bucket.put(str(tmp_path / "x.h5"), "bucket/x.h5")
    found = load("s3://bucket/x.h5", train=False).splits["test"].vectors
    np.testing.assert_array_equal(found, test)
    (copy,) = locate("s3://bucket/x.h5").files
    assert room.on_disk(copy.parent) < copy.stat().st_size / 8


@pytest.mark.parametrize("name", ["s3://bucket/nothing.npy", "s3://nothing/x.npy"])
def test_a_missing_file_or_bucket_is_named(bucket, name):
    with pytest.raises(DmlError, match=f"{name} does not exist"):
        load(name)


def test_wrong_credentials_are_named(bucket):
    require_credentials("0")
    try:
        with pytest.raises(DmlError, match=r"s3://bucket/x may not be read") as error:
            load("s3://bucket/x")
    finally:
        require_credentials("inf")
    assert "AWS_PROFILE" in error.value.fix


def require_credentials(after: str):
    """Let the server check who asks, after so many requests."""
    address = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset-auth"
    request = urllib.request.Request(address, after.encode(), {"Content-Type": "text/plain"})
    urllib.request.urlopen(request).close()


def test_a_server_that_is_not_there_is_named(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DmlError, match=r"s3://bucket/x\.npy cannot be reached"):
        load("s3://bucket/x.npy")
    s3fs.S3FileSystem.clear_instance_cache()
