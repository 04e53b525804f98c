"""How copies of files behind addresses are kept within a limit."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from retrieval.errors import DmlError
from retrieval.loading.load import load
from retrieval.loading.sources import locate
from retrieval.remote import cache_limit
from retrieval.remote.cache_limit import hold, room_for
from tests.retrieval.remote.copies import forget_use, npy

MOST = 640_000


@pytest.fixture
def small(monkeypatch):
    """A limit below what a user may set."""
    monkeypatch.setattr(cache_limit, "limit", lambda: MOST)


def serve(server, *names):
    """Files of which two fit in the cache."""
    for name in names:
        server.pipe(f"/b/{name}.npy", name.encode() * 240_000)


def test_a_file_that_changes_often_takes_no_more_room_each_time(server, small):
    for n in range(4):
        server.pipe("/b/x.npy", str(n).encode() * 240_000)
        locate("memory://b/x.npy")


def test_the_least_recently_used_copies_make_room(server, folder, small):
    serve(server, *"abc")
    copies = {}
    for name in "ab":
        copies[name] = locate(f"memory://b/{name}.npy").files[0]
    forget_use()
    for name, when in (("a", 200), ("b", 100)):
        os.utime(copies[name].parents[1] / "used", (when, when))
    locate("memory://b/c.npy")
    assert copies["a"].exists()
    assert not copies["b"].exists()
    assert cache_limit.on_disk(folder) <= MOST


def test_copies_in_use_are_kept_and_what_does_not_fit_beside_them_is_an_error(server, small):
    serve(server, *"abc")
    held = [locate(f"memory://b/{name}.npy").files[0] for name in "ab"]
    with pytest.raises(DmlError, match=r"c\.npy needs [\d.]+ .B in the cache") as error:
        locate("memory://b/c.npy")
    assert "are in use" in error.value.why
    assert all(file.exists() for file in held)
    with pytest.raises(DmlError) as error:
        locate("memory://b/*.npy")
    assert f"{cache_limit.SIZE}=2GB" in error.value.fix


def test_nothing_is_downloaded_to_a_disk_without_room(server, folder, monkeypatch):
    serve(server, "a")
    usage = shutil.disk_usage(folder.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(DmlError, match="needs 240 KB in the cache") as error:
        locate("memory://b/a.npy")
    assert error.value.why == "Its disk has 100 KB left."
    assert not list(folder.rglob("*.npy"))


def test_a_wrong_limit_and_a_folder_that_cannot_be_written_are_named(server, monkeypatch, tmp_path):
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    monkeypatch.setenv(cache_limit.SIZE, "many")
    with pytest.raises(DmlError, match=f"{cache_limit.SIZE} is wrong"):
        load("memory://b/x.npy")
    monkeypatch.setenv(cache_limit.SIZE, "1GB")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache_limit.FOLDER, str(tmp_path / "file"))
    with pytest.raises(DmlError, match="cannot be written") as error:
        load("memory://b/x.npy")
    assert cache_limit.FOLDER in error.value.fix


def test_on_windows_a_folder_with_an_open_file_is_kept(server, as_on_windows):
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    entry = locate("memory://b/x.npy").files[0].parents[1]
    held = cache_limit._held.pop(entry)
    assert not cache_limit._remove(entry)
    os.close(held)
    assert cache_limit._remove(entry)
    assert not list(entry.parent.glob(f"{entry.name}*"))


def test_a_copy_that_is_current_needs_no_room(server, monkeypatch):
    server.pipe("/b/x.npy", npy(np.ones((2, 2))))
    locate("memory://b/x.npy")
    monkeypatch.setattr(cache_limit, "on_disk", None)  # sizes are not added up
    locate("memory://b/x.npy")


def held(entry):
    hold(entry)
    return entry


def write(entry, name, size):
    (entry / name).write_bytes(b"x" * size)


def fill(entry, name, size):
    with room_for(entry, entry.name, size, None):
        write(entry, name, size)


def test_what_other_entries_have_taken_counts_until_nobody_uses_them(folder, small):
    first, second = held(folder / "a"), held(folder / "b")
    fill(first, "0", 300_000)
    fill(second, "0", 300_000)
    with pytest.raises(DmlError, match=r"a needs"):
        fill(first, "1", 50_000)
    forget_use()
    fill(held(folder / "b"), "1", 50_000)
    assert not first.exists()


def test_two_that_fill_one_entry_count_what_the_other_has_filled(folder, small):
    first, same = held(folder / "a"), held(folder / "a")
    fill(first, "0", 10_000)
    fill(same, "1", 250_000)
    with room_for(first, first.name, 250_000, None):
        other = held(folder / "b")
        with pytest.raises(DmlError, match=r"b needs"):  # 510,000 are taken or expected
            fill(other, "0", 200_000)
        fill(other, "0", 100_000)
        write(first, "2", 250_000)
    with pytest.raises(DmlError, match=r"b needs"):
        fill(other, "1", 50_000)
    assert cache_limit.on_disk(folder) <= MOST


def test_bytes_that_a_server_did_not_tell_of_are_counted(folder, small):
    entry = held(folder / "a")
    fill(entry, "0", 1000)
    with room_for(entry, entry.name, 0, None):
        write(entry, "1", 500_000)
    with pytest.raises(DmlError, match=r"a needs"):
        fill(entry, "2", 200_000)


@pytest.mark.parametrize("killed", [False, True])
def test_files_of_unknown_size_count_as_they_come(folder, small, killed, monkeypatch):
    entry, other, third = (held(folder / name) for name in "abc")
    for each in (entry, other, third):
        fill(each, "0", 1000)
    with monkeypatch.context() as patch, room_for(entry, entry.name, 1000, None):
        write(entry, "1", 200_000)
        fill(other, "1", 100_000)
        write(entry, "2", 250_000)
        with pytest.raises(DmlError, match=r"c needs"):
            fill(third, "1", 200_000)
        if killed:
            patch.setattr(Path, "unlink", lambda *_, **__: None)
    with pytest.raises(DmlError, match=r"c needs"):
        fill(third, "1", 200_000)
    fill(third, "1", 50_000)


def test_another_limit_holds_at_once(folder, small, monkeypatch):
    entry = held(folder / "a")
    fill(entry, "0", 3000)
    monkeypatch.setattr(cache_limit, "limit", lambda: 4000)
    with pytest.raises(DmlError, match=r"a needs"):
        fill(entry, "1", 2000)
