"""Which hosts can be reached over the network, without a word being exchanged.

Every rank listens on a socket, and the kernel completes a connection for it, however busy or frozen
the rank is. A host that does not answer is down, or the link to it is.
"""

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import time

import psutil

_BACKLOG = 4096  # every rank of a large job may ask at once


class Door:
    """A socket that others connect to; `address` is "IP:port" on the way to MASTER_ADDR.

    An IPv6 address stands without brackets: the port is what follows the last colon.
    """

    def __init__(self):
        own = _own_ip()
        self._socket = socket.create_server(("", 0), family=_family(own), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.address = f"{own}:{self._socket.getsockname()[1]}"

    def empty(self) -> None:
        """Drop the connections that were made since the last call."""
        with contextlib.suppress(OSError):  # BlockingIOError: no more
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        self._socket.close()


class Knock:
    """Connections to some addresses, all at once; `unanswered` shrinks as they are made."""

    def __init__(self, addresses: set[str]):
        self.unanswered = set(addresses)
        self._selector = selectors.DefaultSelector()
        for address in addresses:
            host, port = address.rsplit(":", 1)
            knock = socket.socket(_family(host))
            knock.setblocking(False)
            if knock.connect_ex((host, int(port))) in (0, errno.EINPROGRESS):
                self._selector.register(knock, selectors.EVENT_WRITE, address)
            else:  # the kernel knows no way there
                knock.close()

    def wait(self, seconds: float) -> None:
        """Wait this long and note who answers."""
        deadline = time.monotonic() + seconds
        while self._selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                # A refusal is an answer: the host is there, and its rank has ended.
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (
                        0, errno.ECONNREFUSED, errno.ECONNRESET):
                    self.unanswered.discard(key.data)
                self._forget(key.fileobj)
        time.sleep(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._forget(key.fileobj)
        self._selector.close()

    def _forget(self, knock: socket.socket) -> None:
        self._selector.unregister(knock)
        knock.close()


def _own_ip() -> str:
    """Return this host's address on the way to the first rank (no packet is sent).

    On the first rank's host that may be a loopback address: Debian's /etc/hosts has 127.0.1.1 for
    the host's own name. The others could not knock there, so an address of a network card is taken.
    """
    address = _towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    if _is_seen_by_others(address):
        return address
    cards = {name: card.address for name, cards in psutil.net_if_addrs().items() for card in cards
             if card.family == _family(address) and _is_seen_by_others(card.address)}
    named = (os.environ.get(name) for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"))
    return next((cards[name] for name in named if name in cards),
                next(iter(cards.values()), address))


def _towards(host: str) -> str:
    """Return the own address on the way to `host`, IPv4 where it has one; 127.0.0.1 without a way.
    """
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        for family, _, _, _, place in sorted(found, key=lambda one: one[0] != socket.AF_INET):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(place)
                return probe.getsockname()[0]
    return "127.0.0.1"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _is_seen_by_others(address: str) -> bool:
    found = ipaddress.ip_address(address)
    # fe80:: means nothing without the name of a card; 169.254 is that of hosts cabled directly.
    return not found.is_loopback and not (found.version == 6 and found.is_link_local)
