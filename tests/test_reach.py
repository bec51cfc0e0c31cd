"""Who answers a connection: a listening rank, also a busy one; a host without that rank; nobody."""

import socket
import time

import pytest

from deberta_ds.cluster import reach
from deberta_ds.cluster.reach import Door, Knock


def test_who_answers():
    door = Door()
    with socket.create_server(("127.0.0.1", 0)) as ended:
        refusing = f"127.0.0.1:{ended.getsockname()[1]}"
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    silent = f"127.0.0.1:{full.getsockname()[1]}"  # its queue is full: the kernel answers no more
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())
    started = time.monotonic()
    knock = Knock({door.address, refusing, silent})
    knock.wait(0.2)
    knock.wait(0.2)
    knock.close()
    assert knock.unanswered == {silent}
    assert 0.4 <= time.monotonic() - started < 5
    door.empty()
    door.empty()
    for each in (door, full, *fillers):
        each.close()


def test_nobody_to_ask():
    started = time.monotonic()
    knock = Knock(set())
    knock.wait(0.1)
    assert not knock.unanswered and time.monotonic() - started >= 0.1


@pytest.mark.parametrize("host", ["::1", "localhost", "no.such.host.invalid"])
def test_a_first_rank_with_an_ipv6_address_or_an_unknown_name_has_a_door(monkeypatch, host):
    """With an IPv6 address as MASTER_ADDR every start ended in a traceback."""
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setattr(reach.psutil, "net_if_addrs", dict)  # no address but the loopback's
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    door = Door()
    assert door.address.startswith("::1:" if host == "::1" else "127.0.0.1:")
    knock = Knock({door.address})
    knock.wait(0.2)
    knock.close()
    door.close()
    assert not knock.unanswered


def test_hosts_cabled_directly_keep_their_address(monkeypatch):
    monkeypatch.setattr(reach, "_towards", lambda host: "169.254.7.1")
    monkeypatch.setattr(reach.psutil, "net_if_addrs", dict)
    assert reach._own_ip() == "169.254.7.1"
    assert not reach._is_seen_by_others("fe80::1")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
