"""List and download files with fsspec, with errors that say what to do."""

from __future__ import annotations

import logging
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from retrieval.errors import DmlError, install
from retrieval.formats import is_compressed
from retrieval.remote.address import PACKAGES, WEB, Address, without_secrets
from retrieval.remote.ranges import changed
from retrieval.resources import run_all

T = TypeVar("T")
CONNECT_SECONDS, READ_SECONDS = 15, 60
BUCKET_SECONDS = 2  # in which gcsfs repeats the question of what kind a bucket is
ATTEMPTS = 3  # of a transfer that breaks off
REQUESTS = 8  # at a time
BUSY = 429  # the HTTP status for too many requests
# What servers tell that changes with the content; the first that is told counts.
VERSIONS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "generation", "blob_id", "xet_hash"),
    *("Last-Modified", "LastModified", "last_modified", "mtime", "updated", "created"),
)
CREDENTIALS = {
    "s3": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket "
    "FSSPEC_S3_ANON=true, for a server other than Amazon's AWS_ENDPOINT_URL.",
    "gs": "Log in: gcloud auth application-default login; for a public bucket set "
    "FSSPEC_GS_TOKEN=anon.",
    "hf": "Log in: hf auth login, or set HF_TOKEN.",
}
# Without a handler of their own, logging would print what these libraries log, tracebacks included,
# beside our error. Handlers of the user still get all of it.
LOGGERS = ("fsspec", "gcsfs", "s3fs")
SILENT = logging.NullHandler()
# Names of errors, of libraries that are not imported here.
NO_ACCESS = (
    *("PermissionError", "NoCredentialsError", "PartialCredentialsError", "RefreshError"),
    *("DefaultCredentialsError", "GatedRepoError", "TokenRetrievalError", "ProfileNotFound"),
)
BROKEN = ("ClientPayloadError", "IncompleteReadError", "ResponseStreamingError", "IncompleteRead")
NO_NETWORK = (
    *("ClientConnectorError", "ClientConnectionError", "EndpointConnectionError", "gaierror"),
    *("ConnectTimeoutError", "ReadTimeoutError", "ServerTimeoutError", "ConnectError"),
    *("ConnectionError", "TimeoutError"),
)


@dataclass(frozen=True)
class Found:
    """A file behind an address."""

    path: str
    """As fsspec names it."""
    name: str
    """Below the root of the address, with / between folders."""
    size: int | None
    version: str
    """Changes with the content; empty if the server tells nothing of the kind."""


