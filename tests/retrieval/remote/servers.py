"""Servers of this machine with the interfaces of Google Cloud Storage and of Hugging Face.

They answer as the real ones do to the requests for a file. A folder of the name 401, 403 or 404
is answered by this status.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

STATUS = re.compile(r"/(40[134])(?=/|$)")
REFUSALS = {"401": "Anonymous caller does not have access.", "403": "Access denied.", "404": ""}


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that ends a connection is no news."""


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server that runs inside the block."""
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Service(BaseHTTPRequestHandler):
    """Both interfaces, over the same files."""

    files: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := STATUS.search(path):
            error = {"code": int(found[1]), "message": REFUSALS[found[1]]}
            return self.answer_json({"error": error}, int(found[1]))
        for pattern, answer in ROUTES.items():
            if found := re.fullmatch(pattern, path):
                return answer(self, *found.groups())
        return self.answer(404)

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, content: object, status: int = 200) -> None:
        self.answer(status, json.dumps(content).encode())

    def send_file(self, name: str) -> None:
        data = self.files[name]
        if asked := re.match(r"bytes=(\d+)-(\d+)", self.headers["Range"] or ""):
            return self.answer(206, data[int(asked[1]) : int(asked[2]) + 1])
        return self.answer(200, data)

    def describe(self, bucket: str, name: str) -> None:
        """An object of Google's."""
        if name not in self.files:
            return self.answer(404)
        return self.answer_json(self.described(bucket, name))

    def described(self, bucket: str, name: str) -> dict[str, str]:
        size = str(len(self.files[name]))
        return {"name": name, "bucket": bucket, "size": size, "generation": "1"}

    def list_objects(self, bucket: str) -> None:
        """The objects of a bucket of Google's with a prefix, and their folders."""
        query = parse_qs(urlsplit(self.path).query)
        prefix, end = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        files, folders = set(), set()
        for name in self.files:
            if name.startswith(prefix):
                head, slash, _ = name[len(prefix) :].partition(end or "\0")
                (folders if slash else files).add(prefix + head + slash)
        items = [self.described(bucket, name) for name in sorted(files)]
        self.answer_json({"items": items, "prefixes": sorted(folders)})

    def list_tree(self, folder: str | None) -> None:
        """The files and folders in a folder of a repository of Hugging Face's."""
        start = f"{folder}/" if folder else ""
        inside = [name[len(start) :] for name in self.files if name.startswith(start)]
        tree: list[dict[str, object]] = [
            {"type": "directory", "path": start + name, "oid": "e" * 40}
            for name in sorted({name.split("/")[0] for name in inside if "/" in name})
        ]
        for name in (start + name for name in inside if "/" not in name):
            size = len(self.files[name])
            tree.append({"type": "file", "path": name, "size": size, "oid": "f" * 40})
        self.answer_json(tree, 200 if tree else 404)


ROUTES: dict[str, Callable[..., Any]] = {
    r"/storage/v1/b/(\w+)/o/(.+)": Service.describe,
    r"/storage/v1/b/(\w+)/o": Service.list_objects,
    r"/download/storage/v1/b/\w+/o/(.+)": Service.send_file,
    r"/api/datasets/name/set": lambda self: self.answer_json({"id": "name/set", "sha": "0" * 40}),
    r"/api/datasets/name/set/tree/main(?:/(.+))?": Service.list_tree,
    r"/datasets/name/set/resolve/main/(.+)": Service.send_file,
}
