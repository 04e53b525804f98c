"""How many threads are used: as asked for within reason, or the faster number in a trial."""

import re
import sys
import time
from pathlib import Path
from threading import Event

import pytest

from retrieval import evaluate, resources
from retrieval.resources import (
    allowed,
    available_memory,
    faster_threads,
    pool,
    results_of,
    told_allowed,
    told_threads,
)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 5.0, 4: 9.0}, 1),
        ({1: 4.0, 2: 2.0, 4: 1.0}, 4),
        ({1: 4.0, 2: 1.0, 4: 2.0}, 2),
        ({1: 0.95, 2: 1.5, 4: 1.0}, 4),  # too near to tell
    ],
)
def test_the_faster_number_of_threads_is_taken(seconds, chosen):
    count, gain = faster_threads(seconds.__getitem__, 4)
    assert count == chosen
    assert gain == pytest.approx(seconds[4] / seconds[chosen])


def test_one_processor_needs_no_trial():
    assert faster_threads(lambda _: pytest.fail("it was tried"), 1) == (1, 1.0)


def test_a_busy_moment_does_not_decide():
    moments = iter([(2, 9.0), (1, 2.0), (2, 1.0), (1, 2.0), (2, 1.0), (1, 2.0)])

    def seconds(count):
        expected, taken = next(moments)
        assert count == expected
        return taken

    assert faster_threads(seconds, 2) == (2, 1.0)


def test_what_a_trial_found_is_told_in_a_line():
    assert told_threads(1, 5.26, 2) == "1 thread: 5.3 times as fast as 2 in a trial"
    assert told_threads(2, 1.0, 2) == "2 threads: fewer are not faster in a trial"


def test_no_more_threads_than_processors(monkeypatch):
    monkeypatch.setattr(resources, "processors", lambda: 2)
    assert (allowed(1), allowed(2), allowed(100_000)) == (1, 2, 2)
    assert told_allowed(2) == ""
    assert told_allowed(100_000) == "--threads 100000: 2 are used, one per processor"


def write_limits(folder, names, most="3000000000\n"):
    group, limit, used, prefix = names
    folder = folder / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit).write_text(most)
    (folder / used).write_text("2900000000\n")
    (folder / "memory.stat").write_text(
        "anon 100000000\nactive_file 1\ninactive_file 2\n"
        f"{prefix}inactive_file 1700000000\n{prefix}active_file 1000000000\n"
        if prefix
        else "anon 100000000\nactive_file 1000000000\ninactive_file 1700000000\n"
    )


@pytest.mark.parametrize("names", resources._MEMORY_FILES, ids=["version 2", "version 1"])
def test_files_read_in_a_container_do_not_count_as_memory_in_use(names, tmp_path):
    write_limits(tmp_path, names)
    assert available_memory(tmp_path) == 2_800_000_000


@pytest.mark.parametrize("names", resources._MEMORY_FILES, ids=["version 2", "version 1"])
def test_the_limits_of_the_own_group_and_of_all_above_count(names, tmp_path):
    version_1 = names[0] == "memory"
    membership = tmp_path / "cgroup"
    membership.write_text("1:cpu:/other\n" + ("4:memory:" if version_1 else "0::") + "/job/step\n")
    for part, most in (("job/step", "max"), ("job", "2900000001"), ("other", "2900000000")):
        write_limits(tmp_path / names[0] / part, ("", *names[1:]), f"{most}\n")
    assert available_memory(tmp_path, membership) == 2_700_000_001
    membership.write_text("0::/nothing\n")
    assert available_memory(tmp_path, membership) > 2_700_000_001


def test_a_container_without_a_limit_has_the_memory_of_the_machine(tmp_path):
    write_limits(tmp_path, resources._MEMORY_FILES[0], "max\n")
    assert available_memory(tmp_path) == pytest.approx(available_memory(tmp_path / "no"), rel=0.2)
    assert available_memory(tmp_path) > 100_000_000


def test_nothing_else_asks_the_machine_for_processors_or_memory():
    asked = re.compile(r"cpu_count|sched_getaffinity|/proc/meminfo|sys/fs/cgroup|SC_PHYS_PAGES")
    root = Path(__file__).parents[2]
    found = [
        path.name
        for package in ("retrieval", "trainer", "exporter", "benchmarks")
        for path in (root / package).rglob("*.py")
        if asked.search(path.read_text())
    ]
    assert found == ["resources.py"]


def test_tiles_fit_the_cache_and_are_shared_by_the_threads(monkeypatch, tmp_path):
    for level, size in ((1, "32K"), (2, "512K"), (3, "32768K")):
        (tmp_path / f"index{level}").mkdir()
        (tmp_path / f"index{level}" / "level").write_text(f"{level}\n")
        (tmp_path / f"index{level}" / "size").write_text(f"{size}\n")
    assert resources.cache_bytes(2, tmp_path) == 512 << 10
    assert resources.cache_bytes(3, tmp_path) == 32 << 20
    assert resources.cache_bytes(4, tmp_path) == resources.cache_bytes(2, tmp_path / "none") == 0
    sizes = {2: 512 << 10, 3: 32 << 20}
    monkeypatch.setattr(resources, "cache_bytes", sizes.get)
    assert resources.tile_rows(10**6, 2) == 1008
    assert resources.tile_rows(5924, 2) == 741  # eight columns of tiles for two threads
    assert resources.tile_rows(10**6, 16) == 512  # two megabytes a thread, half of them
    assert resources.tile_rows(100, 2) == 256


def test_libraries_are_looked_for_again_only_after_an_import(monkeypatch):
    """A BLAS that is imported later, such as that of scipy, is limited too."""
    looked, honest = [], resources.ThreadpoolController

    def noted():
        looked.append(True)
        return honest()

    monkeypatch.setattr(resources, "ThreadpoolController", noted)
    resources._loaded_libraries.cache_clear()
    for _ in range(2):
        with resources.single_blas_thread():
            pass
    assert len(looked) == 1
    monkeypatch.setitem(sys.modules, "a_module_imported_now", resources)
    with resources.single_blas_thread():
        pass
    assert len(looked) == 2


def test_overlapping_calls_leave_blas_as_it_was(clustered):
    from concurrent.futures import ThreadPoolExecutor

    from threadpoolctl import threadpool_info

    evaluate(*clustered, nmi=False)  # loads all libraries
    before = threadpool_info()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: evaluate(*clustered, nmi=False), range(8)))
    assert all(result == results[0] for result in results)
    assert threadpool_info() == before


def test_results_come_in_order_and_few_run_ahead():
    begun = []

    def work(n):
        begun.append(n)
        return -n

    found = results_of(work, range(1000), 2)
    assert [next(found) for _ in range(5)] == [0, -1, -2, -3, -4]
    found.close()
    assert len(begun) < 50
    assert list(results_of(work, range(100), 3)) == [-n for n in range(100)]


def test_after_an_error_no_waiting_task_of_a_pool_begins():
    stopped, begun = Event(), []

    def work(n):
        begun.append(n)
        assert stopped.wait(20)

    def fail():
        with pool(1, stopped.set) as executor:
            for n in range(3):
                executor.submit(work, n)
            while not begun:
                time.sleep(0.01)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert begun == [0]
