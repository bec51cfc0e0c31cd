"""Memory that all ranks of a host share: sums and gathers on CPUs without gloo's sockets.

A number is written once by the rank that has it and read by the rank that needs it, so 256 MiB
between two ranks take a fourth of the time. Every sum has gloo's order, and so gloo's bits.
"""

import mmap
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

_SLOT = 2 << 20  # bytes that a rank writes before the others read: they stay in cache
_MOST_RANKS = 64  # whose slots are 256 MiB; every rank has a socket for every other
_SEGMENT = 1 << 20  # bytes of gloo's ring that travel at a time, at most
_WORD = 16  # bytes of the word that tells these ranks from others
_RANK = 4  # bytes of a rank's number
_MEET_SECONDS = 30.0


class HostMemory:
    """Two slots for each rank, taken in turn, and a socket to each other rank to wait for it.

    One wait a slot is enough: who writes a slot again has seen every rank come to the next one,
    and so leave it. All ranks must call the same methods in the same order.
    """

    def __init__(self, rank: int, memory: mmap.mmap, peers: dict[int, socket.socket]):
        self._rank, self._peers = rank, peers
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(2, len(peers) + 1, _SLOT)
        self._turn = 0
        # A worker of a rank that was killed must not look like the rank.
        os.register_at_fork(after_in_child=self.close)

    def wait(self) -> None:
        """Wait until every rank is here. RuntimeError if one has left."""
        for peer in self._peers.values():
            with suppress(BrokenPipeError, ConnectionResetError):  # what it sent still counts
                peer.sendall(b"\0")
        for rank, peer in self._peers.items():
            with suppress(ConnectionResetError):
                if peer.recv(1):
                    continue
            raise RuntimeError(f"rank {rank} closed its connection")

    def add(self, values: Tensor, spans: list[tuple[int, int]], total: Tensor, chunk: int) -> None:
        """Add up flat `values` over the ranks, where rank r needs it: at first, last = spans[r].

        This rank's sum is written to `total`, which may be that part of `values`. `chunk`: of the
        ring whose order is followed.
        """
        needed = [rank for rank, (first, last) in enumerate(spans) if last > first]
        width = _SLOT // values.element_size() // max(1, len(needed))
        longest = max(last - first for first, last in spans)
        for start in range(0, longest, width):
            slots = self._next_slots(values.dtype)
            for place, rank in enumerate(needed):
                part = _part(values, spans[rank], start, width)
                if rank != self._rank:
                    slots[self._rank, place * width : place * width + len(part)].copy_(part)
            self.wait()
            if self._rank in needed:
                mine = _part(values, spans[self._rank], start, width)
                at = needed.index(self._rank) * width
                parts = [mine if rank == self._rank else slots[rank, at : at + len(mine)]
                         for rank in range(len(spans))]
                _add_in_turn(total[start : start + width], parts,
                             spans[self._rank][0] + start, chunk)

    def gather(self, values: Tensor, spans: list[tuple[int, int]]) -> None:
        """Fill flat `values` on every rank with what rank r has at first, last = spans[r]."""
        width = _SLOT // values.element_size()
        longest = max(last - first for first, last in spans)
        for start in range(0, longest, width):
            slots = self._next_slots(values.dtype)
            parts = [_part(values, span, start, width) for span in spans]
            slots[self._rank, : len(parts[self._rank])].copy_(parts[self._rank])
            self.wait()
            for rank, part in enumerate(parts):
                if rank != self._rank:
                    part.copy_(slots[rank, : len(part)])

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _next_slots(self, dtype: torch.dtype) -> Tensor:
        self._turn ^= 1
        return self._slots[self._turn].view(dtype)


def _part(values: Tensor, span: tuple[int, int], start: int, width: int) -> Tensor:
    first, last = span
    return values[min(first + start, last) : min(first + start + width, last)]


def _add_in_turn(total: Tensor, parts: list[Tensor], first: int, chunk: int) -> None:
    """Write the sum of `parts` into `total`, which may be one of them; it begins at number `first`.

    gloo sends a chunk for each rank around a ring: chunk c starts at rank c - 1 and goes down to
    rank c, and each rank adds its own.
    """
    start = 0
    while start < len(total):
        owner = (first + start) // chunk
        end = min(len(total), (owner + 1) * chunk - first)
        sum_, *others = [parts[(owner - 1 - turn) % len(parts)][start:end]
                         for turn in range(len(parts))]
        for other in others[:-1]:
            sum_ = sum_ + other
        torch.add(sum_, others[-1], out=total[start:end])
        start = end


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


def connect(rank: int, size: int, gather_objects, seconds: float) -> HostMemory | None:
    """Return memory that `size` ranks share, or None on all of them if any is out of reach.

    All ranks call it. `gather_objects` gives every rank's object to all of them. Ranks on another
    host, or in another container, do not find each other's sockets. `seconds` is how long a rank
    waits for another.
    """
    if not 1 < size <= _MOST_RANKS or not hasattr(os, "memfd_create"):
        return None  # the same on every rank
    listener, door = _listen(size)
    doors = gather_objects(door)
    peers = {other: _knock(doors[other], rank) for other in range(rank)}
    memory = None
    try:
        if all(gather_objects(door is not None and None not in peers.values())):
            peers |= _let_in(listener, door.word, size - 1 - rank)
            memory = _share(rank, peers, 2 * size * _SLOT)
    except OSError:  # no memory, or a rank that knocked has gone
        memory = None
    finally:
        if listener is not None:
            listener.close()
    if not all(gather_objects(memory is not None)):
        for peer in peers.values():
            if peer is not None:
                peer.close()
        return None
    for peer in peers.values():
        peer.settimeout(seconds)
    return HostMemory(rank, memory, dict(sorted(peers.items())))


@dataclass(frozen=True)
class _Door:
    """A socket's name, known to this host alone, and what to say there."""

    name: str
    word: bytes


def _listen(size: int) -> tuple[socket.socket | None, _Door | None]:
    """Return a socket under a name of Linux' own space, which leaves no file; Nones if none."""
    door = _Door("\0deberta_ds-" + secrets.token_hex(_WORD), secrets.token_bytes(_WORD))
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(door.name)
        listener.listen(size)
        listener.settimeout(_MEET_SECONDS)
    except OSError:
        return listener, None
    return listener, door


def _knock(door: _Door | None, rank: int) -> socket.socket | None:
    """Return a connection to another rank, or None where it cannot be reached."""
    if door is None:
        return None
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(_MEET_SECONDS)
    try:
        peer.connect(door.name)
        peer.sendall(door.word + rank.to_bytes(_RANK, "little"))
    except OSError:
        peer.close()
        return None
    return peer


def _let_in(listener: socket.socket, word: bytes, count: int) -> dict[int, socket.socket]:
    """Return the connections of the ranks that know the word."""
    peers = {}
    while len(peers) < count:
        peer, _ = listener.accept()
        peer.settimeout(_MEET_SECONDS)
        said = peer.recv(_WORD + _RANK, socket.MSG_WAITALL)
        if said[:_WORD] == word:
            peers[int.from_bytes(said[_WORD:], "little")] = peer
        else:
            peer.close()
    return peers


def _share(rank: int, peers: dict[int, socket.socket], size: int) -> mmap.mmap:
    """Return the memory that rank 0 makes and hands to the others; it ends with the last rank."""
    if rank:
        _, (file,), *_ = socket.recv_fds(peers[0], 1, 1)
    else:
        file = os.memfd_create("deberta_ds")
        os.ftruncate(file, size)
        for peer in peers.values():
            socket.send_fds(peer, [b"\0"], [file])
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)
