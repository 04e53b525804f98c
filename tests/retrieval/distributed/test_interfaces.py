"""The interface by which other machines reach this one."""

import socket
import sys

import pytest

from retrieval.distributed.interfaces import interface_of, own_address


@pytest.fixture
def connection():
    """Connect to a server on an address of this machine."""
    opened = []

    def connect(host, family=socket.AF_INET):
        both = family == socket.AF_INET6
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        client = socket.create_connection((host, server.getsockname()[1]))
        accepted = server.accept()[0]
        opened.extend((server, client, accepted))
        return accepted

    yield connect
    for each in opened:
        each.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_connection_within_the_machine_has_no_address_for_others(connection, family):
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    assert own_address(connection("127.0.0.1", family)) == ""


class Connection:
    def __init__(self, address):
        self.address = address

    def getsockname(self):
        return self.address, 1


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.9.0.1", "10.9.0.1"),
        ("::ffff:10.9.0.1", "10.9.0.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("127.0.1.1", ""),
        ("::ffff:127.0.0.1", ""),
        ("::1", ""),
    ],
)
def test_addresses_of_both_versions(address, found):
    assert own_address(Connection(address)) == found


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found on Linux only")
def test_the_interface_with_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # an address that no machine has


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are found on Linux only")
def test_the_interface_with_an_ipv6_address_is_found(tmp_path):
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "20010db8000000000000000000000007 02 40 00 80     other\n"
        "20010db8000000000000000000000009 01 80 10 80       lo\n"
    )
    assert interface_of("2001:db8::9", listed) == "lo"
    assert interface_of("2001:db8::7", listed) is None  # this machine has no such interface
    assert interface_of("2001:db8::9", tmp_path / "missing") is None  # without IPv6
