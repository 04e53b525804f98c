import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from retrieval import files
from retrieval.errors import DmlError
from retrieval.files import CSV, JSON, PAGE, check_target, whole_file, write_text
from retrieval.formats.hdf5.writing import KIND


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "result.json"
    target.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(DmlError, match="cannot be written"):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_text_is_written_with_ordinary_permissions(tmp_path):
    write_text(tmp_path / "a", "é\n")
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a").read_bytes() == "é\n".encode()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_targets_are_checked_before_the_work(tmp_path):
    there = tmp_path / "there.json"
    there.write_text("")
    with pytest.raises(DmlError, match="exists already"):
        check_target(there, JSON)
    assert check_target(there, JSON, force=True) == there
    with pytest.raises(DmlError, match="folder"):
        check_target(tmp_path, JSON, force=True)
    with pytest.raises(DmlError, match="cannot be written"):
        check_target(tmp_path / "no" / "file.json", JSON)


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [
        (PAGE, b'<!doctype html>\n<meta name="generator" content="dmltool 1">', b"<!doctype html>"),
        (JSON, b'{\n  "version": 1,\n  "protocol": "leave-one-out",', b'{"name": "vue"}'),
        (JSON, b'{"version": 1, "a": "x.h5"', b'{"version": "3.2.1", "scripts": {}}'),
        (JSON, b'{"version": 1, "protocol": "listed-neighbours"', b'{"version": 1, "points": []}'),
        (CSV, b"label,queries,recall@1_l2\n", b"name,label"),
        (CSV, b"label,name,queries,recall@1_cos\n", b"label,path\n0,a.png\n"),
        (KIND, b"\x89HDF\r\n\x1a\n", b"PK\3\4"),
    ],
)
def test_force_overwrites_files_of_the_same_kind_only(tmp_path, kind, own, other):
    file = tmp_path / f"x{kind.suffixes[0]}"
    file.write_bytes(own)
    assert check_target(file, kind, force=True) == file
    file.write_bytes(other)
    with pytest.raises(DmlError, match="exists and is not"):
        check_target(file, kind, force=True)
    with pytest.raises(DmlError, match=f"is not the name of {kind.name}") as error:
        check_target(tmp_path / "best.pt", kind, force=True)
    assert str(tmp_path / f"best{kind.suffixes[0]}") in error.value.fix


def test_the_name_that_is_given_counts_and_not_that_of_the_file_it_leads_to(tmp_path):
    link, data = tmp_path / "r.json", tmp_path / "blob.data"
    link.symlink_to(data)
    for content in ("", '{"version": 1, "protocol": "query-gallery"'):
        data.write_text(content)
        assert check_target(link, JSON, force=True) == data
    other = tmp_path / "r.data"
    other.symlink_to(tmp_path / "r2.json")
    with pytest.raises(DmlError, match="is not the name of a JSON result") as error:
        check_target(other, JSON)
    assert str(tmp_path / "r.json") in error.value.fix


@pytest.mark.parametrize("kind", [PAGE, JSON, CSV, KIND])
def test_json_is_what_can_be_printed_where_no_file_can_be_written(kind):
    with pytest.raises(DmlError, match="/dev/null is not a regular file") as error:
        check_target("/dev/null", kind, force=True)
    assert ("--json > FILE" in error.value.fix) == (kind is JSON)
    assert (f"ends in {kind.suffixes[0]}" in error.value.fix) == (kind is not JSON)


@pytest.mark.parametrize("force", [True, False])
def test_the_new_name_of_a_file_is_on_the_disk_at_the_end(tmp_path, monkeypatch, force):
    target, synced = tmp_path / "a", []

    def sync(path):
        synced.append((path, target.exists()))

    monkeypatch.setattr(files, "sync", sync)
    write_text(target, "new", force)
    assert synced == [(tmp_path, True)]


def test_a_file_system_that_cannot_sync_folders_is_good_enough(tmp_path, monkeypatch):
    def unable(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            _fail(errno.EINVAL)

    monkeypatch.setattr(os, "fsync", unable)
    write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    monkeypatch.setattr(os, "fsync", lambda _: _fail(errno.EINVAL))
    with pytest.raises(OSError, match="no"):
        files.sync(tmp_path / "a")


def test_a_folder_that_cannot_be_made_leaves_none_above_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DmlError, match="cannot be made"):
        files.make_folder(tmp_path / "file" / "x")
    with pytest.raises(DmlError, match="cannot be made"):
        files.make_folder(tmp_path / "new" / ("x" * 300))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    made = files.make_folder(tmp_path / "new" / "x")
    (tmp_path / "new" / "y").touch()
    files.remove_empty(made)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["y"]


def test_what_killed_writers_left_is_removed_by_the_next(tmp_path):
    code = """
import os, sys
from pathlib import Path
from retrieval.files import whole_file
with whole_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), 9)
"""
    target = tmp_path / "a[b].json"
    subprocess.run([sys.executable, "-c", code, str(target)], cwd=Path(__file__).parents[2])
    assert len(list(tmp_path.iterdir())) == 1
    with whole_file(target) as file:
        file.write(b"old")
        write_text(target, "new", force=True)  # a second writer leaves the first one's file
        assert len(list(tmp_path.iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a[b].json"]
    assert target.read_bytes() == b"old"


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_replaces_nothing(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "no links")))
    write_text(tmp_path / "a", "first")
    with pytest.raises(DmlError, match="cannot be written"):
        write_text(tmp_path / "a", "second")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "first"


