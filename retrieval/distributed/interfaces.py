"""Find the network interface by which this machine reaches the others of a job.

torch's gloo takes the address that the name of the machine resolves to. Many systems resolve it to
127.0.1.1, where no other machine can connect.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

SIOCGIFADDR = 0x8915  # Linux: ask for the IPv4 address of an interface
IPV6 = Path("/proc/net/if_inet6")


def own_address(connection: socket.socket) -> str:
    """The address of this machine at a connection; empty if that does not leave the machine."""
    address = ipaddress.ip_address(connection.getsockname()[0].partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return "" if address.is_loopback else str(address)


def interface_of(address: str, ipv6: Path = IPV6) -> str | None:
    """The name of the interface with this address, such as eth0; None where it cannot be found.

    ipv6: the file in which Linux lists the IPv6 addresses of its interfaces.
    """
    wanted = ipaddress.ip_address(address)
    for name in _names():
        if wanted in (_ipv4(name), *_ipv6(name, ipv6)):
            return name
    return None


def _names() -> list[str]:
    if sys.platform != "linux":
        return []
    return [name for _, name in socket.if_nameindex()]


def _ipv4(name: str) -> ipaddress.IPv4Address | None:
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        found = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return ipaddress.IPv4Address(found[20:24])
    return None


def _ipv6(name: str, file: Path) -> list[ipaddress.IPv6Address]:
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [ipaddress.IPv6Address(int(line[0], 16)) for line in lines if line[-1] == name]
