"""Who answers a connection: a listening rank, also a busy one; a host without that rank; nobody."""

import socket
import time

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
