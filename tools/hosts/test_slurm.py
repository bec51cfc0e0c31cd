"""Slurm on two fake hosts: srun, `deepspeed --launcher slurm`, and sbatch with requeue."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import fake_hosts
import pytest
from cluster_jobs import ENVIRONMENT, arguments, needs, run, wait_for
from data_helpers import random_documents, tokenizer_path, tree, write_json_lines
from launching import ROOT, losses

from deberta_ds.config.run_config import DataConfig

pytestmark = needs("sbatch", "slurm-wlm munge")


@pytest.fixture(scope="module")
def cluster(work):
    """(two hosts under Slurm, the environment of its commands)"""
    with fake_hosts.FakeHosts(2, work) as hosts:
        yield hosts, start_slurm(hosts, work)


def test_srun(cluster, work, one_host):
    hosts, environment = cluster
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=none", "--kill-on-bad-exit=1",
               environment["PYTHON"], "launch/pretrain.py", *arguments(work, "srun")]
    run(hosts, work, command, "srun", ROOT, environment)
    assert losses(work / "srun") == one_host


def test_deepspeed_over_slurm(cluster, work, one_host):
    hosts, environment = cluster
    command = ["deepspeed", "--hostfile", str(work / "hostfile"), "--launcher", "slurm",
               "--master_addr", "10.77.0.1", "--launcher_args=--mpi=none --nodes=2",
               str(ROOT / "launch/pretrain.py"), *arguments(work, "deepspeed-slurm")]
    run(hosts, work, command, "deepspeed-slurm", environment=environment)
    assert losses(work / "deepspeed-slurm") == one_host


class Batch:
    """A job of the shipped script with the shipped `data.workers`."""

    def __init__(self, cluster, work: Path, name: str, *more: str):
        self.hosts, self.environment = cluster
        self.out, self.log = work / name, work / f"{name}.log"
        self.log.touch()
        self.number = self.on_host1(
            "sbatch", "--chdir", str(ROOT), "--output", str(self.log), "--time=10",
            "launch/cluster/slurm.sbatch", *arguments(work, name), "--train.steps=2000",
            "--train.save_every=1000", f"--data.workers={DataConfig.workers}", *more).split()[-1]
        wait_for(lambda: len(losses(self.out)) > 1, self.log)

    def on_host1(self, *command: str) -> str:
        return subprocess.run(self.hosts.command("host1", command, ROOT), env=self.environment,
                              text=True, capture_output=True, check=True).stdout

    def show(self, key: str) -> str:
        return re.search(rf"{key}=(\S+)", self.on_host1("scontrol", "show", "job", self.number))[1]


def test_sbatch_saves_on_sigterm_and_requeues(cluster, work, one_host):
    job = Batch(cluster, work, "slurm")
    job.on_host1("scancel", "--signal=TERM", job.number)
    wait_for(lambda: "back into the queue" in job.log.read_text(), job.log)
    wait_for(lambda: job.show("JobState") == "PENDING", job.log)
    # Instead of two minutes from now. In the second of the requeue the daemons still refuse the
    # job's number ("Job credential revoked"), and it would be ended for good.
    job.on_host1("scontrol", "update", f"JobId={job.number}", "StartTime=now+5")
    wait_for(lambda: "resume at step" in job.log.read_text(), job.log)
    job.on_host1("scancel", job.number)
    found = losses(job.out)
    assert all(found[step] == one_host[step] for step in one_host if step in found)


def test_sbatch_requeues_without_the_host_of_a_frozen_rank(cluster, work):
    job = Batch(cluster, work, "frozen", "--train.watchdog_seconds=10")
    rank = subprocess.run(job.hosts.command("host2", ["pgrep", "-of", "launch/pretrain.py"], ROOT),
                          text=True, capture_output=True, check=True).stdout.split()[0]
    subprocess.run(job.hosts.command("host2", ["kill", f"-{signal.SIGSTOP}", rank], ROOT),
                   check=True)
    wait_for(lambda: "back into the queue without host2" in job.log.read_text(), job.log)
    wait_for(lambda: job.show("JobState") == "PENDING" and job.show("ExcNodeList") == "host2",
             job.log)
    job.on_host1("scancel", job.number)


def test_an_array_of_jobs_prepares_a_corpus(cluster, work):
    hosts, environment = cluster
    write_json_lines(work / "text.jsonl", random_documents(300))
    log, out = work / "prepare.log", work / "prepared"
    words = ["tokenize_corpus.py", str(work / "text.jsonl"), "--tokenizer", tokenizer_path(),
             "--unit_bytes", "5000", "--out"]
    # By a variable: the job that finishes the output is queued by the first, and writes there too.
    environment = environment | {"SBATCH_OUTPUT": str(log)}
    line = ["sbatch", "--chdir", str(ROOT), "--array=1-3", "--cpus-per-task=1",
            "launch/cluster/data_prep.sbatch", *words, str(out)]
    subprocess.run(hosts.command("host1", line, ROOT), env=environment, check=True)
    wait_for(lambda: (out / "manifest.json").exists(), log)
    subprocess.run([environment["PYTHON"], f"data_prep/{words[0]}", *words[1:], work / "alone"],
                   cwd=ROOT, env=environment, check=True)
    assert tree(out) == tree(work / "alone")
    assert log.read_text().count("is done; when all are") == 3


SLURM_CONF = """ClusterName=test
SlurmctldHost=host1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge-%h/socket
CredType=cred/munge
StateSaveLocation={state}/controller
SlurmdSpoolDir={state}/spool-%n
SlurmctldPidFile={state}/controller.pid
SlurmdPidFile={state}/daemon-%n.pid
SlurmctldLogFile={state}/controller.log
SlurmdLogFile={state}/daemon-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=host1 NodeAddr=10.77.0.1 CPUs=1 RealMemory=4000 State=UNKNOWN
NodeName=host2 NodeAddr=10.77.0.2 CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=p Nodes=host1,host2 Default=YES MaxTime=INFINITE State=UP
"""


def start_slurm(hosts, work: Path) -> dict[str, str]:
    """Start munge and Slurm inside the hosts; return the environment of its commands."""
    state = work / "slurm_state"
    shutil.rmtree(state, ignore_errors=True)
    (state / "controller").mkdir(parents=True)
    (state / "key").write_bytes(os.urandom(128))
    (state / "key").chmod(0o400)
    (state / "cgroup").mkdir()
    socket = state / "munge.socket"  # one file system, but one socket per host: mounted over it
    conf = SLURM_CONF.replace("{state}/munge-%h/socket", str(socket)).format(state=state)
    (state / "slurm.conf").write_text(conf)
    (state / "cgroup.conf").write_text(
        f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={state}/cgroup\n")
    environment = ENVIRONMENT | {"SLURM_CONF": str(state / "slurm.conf")}

    def on(host: str, command: str) -> None:
        done = subprocess.run(hosts.command(host, ["sh", "-c", command], ROOT), env=environment,
                              capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"

    socket.touch()
    for host in hosts.names:
        own = state / f"munge-{host}"
        own.mkdir()
        on(host, f"munged --force --key-file={state}/key --socket={own}/socket "
                 f"--pid-file={own}/pid --log-file={own}/log --seed-file={own}/seed")
        on(host, f"mount --bind {own}/socket {socket}")
    on("host1", f"slurmctld -f {state}/slurm.conf")
    for host in hosts.names:
        (state / f"spool-{host}").mkdir()
        on(host, f"slurmd -N {host} -f {state}/slurm.conf")
    return environment
