"""Memory that all ranks of a host share: sums and gathers on CPUs without gloo's sockets.

A number is written once by the rank that has it and read by the rank that needs it, two to seven
times as fast as gloo. Every sum has gloo's order, and so gloo's bits.
"""

import mmap
import os
import secrets
import socket
import weakref
import zlib
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

_SLOT = 2 << 20  # bytes that a rank writes before the others read: they stay in cache
_MOST_RANKS = 64  # whose slots are 256 MiB; every rank has a socket for every other
_SEGMENT = 1 << 20  # bytes of gloo's ring that travel at a time, at most
_SECRET = 16  # bytes that tell these ranks from others
_NUMBER = 4  # bytes of a rank, of a turn and of a checksum
_MEET_SECONDS = 30.0

Spans = list[tuple[int, int]]  # of flat values: first and last, for each rank


class HostMemory:
    """Two slots for each rank, taken in turn, and a socket to each other rank to wait for it.

    One wait a slot is enough: who writes a slot again has seen every rank come to the next one,
    and so leave it. All ranks must call the same methods in the same order; a rank that does not
    is an error on the others.
    """

    def __init__(self, rank: int, memory: mmap.mmap, peers: dict[int, socket.socket]):
        self._rank, self._peers = rank, peers
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(2, len(peers) + 1, _SLOT)
        self._turn = 0
        _open.add(self)

    def add(self, values: Tensor, spans: Spans, total: Tensor, chunk: int) -> None:
        """Add up flat `values` over the ranks; rank r gets the sum of spans[r].

        It is written to `total`, which may be that part of `values`. `chunk`: of the ring whose
        order is followed.
        """
        takers = [rank for rank, (first, last) in enumerate(spans) if last > first]
        width = _SLOT // values.element_size() // len(takers)
        collective = _checksum("add", values.dtype, spans, chunk)
        for start in range(0, _longest(spans), width):
            slots = self._next_slots(values.dtype)
            for place, rank in enumerate(takers):
                if rank != self._rank:
                    part = _part(values, spans[rank], start, width)
                    slots[self._rank, place * width : place * width + len(part)].copy_(part)
            self._wait(collective)
            if self._rank not in takers:
                continue
            mine = _part(values, spans[self._rank], start, width)
            at = takers.index(self._rank) * width
            parts = [mine if rank == self._rank else slots[rank, at : at + len(mine)]
                     for rank in range(len(spans))]
            first = spans[self._rank][0] + start
            _add_in_turn(total[start : start + width], parts, first, chunk)

    def gather(self, values: Tensor, spans: Spans, owner: int | None = None) -> None:
        """Fill flat `values` with what rank r has at spans[r]: on every rank, or on `owner`."""
        width = _SLOT // values.element_size()
        collective = _checksum("gather", values.dtype, spans, owner)
        for start in range(0, _longest(spans), width):
            slots = self._next_slots(values.dtype)
            parts = [_part(values, span, start, width) for span in spans]
            slots[self._rank, : len(parts[self._rank])].copy_(parts[self._rank])
            self._wait(collective)
            for rank, part in enumerate(parts):
                if rank != self._rank and owner in (None, self._rank):
                    part.copy_(slots[rank, : len(part)])

    def close(self) -> None:
        """Let go of the memory and the sockets."""
        for peer in self._peers.values():
            peer.close()
        self._slots = None

    def _next_slots(self, dtype: torch.dtype) -> Tensor:
        self._turn += 1
        return self._slots[self._turn % 2].view(dtype)

    def _wait(self, collective: bytes) -> None:
        """Wait until every rank is here. RuntimeError if one has left, or is elsewhere."""
        here = (self._turn % (1 << 8 * _NUMBER)).to_bytes(_NUMBER, "little") + collective
        for peer in self._peers.values():
            try:
                peer.sendall(here)
            except (BrokenPipeError, ConnectionResetError):
                pass  # what the rank sent before it left still counts
        for rank, peer in self._peers.items():
            try:
                there = _receive(peer, len(here))
            except TimeoutError:
                raise RuntimeError(f"rank {rank} did not come within {peer.gettimeout():g} s"
                                   ) from None
            except OSError:
                raise RuntimeError(f"rank {rank} closed its connection") from None
            if there != here:
                raise RuntimeError(f"rank {rank} is in another collective than this rank")


_open: weakref.WeakSet[HostMemory] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close a fork's sockets: a worker of a rank that was killed must not look like the rank."""
    for memory in list(_open):
        memory.close()


os.register_at_fork(after_in_child=_close_in_child)


