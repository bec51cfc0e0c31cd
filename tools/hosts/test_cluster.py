"""The launchers on two and three hosts (network namespaces), and hosts that are lost and come back.

Each launcher has exactly the losses of two ranks on one host.
"""

import re
import sys
import time

import rank_helpers
from cluster_jobs import ENVIRONMENT, arguments, needs, run, wait_for
from launching import ROOT, losses

from deberta_ds.cluster.watchdog import EXIT_STUCK


@needs("pdsh", "pdsh")
def test_deepspeed_over_pdsh(hosts, work, one_host):
    command = ["deepspeed", "--hostfile", str(work / "hostfile"), "--launcher", "pdsh",
               str(ROOT / "launch/pretrain.py"), *arguments(work, "pdsh")]
    text = run(hosts, work, command, "pdsh")
    assert "host2: " in text
    assert losses(work / "pdsh") == one_host


@needs("mpirun", "openmpi-bin")
def test_deepspeed_over_openmpi(hosts, work, one_host):
    command = ["deepspeed", "--hostfile", str(work / "hostfile"), "--launcher", "openmpi",
               "--master_addr", "10.77.0.1", "--launcher_args=--allow-run-as-root",
               str(ROOT / "launch/pretrain.py"), *arguments(work, "openmpi")]
    run(hosts, work, command, "openmpi")
    assert losses(work / "openmpi") == one_host


@needs("mpirun", "openmpi-bin")
def test_mpirun_script(hosts, work, one_host):
    command = ["launch/cluster/openmpi.sh", "host1:1,host2:1", *arguments(work, "mpirun")]
    run(hosts, work, command, "mpirun", ROOT)
    assert losses(work / "mpirun") == one_host


def test_elastic_torchrun_loses_a_host_and_takes_it_back(hosts, work):
    """host1 has the rendezvous store; host2 and host3 train; host3 loses its power, and returns."""
    script, out, log = "launch/cluster/torchrun_elastic.sh", work / "elastic", work / "host2.log"
    endless = [*arguments(work, "elastic"), "--train.steps=2000", "--train.save_every=1"]

    def start_agent(name: str) -> None:
        hosts.start(name, [script, "host1:29400", "1:2", "1", *endless], ROOT, ENVIRONMENT,
                    work / f"{name}.log")

    def layouts() -> list[tuple[int, int, int]]:
        """Return (ranks before, ranks now, step) of each resume."""
        found = re.findall(r"another layout: (\d) ranks?.*?-> (\d) ranks?.*?resume at step (\d+)",
                           log.read_text(), re.DOTALL)
        return [tuple(map(int, resume)) for resume in found]

    hosts.start("host1", [script, "store", "29400"], ROOT, ENVIRONMENT, work / "store.log")
    start_agent("host2")
    start_agent("host3")
    # A save is whole some steps later: it is written while training goes on.
    wait_for(lambda: list(out.glob("checkpoints/*/manifest.json")), log)
    started = time.monotonic()
    hosts.power_off("host3")
    wait_for(lambda: layouts() and max(losses(out)) > layouts()[0][2], log)
    print(f"first step without the host {time.monotonic() - started:.0f} s after its loss")
    started = time.monotonic()
    hosts.power_on("host3")
    start_agent("host3")
    wait_for(lambda: len(layouts()) == 2 and max(losses(out)) > layouts()[1][2] + 2, log)
    print(f"third step with the host {time.monotonic() - started:.0f} s after its return")
    assert [resume[:2] for resume in layouts()] == [(2, 1), (1, 2)]
    hosts.power_off("host2")
    found = losses(out)
    rank_helpers.run(2, [*arguments(work, "unbroken"), "--train.steps=2000",
                         f"--train.stop_after={max(found)}", "--train.save_every=1000"],
                     work / "unbroken.log")
    expected = losses(work / "unbroken")
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in found) < 1e-5


def test_the_watchdog_names_a_host_whose_link_is_down(hosts, work):
    """A short cut is ridden out; a lasting one is named, by the side that has rank 0."""
    out = work / "cut"
    command = [sys.executable, "launch/pretrain.py", *arguments(work, "cut"), "--train.steps=2000",
               "--train.save_every=2000", "--train.watchdog_seconds=10"]
    ranks = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "host1", "MASTER_PORT": "29500"}
    logs = [work / f"cut-{name}.log" for name in hosts.names]
    processes = [hosts.start(name, command, ROOT, ENVIRONMENT | ranks | {"RANK": str(rank)}, log)
                 for rank, (name, log) in enumerate(zip(hosts.names, logs, strict=True))]
    wait_for(lambda: len(losses(out)) >= 3, logs[0])
    hosts.cut("host3")
    time.sleep(1)
    hosts.heal("host3")
    ridden_out = len(losses(out)) + 3
    wait_for(lambda: len(losses(out)) >= ridden_out, logs[0])
    hosts.cut("host3")
    started = time.monotonic()
    assert [process.wait(timeout=120) for process in processes] == [EXIT_STUCK] * 3
    seconds = time.monotonic() - started
    print(f"ended {seconds:.0f} s after the cut")
    assert seconds < 45  # 10 s where the machine is not shared
    texts = [log.read_text() for log in logs]
    for text in texts[:2]:
        assert re.search(r"rank 2 on host3 \(pid \d+\): SILENT", text), text[:4000]
        assert not re.search(r"rank [01] on host[12] .*SILENT", text)
    assert "the network between it and this node is down" in texts[2]
