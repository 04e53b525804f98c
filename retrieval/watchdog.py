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
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

DONE, FAILED = b"done", b"fail"
NAME = 96  # bytes of a message behind FAILED: the rank that ended, in words
WAIT = 20.0  # seconds until all ranks are connected
NOTICE = 2.0  # seconds until the end of a process is surely seen
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # 30 s until it is noticed


class Watchdog:
    """A thread that ends this process with exit code 1 and one line when another rank has ended."""

    def __init__(self, rank: int, peers: dict[socket.socket, str]) -> None:
        self.rank, self.peers = rank, peers
        self.lock, self.stopped = threading.Lock(), False
        self.noticed, self.ended = threading.Event(), ""  # the first rank that ended, in words
        for peer in peers:
            _keep_alive(peer)
        threading.Thread(target=self._watch, daemon=True).start()

    @classmethod
    def start(cls, store: Store, rank: int, size: int, host: str) -> Watchdog:
        """Connect this rank with rank 0, which listens on `host`, and watch."""
        if rank:
            port, token = bytes(store.get("watchdog")).split()
            peer = socket.create_connection((host, int(port)), timeout=WAIT)
            peer.sendall(token + _padded(_name(rank)))
            peer.settimeout(None)
            return cls(rank, {peer: f"rank 0 on {host}"})
        token = secrets.token_hex(16).encode()
        peers: dict[socket.socket, str] = {}
        with _server(size) as server:
            store.set("watchdog", b"%d %s" % (server.getsockname()[1], token))
            while len(peers) < size - 1:
                peer, _ = server.accept()
                peer.settimeout(WAIT)
                if secrets.compare_digest(_receive(peer, len(token)), token):
                    peers[peer] = _receive(peer, NAME).decode().rstrip()
                    peer.settimeout(None)
                else:  # a stranger
                    peer.close()
        return cls(rank, peers)

    def _watch(self) -> None:
        """Wait for the first rank that ends without having said that it is done."""
        watched = selectors.DefaultSelector()
        for each in self.peers:
            watched.register(each, selectors.EVENT_READ)
        while watched.get_map():
            for key, _ in watched.select():
                peer = key.fileobj
                assert isinstance(peer, socket.socket)
                said = _receive(peer, len(DONE))
                if said == DONE:
                    watched.unregister(peer)
                    continue
                told = _receive(peer, NAME).decode().rstrip() if said == FAILED else ""
                self.ended = told or self.peers[peer]
                self.noticed.set()
                self._end()
                return

    def _end(self) -> None:
        with self.lock:
            if self.stopped:
                return
            self.stopped = True
            self._say(FAILED + _padded(self.ended))
            line = f"Error: Rank {self.rank} stops, because {self.ended} has ended.\n"
            os.write(2, line.encode())
            os._exit(1)  # the main thread may be in a product, or wait for the rank that ended

    def stop(self, done: bool = False, failed: bool = False) -> str:
        """Watch no longer, and tell the other ranks whether this one is done or has failed.

        If it is neither, another rank has ended; returns which one, in words.
        """
        with self.lock:
            if self.stopped:
                return self.ended
            self.stopped = True
        if not done and not failed:
            self.noticed.wait(NOTICE)
        self._say(DONE if done else FAILED + _padded(self.ended or _name(self.rank)))
        return self.ended

    def _say(self, words: bytes) -> None:
        for peer in self.peers:
            with suppress(OSError):  # gone as well
                peer.sendall(words)


def _server(backlog: int) -> socket.socket:
    """A socket that listens on any free port, for IPv4 and IPv6 where the machine has both."""
    if socket.has_dualstack_ipv6():
        server = socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
        )
    else:
        server = socket.create_server(("", 0), backlog=backlog)
    server.settimeout(WAIT)
    return server


def _name(rank: int) -> str:
    return f"rank {rank} on {socket.gethostname()}"


def _padded(name: str) -> bytes:
    return name.encode()[:NAME].ljust(NAME)


def _receive(peer: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer at the end of the connection."""
    got = b""
    while len(got) < count:
        try:
            part = peer.recv(count - len(got))
        except OSError:
            part = b""
        if not part:
            break
        got += part
    return got


def _keep_alive(peer: socket.socket) -> None:
    """Let the system find out when the other machine is gone."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
