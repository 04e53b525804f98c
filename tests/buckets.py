"""A server with the interface of S3 on this machine: moto."""

import urllib.request
from contextlib import contextmanager

import pytest


@contextmanager
def empty_bucket():
    """The file system of a server with one bucket, called `bucket`.

    The variables that name the server are set inside, also for processes that are started.
    """
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto_server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    server = moto_server.ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "AWS_ENDPOINT_URL": address,
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
            }.items():
                patch.setenv(name, value)
            # All servers of a process have the same buckets, and all file systems the first server.
            urllib.request.urlopen(f"{address}/moto-api/reset", b"").close()
            s3fs.S3FileSystem.clear_instance_cache()
            fs = s3fs.S3FileSystem()
            fs.mkdir("bucket")
            yield fs
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
