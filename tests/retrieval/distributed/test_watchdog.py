"""The watchdogs of two ranks in one process. test_processes.py has ranks that are really killed."""

import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Queue

import pytest

from retrieval.distributed import watchdog
from retrieval.distributed.watchdog import Watchdog
from tests.forks import Forked


class Board:
    """A store with one value, which is waited for."""

    def __init__(self):
        self.value = Future()

    def set(self, name, value):
        self.value.set_result(value.encode())

    def get(self, name):
        return self.value.result(20)


@pytest.fixture
def ended(monkeypatch):
    """Who would have ended, and because of whom, instead of the end of this process."""
    told = Queue()
    monkeypatch.setattr(Watchdog, "_end", lambda self: told.put((self.rank, self.ended)))
    return told


def start(board, rank):
    return Watchdog.start(board, rank, 2, "localhost")


@pytest.fixture
def pair(ended):
    """The watchdogs of ranks 0 and 1."""
    board = Board()
    with ThreadPoolExecutor(2) as pool:
        dogs = list(pool.map(lambda rank: start(board, rank), range(2)))
    threads = watching()
    yield dogs
    close(dogs, threads)


def watching():
    """The threads of both watchdogs. They run until a connection ends or a rank is done."""
    threads = [each for each in threading.enumerate() if "(_watch)" in each.name]
    assert len(threads) == 2, threading.enumerate()
    return threads


def close(dogs, threads):
    """End the connections, then the threads that watch them."""
    peers = [peer for dog in dogs for peer in dog.peers]
    for peer in peers:
        with suppress(OSError):  # ended at the other side
            peer.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for peer in peers:
        peer.close()


def test_a_rank_whose_connection_ends_is_noticed_by_name(pair, ended):
    [connection] = pair[1].peers
    connection.shutdown(socket.SHUT_WR)  # as the system does when a process is killed
    rank, because = ended.get(timeout=20)
    assert rank == 0
    assert because == f"rank 1 on {socket.gethostname()}"


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system has other names")
def test_a_machine_without_power_is_noticed_within_30_seconds(pair):
    """The system asks a connection that is silent whether the other side is still there."""
    peers = [peer for dog in pair for peer in dog.peers]
    assert len(peers) == 2
    for peer in peers:
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        silent, between, times = (
            peer.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert silent + between * times <= 30


def test_a_rank_that_fails_tells_the_others_who_it_is(pair, ended):
    assert pair[0].stop(failed=True) == ""
    assert ended.get(timeout=20) == (1, f"rank 0 on {socket.gethostname()}")


@pytest.fixture
def pressed(monkeypatch):
    """The interrupts of the main thread."""
    found = Queue()
    monkeypatch.setattr(watchdog.signals, "interrupt", lambda: found.put(True))
    return found


def test_ctrl_c_of_one_rank_reaches_the_others(pair, ended, pressed, monkeypatch):
    monkeypatch.setattr(watchdog.signals, "happened", lambda: True)
    pair[0].clean_up = 0.1
    pair[1].stop(failed=True)
    assert pressed.get(timeout=20)
    assert ended.get(timeout=20) == (0, watchdog.INTERRUPTED)  # it did not end by itself


def test_a_rank_that_has_finished_is_not_interrupted_by_another(pair, ended, pressed, monkeypatch):
    pair[0].stop(done=True)
    monkeypatch.setattr(watchdog.signals, "happened", lambda: True)
    pair[1].stop(failed=True)
    assert pair[0].noticed.wait(20)
    assert ended.get(timeout=20) == (0, watchdog.INTERRUPTED)  # where nothing happens: it stopped
    assert pressed.empty()


# A call of C that lets other threads run and never looks for signals.
BUSY = """
import hashlib, signal, socket, sys
from retrieval import signals
signal.signal(signal.SIGINT, lambda *_: None)  # it may come before the call
from retrieval.distributed.watchdog import INTERRUPTED, Watchdog
signals.left = lambda: "add --resume to continue"
server = socket.create_server(("127.0.0.1", 0))
other = socket.create_connection(server.getsockname())
Watchdog(int(sys.argv[1]), {server.accept()[0]: "another rank"}, clean_up=0.2)
other.sendall(f"{INTERRUPTED}\\n".encode())
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.mark.parametrize(
    ("rank", "told"), [(0, "\nInterrupted: add --resume to continue.\n"), (1, "")]
)
def test_ctrl_c_during_long_work_of_c_is_told_by_the_first_rank(rank, told):
    assert Forked("-c", BUSY, rank).end(timeout=60) == (130, "", told)


def test_a_rank_that_is_done_is_not_missed(pair, ended):
    assert pair[1].stop(done=True) == ""
    [connection] = pair[1].peers
    connection.shutdown(socket.SHUT_WR)
    assert not pair[0].noticed.wait(0.5)
    assert ended.empty()
    assert pair[0].stop(done=True) == ""


def test_other_ranks_wait_until_rank_0_is_done(pair):
    first, second = pair
    second.stop(done=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.wait_for_first)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        first.stop(done=True)
        assert waiting.result(20) == ""


def test_a_rank_that_waits_learns_that_rank_0_has_ended(pair):
    first, second = pair
    second.stop(done=True)
    [connection] = first.peers
    connection.shutdown(socket.SHUT_WR)
    assert second.wait_for_first() == "rank 0 on localhost"


@pytest.mark.parametrize("also", [False, True])
def test_ctrl_c_of_a_rank_that_waits_interrupts_rank_0_once(also, pair, ended, monkeypatch):
    """Rank 0, which may have received Ctrl-C too, then takes its time: nothing is broken."""
    pressed = Queue()
    first, second = pair
    happened = {first.thread: also, threading.current_thread(): True}
    monkeypatch.setattr(watchdog.signals, "interrupt", lambda: pressed.put(True))
    second.stop(done=True)
    monkeypatch.setattr(watchdog.signals, "happened", lambda: happened[threading.current_thread()])
    second.stop(failed=True)
    first.thread.join(20)
    assert pressed.qsize() == (not also)
    assert ended.empty()


def test_a_stranger_is_not_taken_for_a_rank(ended):
    board = Board()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(start, board, 0)
        port = int(board.get("watchdog").split()[0])
        with socket.create_connection(("localhost", port), timeout=20) as stranger:
            stranger.sendall(b"guess rank 1 on nowhere\n")
            assert stranger.recv(1) == b""  # closed
            second = start(board, 1)
        first = waiting.result(20)
    threads = watching()
    assert list(first.peers.values()) == [f"rank 1 on {socket.gethostname()}"]
    assert first.stop(done=True) == second.stop(done=True) == ""
    close([first, second], threads)


def test_ranks_that_end_before_they_have_connected_are_named(monkeypatch):
    monkeypatch.setattr(watchdog, "WAIT", 1.0)
    board = Board()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Watchdog.start, board, 0, 4, "localhost")
        port, token = board.get("watchdog").split()
        with socket.create_connection(("localhost", int(port)), timeout=20) as peer:
            peer.sendall(f"{token.decode()} rank 2 on gpu7\n".encode())
            with pytest.raises(TimeoutError, match="after 1 seconds: 1, 3"):
                waiting.result(20)
