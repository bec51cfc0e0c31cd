"""Fixtures of the tests on fake hosts: one run, its losses on one host, and the hosts."""

import json

import fake_hosts
import pytest
import rank_helpers
from cluster_jobs import ENVIRONMENT, STEPS, arguments
from launching import losses, make_run


def pytest_collection_modifyitems(items):
    if reason := fake_hosts.missing():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A ZeRO-3 RTD run of one row per micro-batch, so that 1, 2 and 3 ranks can share its batch."""
    root = tmp_path_factory.mktemp("cluster")
    make_run(root, steps=str(STEPS), global_batch_size="6", micro_batch_size="1",
             eval_every="1000", save_every="2")
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    (root / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    (root / "hostfile").write_text("host1 slots=1\nhost2 slots=1\n")
    lines = [f"{key}={value}\n" for key, value in ENVIRONMENT.items()]
    (root / ".deepspeed_env").write_text("".join(lines))
    return root


@pytest.fixture(scope="module")
def one_host(work):
    """The losses of two ranks on one host."""
    rank_helpers.run(2, arguments(work, "one"), work / "one.log")
    return losses(work / "one")


@pytest.fixture
def hosts(work):
    """Three hosts; all that a test leaves running on them ends with it."""
    with fake_hosts.FakeHosts(3, work) as hosts:
        yield hosts