def ring_chunk(numel: int, size: int, ranks: int) -> int:
    """Return the numbers, of `size` bytes each, in a chunk of gloo's all_reduce."""
    segments = _rounded_up(max(-(-numel * size // _SEGMENT), ranks * 2), ranks)
    return segments // ranks * -(-numel // segments)


def ring_chunk_of_reduce(numel: int, size: int, ranks: int) -> int:
    """Return the numbers in a chunk of gloo's reduce, which makes its last segments smaller."""
    segment = _rounded_up(min(-(-numel * size // (ranks * 2)), _SEGMENT), size)
    segments = _rounded_up(max(-(-numel * size // segment), ranks * 2), ranks)
    return segments // ranks * segment // size


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _longest(spans: Spans) -> int:
    return max(last - first for first, last in spans)


def _part(values: Tensor, span: tuple[int, int], start: int, width: int) -> Tensor:
    first, last = span
    return values[min(first + start, last) : min(first + start + width, last)]


def _checksum(*things) -> bytes:
    return zlib.crc32(repr(things).encode()).to_bytes(_NUMBER, "little")


def _add_in_turn(total: Tensor, parts: list[Tensor], first: int, chunk: int) -> None:
    """Write the sum of `parts` into `total`, which may be one of them; it begins at number `first`.

    gloo sends a chunk for each rank around a ring: chunk c starts at rank c - 1 and goes down to
    rank c, and each rank adds its own.
    """
    start = 0
    while start < len(total):
        owner = (first + start) // chunk
        end = min(len(total), (owner + 1) * chunk - first)
        subtotal, *others = [parts[(owner - 1 - turn) % len(parts)][start:end]
                             for turn in range(len(parts))]
        for other in others[:-1]:
            subtotal = subtotal + other
        torch.add(subtotal, others[-1], out=total[start:end])
        start = end


# ------------------------------------------------------------------------------------- meeting


@dataclass(frozen=True)
class _Door:
    """A socket's name, known to this host alone, and what to say there."""

    name: str
    secret: bytes


def connect(rank: int, size: int, gather_objects, seconds: float) -> HostMemory | None:
    """Return memory that `size` ranks share, or None on all of them if any is out of reach.

    All ranks call it. `gather_objects` gives every rank's object to all of them. Ranks on another
    host, or in another container, do not find each other's sockets. `seconds` is how long a rank
    waits for another.
    """
    if not 1 < size <= _MOST_RANKS:
        return None
    with ExitStack() as temporary, ExitStack() as lasting:
        listener, door, file = _or_none(_open_door, rank, size, temporary) or (None, None, None)
        doors = gather_objects(door)
        peers = None if None in doors else _or_none(_knock, doors[:rank], rank, lasting)
        if not all(gather_objects(peers is not None)):
            return None
        memory = _or_none(_meet, rank, size, listener, door.secret, file, peers, lasting)
        if memory is None:
            temporary.close(), lasting.close()  # at once, as others wait for this rank
        if not all(gather_objects(memory is not None)):
            return None
        for peer in peers.values():
            peer.settimeout(seconds)
        lasting.pop_all()
        return HostMemory(rank, memory, peers)


def _or_none(function, *arguments):
    try:
        return function(*arguments)
    except OSError:
        return None


def _open_door(rank: int, size: int, temporary: ExitStack) -> tuple[socket.socket, _Door, int]:
    """Return a socket under a name of Linux' own space, which leaves no file, and rank 0's memory.

    That has a descriptor, and ends with the last rank that has mapped it.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("memory without a file needs Linux")
    door = _Door("\0deberta_ds-" + secrets.token_hex(_SECRET), secrets.token_bytes(_SECRET))
    listener = temporary.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(door.name)
    listener.listen(size)
    listener.settimeout(_MEET_SECONDS)
    if rank:
        return listener, door, -1
    file = os.memfd_create("deberta_ds")
    temporary.callback(os.close, file)
    os.ftruncate(file, 2 * size * _SLOT)
    return listener, door, file


def _knock(doors: list[_Door], rank: int, lasting: ExitStack) -> dict[int, socket.socket]:
    """Return connections to the ranks below this one."""
    peers = {}
    for other, door in enumerate(doors):
        peers[other] = lasting.enter_context(socket.socket(socket.AF_UNIX))
        peers[other].settimeout(_MEET_SECONDS)
        peers[other].connect(door.name)
        peers[other].sendall(door.secret + rank.to_bytes(_NUMBER, "little"))
    return peers


def _meet(rank: int, size: int, listener: socket.socket, secret: bytes, file: int,
          peers: dict[int, socket.socket], lasting: ExitStack) -> mmap.mmap:
    """Add the ranks above this one to `peers`; return the memory that rank 0 hands to all."""
    while len(peers) < size - 1:
        peer = lasting.enter_context(listener.accept()[0])
        peer.settimeout(_MEET_SECONDS)
        said = _receive(peer, _SECRET + _NUMBER)
        if said[:_SECRET] == secret:
            peers[int.from_bytes(said[_SECRET:], "little")] = peer
    if rank:
        _, files, *_ = socket.recv_fds(peers[0], 1, 1)
        if not files:
            raise OSError("rank 0 has left, or there is no descriptor to be had")
        file = files[0]
    else:
        for peer in peers.values():
            socket.send_fds(peer, [b"\0"], [file])
    try:
        return mmap.mmap(file, 2 * size * _SLOT)
    finally:
        if rank:
            os.close(file)


def _receive(peer: socket.socket, count: int) -> bytes:
    """Return so many bytes; OSError if there are no more."""
    received = b""
    while len(received) < count:
        more = peer.recv(count - len(received))
        if not more:
            raise ConnectionResetError("closed by the other side")
        received += more
    return received
