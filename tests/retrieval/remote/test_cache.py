"""Copies of files behind addresses: when they are made, and when they are made again."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.loading.inputs import Inputs
from retrieval.loading.load import load
from retrieval.loading.sources import locate
from retrieval.remote.address import parse
from retrieval.remote.cache import Entry
from retrieval.remote.store import Found, Store
from tests.retrieval.formats.samples import run_fix
from tests.retrieval.remote.copies import npy


def test_a_file_is_downloaded_again_only_if_it_has_changed(server, downloads):
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    for _ in range(2):
        load("memory://b/x.npy")
    assert downloads == ["x.npy"]
    server.pipe("/b/x.npy", npy(np.zeros((2, 2))))
    assert not load("memory://b/x.npy").splits["test"].vectors.any()
    assert downloads == ["x.npy"] * 2


def test_a_copy_that_was_cut_short_is_downloaded_again(server, downloads):
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    os.truncate(locate("memory://b/x.npy").files[0], 100)
    assert load("memory://b/x.npy").splits["test"].vectors.all()
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
    inputs = Inputs("memory://b/x.npy")
    load("memory://b/x.npy")
    inputs.check_unchanged()
    server.pipe("/b/x.npy", npy(np.zeros((2, 2))))
    load("memory://b/x.npy")
    with pytest.raises(DmlError, match=r"memory://b/x\.npy was changed while it was read"):
        inputs.check_unchanged()


def test_a_change_between_two_looks_is_noticed(server):
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    inputs = Inputs("memory://b/x.npy")
    server.pipe("/b/x.npy", npy(np.zeros((3, 2))))
    load("memory://b/x.npy")
    with pytest.raises(DmlError, match=r"memory://b/x\.npy was changed while it was read"):
        inputs.check_unchanged()


def test_copies_of_files_that_are_gone_are_removed(server):
    for n in (1, 2):
        server.pipe(f"/b/{n}.npy", npy(np.ones((1, 2))))
    (copy, gone) = locate("memory://b").files
    server.rm("/b/2.npy")
    assert locate("memory://b").files == (copy,)
    assert not gone.exists()


PROCESS = """
import fsspec, sys, time
from retrieval.remote.store import Store
from retrieval.loading.sources import locate
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


@pytest.mark.parametrize(
    ("name", "content", "fixed"),
    [
        ("x.npy.gz", npy(np.ones((2, 2))), "x.npy"),
        ("my x.npy", gzip.compress(npy(np.ones((2, 2)))), "my x.npy.gz"),
        ("x.h5.gz", gzip.compress(b"x"), "x.h5"),
        ("y.json", b'[{"x": [1, 2]}, {"x": [3, 4]}]', "y.jsonl"),
    ],
    ids=["rename", "add a suffix", "unpack", "convert"],
)
def test_the_command_of_a_fix_works_once_the_file_is_downloaded(
    server, tmp_path, name, content, fixed
):
    server.pipe(f"/b/{name}", content)
    with pytest.raises(DmlError, match=r"memory://b/") as error:
        load(f"memory://b/{name}")
    assert error.value.fix.startswith("Download the file first. ")
    (tmp_path / name).write_bytes(content)
    run_fix(error.value, tmp_path)
    assert (tmp_path / fixed).is_file()


def test_the_command_of_a_fix_names_the_file_of_a_folder_and_not_its_folder(server):
    server.pipe("/b/a/b/0.npy.gz", npy(np.ones((2, 2))))
    with pytest.raises(DmlError) as error:
        load("memory://b/**/0.npy.gz")
    assert error.value.fix == "Download the file first. Rename it: mv 0.npy.gz 0.npy"


def test_a_fix_that_is_a_command_of_dmltool_keeps_the_address(server):
    server.pipe("/b/y.txt", b"a\nb")
    with pytest.raises(DmlError) as error:
        load("memory://b/y.txt")
    assert error.value.fix.endswith(" --labels memory://b/y.txt")
