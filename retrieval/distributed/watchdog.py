"""End all processes of a job soon after one of them ends, whatever they are doing.

Rank 0 holds a TCP connection to every other rank. The operating system closes the connections of
a process that is killed, and its keepalive finds out when a machine is gone: neither needs a
process that answers, so a rank that computes for an hour is never taken for dead.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from retrieval import signals
from retrieval.distributed.interfaces import own_address

if TYPE_CHECKING:
    from torch.distributed import Store

DONE = "done"  # said by a rank that needs the others no longer; all but rank 0 then wait for it
INTERRUPTED = "interrupted"  # said by a rank that ends because of Ctrl-C
LONGEST = 300  # bytes of a message, which is one line
WAIT = 20.0  # seconds until all ranks are connected
CLEAN_UP = 10.0  # seconds that Ctrl-C takes at most
HEARD = 0.5  # seconds until others have heard of Ctrl-C: before a connection of torch breaks
NOTICE = 2.0  # seconds until the end of a process is surely seen
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # 30 s until it is noticed


class Watchdog:
    """A thread that ends this process with exit code 1 and one line when another rank has ended."""

    def __init__(
        self, rank: int, peers: dict[socket.socket, str], clean_up: float = CLEAN_UP
    ) -> None:
        """clean_up: seconds that the main thread has to answer the Ctrl-C of another rank."""
        self.rank, self.peers, self.clean_up = rank, peers, clean_up
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.noticed, self.ended = threading.Event(), ""  # the first rank that ended, in words
        for peer in peers:
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name in KEEPALIVE.keys() & vars(socket).keys():  # macOS lacks some
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), KEEPALIVE[name])
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    @classmethod
    def start(cls, store: Store, rank: int, size: int, host: str) -> Watchdog:
        """Connect this rank with rank 0, which listens on `host`, and watch."""
        if rank:
            port, token = store.get("watchdog").decode().split()
            peer = socket.create_connection((host, int(port)), timeout=WAIT)
            _send(peer, f"{token} {_name(rank)}")
            return cls(rank, {peer: f"rank 0 on {host}"})
        token = secrets.token_hex(16)
        peers: dict[socket.socket, str] = {}
        both = socket.has_dualstack_ipv6()  # IPv4 and IPv6
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=both)
        with server:
            server.settimeout(WAIT)
            store.set("watchdog", f"{server.getsockname()[1]} {token}")
            while len(peers) < size - 1:
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    for peer in peers:
                        peer.close()
                    raise TimeoutError(_missing(peers.values(), size)) from None
                peer.settimeout(WAIT)
                given, _, name = _receive(peer).partition(" ")
                if secrets.compare_digest(given.encode(), token.encode()):
                    peers[peer] = name
                else:  # a stranger
                    peer.close()
        return cls(rank, peers)

    @property
    def address(self) -> str:
        """The address by which another machine reaches this one; empty if there is no other."""
        return next(filter(None, map(own_address, self.peers)), "")

    def _watch(self) -> None:
        """Wait for the first rank that ends without having said that it is done."""
        watched, waiting = selectors.DefaultSelector(), set()
        for each in self.peers:
            watched.register(each, selectors.EVENT_READ)
        while watched.get_map():
            for key, _ in watched.select():
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                said = _receive(peer)
                if said == DONE and self.rank == 0:
                    waiting.add(peer)
                    continue
                if said == DONE or peer in waiting:
                    watched.unregister(peer)
                    if said == INTERRUPTED and not signals.happened():
                        self._pass_on()  # without a limit of time: this rank needs no other
                    continue
                self.ended = said or self.peers[peer]
                self.noticed.set()
                if said == INTERRUPTED:
                    self._interrupt()
                self._end()
                return

    def _interrupt(self) -> None:
        """Let the main thread clean up and say how to continue, unless it has finished."""
        if self._pass_on():
            self.stopped.wait(self.clean_up)

    def _pass_on(self) -> bool:
        """Interrupt the main thread unless it has finished; return whether that was done."""
        with self.lock:
            if not self.stopped.is_set():
                signals.interrupt()
                return True
        return False

    def _end(self) -> None:
        with self.lock:
            if self.stopped.is_set():
                return
            self.stopped.set()
            self._say(self.ended)
            if self.ended == INTERRUPTED:
                signals.end(told=self.rank > 0)
            signals.say(f"Error: Rank {self.rank} stops, because {self.ended} has ended.\n")
            os._exit(1)  # the main thread may be in a product, or wait for the rank that ended

    def stop(self, done: bool = False, failed: bool = False) -> str:
        """Watch no longer, and tell the other ranks whether this one is done or has failed.

        If it is neither, another rank has ended; returns which one, in words. A rank that is done
        may call this once more, to tell rank 0 of Ctrl-C.
        """
        with self.lock:
            if self.stopped.is_set():
                if signals.happened():
                    self._say(INTERRUPTED)
                return self.ended
            self.stopped.set()
        if signals.happened():
            self.ended = INTERRUPTED
        elif not done and not failed:
            self.noticed.wait(NOTICE)
        self._say(DONE if done else self.ended or _name(self.rank))
        if self.ended == INTERRUPTED:
            time.sleep(HEARD)
        return self.ended

    def wait_for_first(self) -> str:
        """Wait until rank 0 is done as well; returns which rank has ended before that, in words.

        Slurm may kill the whole step some time after its first task has ended. If this rank is
        killed while it waits, rank 0 continues.
        """
        while self.thread.is_alive():
            self.thread.join(1)  # on Windows, Ctrl-C does not end a wait without a limit
        return self.ended

    def _say(self, words: str) -> None:
        for peer in self.peers:
            with suppress(OSError):  # gone as well
                _send(peer, words)


def _name(rank: int) -> str:
    return f"rank {rank} on {socket.gethostname()}"


def _missing(names: Iterable[str], size: int) -> str:
    there = {name.split()[1] for name in names}
    missing = [rank for rank in map(str, range(1, size)) if rank not in there]
    ranks = ", ".join(missing)
    return f"These ranks have not connected with rank 0 after {WAIT:.0f} seconds: {ranks}."


def _send(peer: socket.socket, line: str) -> None:
    peer.sendall(f"{line}\n".encode())


def _receive(peer: socket.socket) -> str:
    """The next line, or what there is of it at the end of the connection."""
    try:
        with peer.makefile("rb", buffering=0) as unread:
            return unread.readline(LONGEST).decode("utf-8", "replace").strip()
    except OSError:
        return ""