class Store:
    """The files behind one address."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.fs = _filesystem(address)
        self.fs.invalidate_cache()  # fsspec remembers listings as long as the process lives

    def file(self) -> Found | None:
        """The file at the address itself; None if that is a folder."""
        if self.address.scheme in WEB and self.address.url.endswith("/"):
            return None
        with explained(self.address):
            info = self._info(self.address.url)
        if info["type"] == "directory":
            return None
        return self._found(info, self.address.url, self.address.name)

    def matches(self) -> list[Found]:
        """The files that a pattern fits."""
        with explained(self.address):
            found = self.fs.glob(self.address.url, detail=True)
        root = self.address.root
        return self._below(found, root, hidden="/." in self.address.shown.removeprefix(root))

    def below(self, deep: bool = False) -> list[Found]:
        """The files in a folder; deep: also those in the folders below it."""
        url = self.address.url
        with explained(self.address):
            if deep:
                found = self.fs.find(url, detail=True)
            else:
                found = {info["name"]: info for info in self.fs.ls(url, detail=True)}
        return self._below(found, self.address.shown)

    def _below(self, infos: dict[str, dict], root: str, hidden: bool = True) -> list[Found]:
        """The files below `root`; hidden: also those whose names begin with a dot.

        On a disk, * stands for none of these.
        """
        web = self.address.scheme in WEB  # whose paths are addresses, maybe with a password
        start = (root if web else self.fs._strip_protocol(root)).rstrip("/") + "/"
        names = {}
        for path, info in infos.items():
            name = _where(self.address, path) if web else path
            passed = not hidden and "/." in name[len(start) - 1 :]
            # Links such as ?C=N;O=D, by which Apache sorts a listing, lead to the folder itself.
            # On object stores, many programs mark a folder by an empty file of its name.
            passed |= name.endswith("/")
            if info["type"] == "file" and name.startswith(start) and not passed:
                names[path] = name[len(start) :]
        self._refuse_clash(names)
        if web:  # a page of links tells neither size nor version
            run_all(partial(self._ask, into=infos), names, REQUESTS)
        return [self._found(infos[path], path, name) for path, name in names.items()]

    def _refuse_clash(self, names: dict[str, str]) -> None:
        """Raise for links that differ only in their queries: they would be copied to one file."""
        if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
            raise DmlError(
                f"{self.address.shown} has several links to {twice[0]} with different queries.",
                "In the cache, all of them have one name.",
                "Give the address of each file by itself.",
            )

    def _ask(self, path: str, into: dict[str, dict]) -> None:
        with explained(self.address, path):
            into[path] = self._info(path)

    def _info(self, path: str) -> dict[str, Any]:
        return self.fs.info(path, **self._as_sent)

    @property
    def _as_sent(self) -> dict[str, bool]:
        """Options of a request whose answer is not to be inflated."""
        return {"auto_decompress": False} if self.address.scheme in WEB else {}

    def _found(self, info: dict[str, Any], path: str, name: str) -> Found:
        parts = name.split("/")
        # A part that is no name by itself, such as C: on Windows, leads out of the cache.
        if any(part in ("", "..") or "\0" in part or Path(part).name != part for part in parts):
            raise DmlError(
                f"{self.address.shown} has a file called {name!r}.",
                "Such a name cannot be kept on a disk.",
                "Choose other files by a pattern.",
            )
        told = next((info[key] for key in VERSIONS if info.get(key)), "")
        if isinstance(told, datetime):  # which others tell as a number
            told = told.timestamp()
        return Found(path, name, info.get("size"), str(told))

    def download(self, file: Found, out: BinaryIO, wrote: Callable[[int], None]) -> None:
        """Write a file to `out`, which has a name; report the bytes of each piece to `wrote`."""
        from fsspec.callbacks import Callback

        came = 0
        # Many servers send x.npy.gz with `Content-Encoding: gzip`, which means the file itself.
        options = self._as_sent if is_compressed(file.name) else {}

        def hear(size: int | None, value: int) -> None:
            nonlocal came
            wrote(value - came)
            came = value

        def get() -> None:
            hear(None, 0)
            with explained(self.address, file.path):
                report = Callback(hooks={"came": hear})
                self.fs.get_file(file.path, out.name, callback=report, **options)
            self.check_unchanged(file)
            self._check_length(file, os.fstat(out.fileno()).st_size, file.size)

        _retried(get)

    def read(self, file: Found, start: int, stop: int) -> bytes:
        """The bytes of one range of a file; `NoRanges` if the server sends whole files only."""

        def get() -> bytes:
            with explained(self.address, file.path):
                data = self._range(file.path, file.size, start, stop)
            self._check_length(file, len(data), stop - start)
            return data

        return _retried(get)

    def _range(self, path: str, size: int | None, start: int, stop: int) -> bytes:
        if self.address.scheme not in WEB:
            return self.fs.cat_file(path, start=start, end=stop)
        # cat_file would hold the whole file in memory if the server sent it.
        with self.fs.open(path, "rb", size=size, cache_type="none") as source:
            source.seek(start)
            try:
                return source.read(stop - start)
            except ValueError as error:
                raise NoRanges from error

    def check_unchanged(self, file: Found) -> None:
        """Raise if the server has another version of the file by now."""
        with explained(self.address, file.path):
            self.fs.invalidate_cache(self.fs._parent(file.path))
            now = self._found(self._info(file.path), file.path, file.name)
        if now.version != file.version or now.size != file.size:
            raise changed(_where(self.address, file.path))

    def _check_length(self, file: Found, came: int, wanted: int | None) -> None:
        if wanted is not None and came != wanted:
            raise Broken(
                f"{_where(self.address, file.path)} was cut short.",
                f"{came:,} of {wanted:,} bytes came.",
                "Run the command again; if that does not help, check the file on the server.",
            )


class Broken(DmlError):
    """A transfer that broke off."""


class NoRanges(Exception):
    """A server that sends whole files only."""


def _retried(transfer: Callable[[], T]) -> T:
    """Try a transfer again if it breaks off."""
    for _ in range(ATTEMPTS - 1):
        with suppress(Broken):
            return transfer()
    return transfer()


def _filesystem(address: Address) -> Any:
    options: dict[str, Any] = {}
    for name in LOGGERS:
        logging.getLogger(name).addHandler(SILENT)
    try:
        import fsspec

        if address.scheme in WEB:
            import aiohttp

            # The default of aiohttp ends a download after five minutes.
            waits = aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS
            )
            options["client_kwargs"] = {"timeout": waits, "trust_env": True}
            options["headers"] = {"Accept-Encoding": "identity"}
        if address.scheme == "s3":
            options["config_kwargs"] = {
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
            }
        if address.scheme == "gs":
            options["retry_timeout"] = BUCKET_SECONDS
            os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it prints a line at each fork
        with explained(address):
            return fsspec.filesystem(address.scheme, **options)
    except ImportError as error:
        package = PACKAGES[address.scheme]
        raise DmlError(
            f"{address.shown} needs {package}, which is not installed.",
            f"Reading {address.scheme}:// addresses needs an optional package.",
            install("remote"),
        ) from error


@contextmanager
def explained(address: Address, path: str = "") -> Iterator[None]:
    """Turn what fsspec and the libraries below it raise into an error for people."""
    try:
        yield
    except (DmlError, ImportError, MemoryError, NoRanges):
        raise
    except Exception as error:
        raise _explanation(address, _where(address, path), error) from error


def _where(address: Address, path: str) -> str:
    """The address of a file of this store, as people see it."""
    if not path:
        return address.shown
    url = path if "://" in path else f"{address.scheme}://{path.lstrip('/')}"
    return Address(address.scheme, url, None).shown


def _explanation(address: Address, where: str, error: BaseException) -> DmlError:
    if address.scheme in WEB and isinstance(error, FileNotFoundError):
        error = error.__cause__ or error  # fsspec makes a FileNotFoundError of any failure
    chain = list(_chain(error))
    names = {kind.__name__ for each in chain for kind in type(each).__mro__}
    codes = {_status(each) for each in chain}
    text = next((line for each in chain if (line := str(each).strip())), type(error).__name__)
    said = f"{type(error).__name__}: {without_secrets(text.splitlines()[0])[:300].rstrip('.')}."
    if names & set(BROKEN):
        return Broken(f"The download of {where} broke off.", said, "Run the command again.")
    if names & set(NO_NETWORK):
        return Broken(
            f"{where} cannot be reached.",
            said,
            "Check the network, a proxy in https_proxy, and the name of the server.",
        )
    if codes & {401, 403} or names & set(NO_ACCESS):
        by_hand = f"Download it by another program: curl -L -O {shlex.quote(where)}"
        return DmlError(
            f"Access to {where} was refused.", said, CREDENTIALS.get(address.scheme, by_hand)
        )
    if failed := [code for code in codes if code and (code >= 500 or code == BUSY)]:
        told = f"It answers with the HTTP status {failed[0]}."
        return Broken(f"The server of {where} fails.", told, "Run the command again later.")
    if codes & {404} or "FileNotFoundError" in names:
        private = ", or it is private" if address.scheme == "hf" else ""
        return DmlError(
            f"{where} does not exist.",
            f"The server has no such file{private}.",
            CREDENTIALS["hf"] if private else "Check the address.",
        )
    return DmlError(f"{where} cannot be read.", said, "Check the address and the server.")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error tells of."""
    if isinstance(error, OSError) and str(error).startswith("Forbidden: "):  # of gcsfs
        return 403
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None)
    found = found or getattr(error, "status", None) or getattr(error, "code", None)
    return int(str(found)) if str(found).isdigit() else None