def test_a_second_name_is_the_same_file_or_a_copy(tmp_path, monkeypatch):
    last, best = tmp_path / "last", tmp_path / "best"
    for text in (b"one", b"two"):
        with whole_file(last, also=best) as file:
            file.write(text)
    assert last.samefile(best)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "no links")))
    with whole_file(last, also=best) as file:
        file.write(b"three")
    assert (last.read_bytes(), best.read_bytes()) == (b"three", b"three")
    assert not last.samefile(best)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "last"]


def test_leftovers_of_a_whole_folder_are_removed_but_those_in_use(tmp_path):
    (tmp_path / ".a.json.0123abcd.tmp").write_text("half")
    (tmp_path / ".b.original.tmp").write_text("of the user")
    living, name = files.create_temporary(tmp_path / "c")
    with living:
        files.remove_leftovers(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {name.name, ".b.original.tmp"}


def test_one_process_holds_a_folder(tmp_path):
    taken = DmlError("taken")
    with (
        files.locked_folder(tmp_path, taken) as held,
        pytest.raises(DmlError, match="taken"),
        files.locked_folder(tmp_path, taken),
    ):
        pass
    assert held
    with files.locked_folder(tmp_path, taken):
        pass


def test_without_fcntl_files_are_written_and_nothing_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(files.sys, "platform", "win32")
    write_text(tmp_path / "a", "new")
    with files.locked_folder(tmp_path, DmlError("taken")) as held:
        assert not held
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_sha256_is_that_of_the_content(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert files.sha256(tmp_path / "a").startswith("ba7816bf8f01cfea")
    (tmp_path / "b").write_bytes(b"bc")
    (tmp_path / "a").write_bytes(b"a")
    told = []
    both = files.sha256(tmp_path / "a", tmp_path / "b", progress=lambda *each: told.append(each))
    assert both.startswith("ba7816bf8f01cfea")
    assert told == [("reading a", 1, 1), ("reading b", 2, 2)]


@pytest.mark.parametrize("name", ["folder", "file"])
def test_a_lock_is_waited_for(tmp_path, name):
    (tmp_path / "folder").mkdir()
    seen = []

    def wait():
        with files.waited_lock(tmp_path / name, every=0.01):
            seen.append("second")

    with files.waited_lock(tmp_path / name):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.1)
        seen.append("first")
    thread.join()
    assert seen == ["first", "second"]


def test_scratch_folders_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path):
    left, begun, other = (tmp_path / name for name in (".new-left", ".new-begun", ".other-x"))
    for folder in (left, begun, other):
        folder.mkdir()
    (left / "lock").touch()
    with files.scratch_folder(tmp_path, ".new-") as used:
        assert set(tmp_path.iterdir()) == {used, other}
        (used / "file").touch()
        with files.scratch_folder(tmp_path, ".new-") as second:
            assert set(tmp_path.iterdir()) == {used, second, other}
    assert list(tmp_path.iterdir()) == [other]


def test_a_new_name_replaces_nothing_also_without_links(tmp_path, monkeypatch):
    old, new = tmp_path / "old", tmp_path / "new"
    for links in (True, False):
        if not links:  # as on exFAT
            monkeypatch.setattr(files.os, "link", lambda *_: _fail(errno.EPERM))
        old.write_text("mine")
        files.rename_new(old, new)
        assert (new.read_text(), old.exists()) == ("mine", False)
        old.write_text("another")
        with pytest.raises(FileExistsError):
            files.rename_new(old, new)
        assert (new.read_text(), old.read_text()) == ("mine", "another")
        new.unlink()
    monkeypatch.setattr(files.os, "link", lambda *_: _fail(errno.EACCES))
    with pytest.raises(PermissionError):
        files.rename_new(old, new)
    assert not new.exists()


def _fail(number):
    raise OSError(number, "no")


def test_an_error_names_a_file_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("")
    for name in ("a.json", "no/such.json"):
        with pytest.raises(DmlError) as error:
            check_target(name, JSON)
        assert str(error.value).startswith(f"{name} ")


def test_on_windows_only_what_nobody_has_open_is_renamed_or_removed(tmp_path, as_on_windows):
    (tmp_path / ".new-left").mkdir()
    (tmp_path / ".new-left" / "lock").touch()
    with files.scratch_folder(tmp_path, ".new-") as used:
        (used / "file").touch()
        files.remove_scratch_folders(tmp_path, ".new-")
        assert set(tmp_path.iterdir()) == {used}
        assert {path.name for path in used.iterdir()} == {"lock", "file"}
    file, name = files.create_temporary(tmp_path / "a")
    files.remove_leftovers(tmp_path)
    file = files.rename_open(file, name, tmp_path / "a")
    with file, pytest.raises(PermissionError):
        (tmp_path / "a").unlink()
    assert files.remove_unused(tmp_path / "a")
    with pytest.raises(DmlError), whole_file(tmp_path / "b"):
        raise OSError(errno.ENOSPC, "full")
    assert not list(tmp_path.iterdir())


def test_a_file_whose_folder_cannot_be_synced_is_said_to_be_written(tmp_path, monkeypatch):
    def broken(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "sync", broken)
    with pytest.raises(DmlError, match="is written, but a power cut may undo that"):
        files.write_text(tmp_path / "a", "new", True)
    assert (tmp_path / "a").read_text() == "new"
