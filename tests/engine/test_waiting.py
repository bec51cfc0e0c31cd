"""A rank that waits for others in the start says for whom, and ends at once on a signal."""

import signal
import subprocess
import sys

import pytest
from launching import ENVIRONMENT, ROOT

from deberta_ds.cluster import dist

# A shell has its background jobs ignore Ctrl-C, and so would this one.
CODE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from deberta_ds.cluster import dist
dist.WAIT_SECONDS = 0.2
from deberta_ds.engine import engine
engine.init_distributed()
"""


@pytest.mark.multi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_waiting_rank(number):
    """SIGTERM and one Ctrl-C did nothing for ten minutes, and nothing said what it waited for."""
    places = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": "9"}
    rank = subprocess.Popen([sys.executable, "-c", CODE], cwd=ROOT, env=ENVIRONMENT | places,
                            stderr=subprocess.PIPE, text=True)
    for line in rank.stderr:
        if line.startswith("rank 1 of 2 waits for rank 0 at 127.0.0.1:9 (from MASTER_ADDR"):
            break
    rank.send_signal(number)
    rank.stderr.read()
    assert rank.wait(timeout=30) == -number


def test_ctrl_c_is_the_run_s_again_once_all_ranks_are_there():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with dist.saying_who_waits():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
