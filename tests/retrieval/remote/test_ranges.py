"""Large files of which a reader needs some parts: only these are downloaded."""

import io
import json
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import h5py
import numpy as np
import pytest

from retrieval import evaluate
from retrieval.embeddings import Split
from retrieval.errors import DmlError
from retrieval.formats.arrays import copies
from retrieval.formats.hdf5.writing import write
from retrieval.loading.inputs import Inputs
from retrieval.loading.load import load
from retrieval.loading.sources import locate
from retrieval.remote import cache_limit, ranges
from retrieval.remote.store import Store
from tests.commands import call

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.usefixtures("tried")
SMALLER = 16  # all sizes, so that the tests are quick; 1 for those of docs/files.md
ROWS, DIM, LARGE = 8000 // SMALLER, 32, (24 << 20) // SMALLER
MOST = (5 << 20) // SMALLER  # of a file of 47 and more


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache whose name h5py cannot tell of a file object."""
    monkeypatch.setenv(cache_limit.FOLDER, str(tmp_path / "größe"))
    for name in ("BLOCK", "LEAST", "PIECE"):
        monkeypatch.setattr(ranges, name, getattr(ranges, name) // SMALLER)
    yield tmp_path / "größe"
    copies.clear()


class Server:
    """Serves a folder; answers to ranges unless `plain` is set, and adds up what it sends."""

    def __init__(self, root):
        self.root, self.plain, self.sent, self.requests = root, False, 0, 0

    def send(self, handler, body):
        path = self.root / handler.path.lstrip("/")
        path = path / "index.html" if path.is_dir() else path
        data = path.read_bytes()
        asked = (
            None if self.plain else re.match(r"bytes=(\d+)-(\d+)", handler.headers["Range"] or "")
        )
        part = data[int(asked[1]) : int(asked[2]) + 1] if asked else data
        handler.send_response(206 if asked else 200)
        handler.send_header("Content-Length", str(len(part)))
        handler.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        handler.end_headers()
        self.requests += 1
        if body:
            self.sent += len(part)
            handler.wfile.write(part)

    def forget(self):
        self.sent = self.requests = 0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Large files with the vectors and labels of a test split somewhere in the middle."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    root, rng = tmp_path_factory.mktemp("served"), np.random.default_rng(0)
    X = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    labels = rng.integers(0, 20, ROWS)
    large = rng.integers(0, 256, (ROWS, LARGE // ROWS), np.uint8)
    images = [{"bytes": row.tobytes(), "path": str(n)} for n, row in enumerate(large)]
    table = pa.table(
        {
            "image": images,
            "embedding": list(X),
            "text": [row.tobytes() for row in large],
            "label": labels,
        }
    )
    parquet.write_table(table, root / "x.parquet", row_group_size=ROWS // 4, compression="none")
    train = Split(rng.normal(size=(LARGE // 4 // DIM, DIM)).astype(np.float32))
    write(root / "own.h5", {"train": train, "test": Split(X, labels)})
    with h5py.File(root / "own.h5", "a") as file:
        file["after"] = large
    with h5py.File(root / "chunked.h5", "w") as file:
        file.create_dataset(
            "train", data=train.vectors, chunks=(4096, DIM), compression="gzip", compression_opts=1
        )
        file.create_dataset("test", data=X, chunks=(500, DIM), compression="gzip")
        file["test_labels"] = labels
        file["after"] = large[None]  # three dimensions: no vectors
    end = LARGE + X.nbytes
    places = {
        "before": ("U8", [LARGE], [0, LARGE]),
        "a": ("F32", X.shape, [LARGE, end]),
        "after": ("U8", [LARGE], [end, end + LARGE]),
    }
    names = ("dtype", "shape", "data_offsets")
    header = json.dumps(
        {name: dict(zip(names, said, strict=True)) for name, said in places.items()}
    )
    start = len(header).to_bytes(8, "little") + header.encode()
    other = large.tobytes().ljust(LARGE)
    (root / "x.safetensors").write_bytes(start + other + X.tobytes() + other)
    return root, X, labels


@pytest.fixture(scope="module")
def running(files):
    server = Server(files[0])

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self):
            server.send(self, True)

        def do_HEAD(self):
            server.send(self, False)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        server.address = f"http://127.0.0.1:{listening.server_address[1]}"
        yield server
        listening.shutdown()


@pytest.fixture
def server(running):
    running.forget()
    running.plain = False
    return running


@pytest.mark.parametrize("trial", ["0", "1"])
@pytest.mark.parametrize("name", ["x.parquet", "own.h5", "chunked.h5", "x.safetensors::a"])
def test_only_what_is_scored_is_downloaded(server, files, name, trial, monkeypatch):
    monkeypatch.setenv("DMLTOOL_TRIAL", trial)
    root, X, labels = files
    found = load(f"{server.address}/{name}", train=False).splits["test"]
    np.testing.assert_array_equal(found.vectors, X)
    if found.labels is not None:
        np.testing.assert_array_equal(found.labels, labels)
    assert server.sent < MOST < (root / name.partition("::")[0]).stat().st_size / 4
    assert server.requests < 20


def test_eval_has_the_scores_of_the_file_on_a_disk_and_downloads_nothing_the_second_time(
    server, files
):
    here, there = (f"{where}/own.h5" for where in (files[0], server.address))
    wanted = evaluate(here, nmi=False, recall_at=[1])["distances"]
    assert evaluate(there, nmi=False, recall_at=[1])["distances"] == wanted
    assert server.sent < MOST
    server.forget()
    out = call("eval", there, "--no-nmi")
    assert out.exit_code == 0, out.output
    assert server.sent == 0
    assert server.requests == 1  # whether it has changed
    server.forget()
    out = call("eval", f"{there}::test", "--labels", f"{there}::test/labels", "--no-nmi")
    assert out.exit_code == 0, out.output
    assert server.requests == 1


def test_labels_of_another_file_are_one_column(server, files):
    address = f"{server.address}/x.parquet"
    locate(address)
    before = server.sent
    found = load(files[0] / "own.h5::test", labels=address).splits["test"]
    np.testing.assert_array_equal(found.labels, files[2])
    assert server.sent - before <= 4 * 2 * ranges.BLOCK  # of four row groups


def test_what_is_missing_is_added_later_and_then_the_copy_is_whole(server, files, folder):
    address, size = f"{server.address}/own.h5", (files[0] / "own.h5").stat().st_size
    load(address, train=False)
    (version,) = folder.glob("*/versions/own.h5")
    assert version.read_text().endswith(ranges.IN_PARTS)  # older versions take it as outdated
    inputs = Inputs(address)
    both = load(address)
    inputs.check_unchanged()
    assert len(both.splits["train"].vectors) == LARGE // 4 // DIM
    (copy,) = locate(address, whole=True).files
    inputs.check_unchanged()
    assert not version.read_text().endswith(ranges.IN_PARTS)
    assert copy.read_bytes() == (files[0] / "own.h5").read_bytes()
    assert server.sent == size
    assert not list(copy.parents[1].glob("marks/*"))


def test_holes_take_no_room_in_the_cache(server, files, folder):
    (copy,) = locate(f"{server.address}/own.h5").files
    assert copy.stat().st_size == (files[0] / "own.h5").stat().st_size
    assert cache_limit.on_disk(folder) < MOST


@pytest.mark.parametrize("plain", [False, True])
def test_copies_with_holes_of_several_files_begin_at_the_same_time(
    server, files, monkeypatch, plain
):
    """A server without ranges sends all of them whole."""
    several, checked = files[0] / "several", Store.check_unchanged
    several.mkdir(exist_ok=True)
    for n in range(4):
        (several / f"{n}.h5").write_bytes((files[0] / "own.h5").read_bytes())
    links = "".join(f'<a href="{n}.h5">x</a>' for n in range(4))
    (several / "index.html").write_text(links)
    together = threading.Barrier(4)

    def check(self, file):
        together.wait(5)
        checked(self, file)

    monkeypatch.setattr(Store, "check_unchanged", check)
    server.plain = plain
    found = locate(f"{server.address}/several/").files
    assert [file.name for file in found] == [f"{n}.h5" for n in range(4)]
    assert [bool(copies.get(file)) for file in found] == [not plain] * 4
    if plain:
        assert found[3].read_bytes() == (files[0] / "own.h5").read_bytes()


def test_what_has_come_meanwhile_is_not_asked_for_again(server):
    copy = copies.get(locate(f"{server.address}/own.h5").files[0])
    server.forget()
    copy.download(copy, [(0, 1)])
    assert server.requests == 0


def test_a_server_without_ranges_sends_the_whole_file(server, files):
    server.plain = True
    found = load(f"{server.address}/own.h5", train=False).splits["test"]
    np.testing.assert_array_equal(found.vectors, files[1])
    assert copies.get(locate(f"{server.address}/own.h5").files[0]) is None


def test_a_server_may_stop_sending_ranges(server, files):
    address = f"{server.address}/own.h5"
    load(address, train=False)
    server.plain = True
    with pytest.raises(DmlError, match=r"http.*own\.h5 no longer sends parts of files"):
        load(address)
    assert len(load(address).splits["train"].vectors) == LARGE // 4 // DIM


def test_a_server_without_ranges_completes_a_copy_with_holes(server, files):
    address = f"{server.address}/own.h5"
    locate(address)
    server.plain = True
    (copy,) = locate(address, whole=True).files
    assert copy.read_bytes() == (files[0] / "own.h5").read_bytes()
    assert copies.get(copy) is None


def test_requests_are_counted_for_each_load(server):
    address = f"{server.address}/own.h5"
    copy = copies.get(locate(address).files[0])
    copy.requests = 100 * ranges.REQUESTS
    load(address, train=False)
    assert server.sent < MOST


@pytest.fixture
def huge(tmp_path):
    """A copy of 400,000 blocks without a server, and what was downloaded for it."""
    downloaded = []

    def download(copy, pieces):
        downloaded.append(sum(stop - start for start, stop in pieces))
        copy.mark(pieces)

    for name, size in (("data", 400_000 * ranges.BLOCK), ("marks", 400_000)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    names = (tmp_path / name for name in ("data", "marks", "version"))
    return ranges.Copy(*names, download), downloaded


@pytest.mark.parametrize("step", [1, -1])
def test_a_reader_of_all_blocks_one_after_another_makes_few_requests(huge, step):
    copy, downloaded = huge
    for n in range(2000)[::step]:
        copy.ensure([(n * ranges.BLOCK, n * ranges.BLOCK + 1)])
    assert len(downloaded) < 70
    assert sum(downloaded) < 2100 * ranges.BLOCK


def test_a_reader_of_many_places_of_a_huge_file_does_not_get_all_of_it(huge):
    copy, downloaded = huge
    for n in range(0, 400_000, 1000):
        copy.ensure([(n * ranges.BLOCK, n * ranges.BLOCK + 1)])
    assert sum(downloaded) < copy.size / 10
    places = [(n * ranges.BLOCK, n * ranges.BLOCK + 1) for n in range(500, 400_000, 1000)]
    copy.ensure(places)  # all in one request are taken as they are
    assert downloaded[-1] == len(places) * ranges.BLOCK


def test_looking_for_what_is_missing_takes_the_time_of_the_range_and_not_of_the_file(huge):
    copy, marks, seen = huge[0], np.array(huge[0].marks), []

    class Marks:
        def __getitem__(self, blocks):
            seen.append(blocks.stop - blocks.start)
            return marks[blocks]

    copy.marks = Marks()
    marks[7] = 1
    block = ranges.BLOCK
    at = 399_998 * block
    wanted = [(at + 5, at + 6), (8 * block, 9 * block), (6 * block, 8 * block + 1), (block, 0)]
    assert copy.missing(wanted) == [
        (6 * block, 7 * block),
        (8 * block, 9 * block),
        (at, at + block),
    ]
    assert sum(seen) < 10
    copy.marks = marks
    assert copy.missing([(at, copy.size + 99)]) == [(at, copy.size)]


def test_a_file_that_changes_between_two_parts_is_an_error(server, files):
    new = files[0] / "new.h5"
    new.write_bytes((files[0] / "own.h5").read_bytes())
    address = f"{server.address}/new.h5"
    inputs = Inputs(address)
    new.write_bytes((files[0] / "own.h5").read_bytes())
    with pytest.raises(DmlError, match=r"new\.h5 was changed while it was downloaded"):
        load(address, places=inputs.places)
    np.testing.assert_array_equal(load(address).splits["test"].vectors, files[1])
    with pytest.raises(DmlError, match=r"new\.h5 was changed while it was read"):
        inputs.check_unchanged()


def test_an_arrow_file_with_the_suffix_of_parquet_is_read_whole(server, files):
    pa = pytest.importorskip("pyarrow")
    X = np.ones((LARGE // 4 // DIM, DIM), np.float32)
    out = io.BytesIO()
    table = pa.table({"embedding": pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), DIM)})
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    (files[0] / "arrow.parquet").write_bytes(out.getvalue())
    np.testing.assert_array_equal(load(f"{server.address}/arrow.parquet").splits["test"].vectors, X)
