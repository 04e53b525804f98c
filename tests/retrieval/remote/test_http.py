"""Files on a web server, which is one of Python on this machine."""

import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.loading import load

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder, its address, and the requests that came."""
    root, requests = tmp_path_factory.mktemp("served"), []

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(root))

        def log_message(self, *_):
            requests.append((self.command, self.path))

        def do_GET(self):
            if "secret" in self.path and "token=1" not in self.path:
                self.send_error(403)
            elif "failing" in self.path:
                self.send_error(503)
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
        ("secret.npy", "secret.npy may not be read"),
        ("short.npy", "The download of .*short.npy broke off"),
        ("failing.npy", "The server of .*failing.npy fails"),
    ],
)
def test_what_a_server_refuses_is_named(served, tmp_path, name, what):
    address, _ = served
    with pytest.raises(DmlError, match=what) as error:
        load(f"{address}/{name}")
    assert str(tmp_path) not in str(error.value)
    assert not list(tmp_path.rglob("*.npy"))


def test_a_server_that_is_not_there_is_named(monkeypatch):
    with pytest.raises(DmlError, match=r"http://127\.0\.0\.1:9/x\.npy cannot be reached") as error:
        load("http://127.0.0.1:9/x.npy")
    assert "network" in error.value.fix
