"""The launchers on two and three hosts (network namespaces): the same losses as on one host."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fake_hosts  # noqa: E402
import rank_helpers  # noqa: E402
from launching import ROOT, make_run  # noqa: E402

pytestmark = [pytest.mark.multi, pytest.mark.slow,
              pytest.mark.skipif(bool(fake_hosts.missing()), reason=fake_hosts.missing())]
STEPS = 5
PYTHON_DIRECTORY = Path(sys.executable).parent
ENVIRONMENT = {"HOME": os.environ.get("HOME", "/root"), "DS_ACCELERATOR": "cpu",
               "PATH": f"{PYTHON_DIRECTORY}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
               "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT),
               "PYTHON": sys.executable, "MPIRUN_ARGS": "--allow-run-as-root"}


def needs(tool: str, package: str):
    return pytest.mark.skipif(fake_hosts.find(tool) is None, reason=f"needs {tool} ({package})")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A ZeRO-3 RTD run of one row per micro-batch, so that 1, 2 and 3 ranks can share its batch."""
    root = tmp_path_factory.mktemp("cluster")
    make_run(root, steps=str(STEPS), global_batch_rows="6", micro_batch_rows="1",
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


@pytest.fixture(scope="module")
def hosts(work):
    with fake_hosts.FakeHosts(3, work) as hosts:
        yield hosts


def arguments(work: Path, name: str) -> list[str]:
    return ["--config", str(work / "run.toml"), "--deepspeed_config", str(work / "ds.json"),
            f"--out_dir={work / name}"]


def losses(out: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}


def run(hosts, work: Path, command: list[str], name: str, directory: Path | None = None) -> str:
    """Run `command` on host1; return its output."""
    log = work / f"{name}.log"
    process = hosts.start("host1", command, directory or work, ENVIRONMENT, log)
    try:
        code = process.wait(timeout=300)
    finally:
        process.kill()
    assert code == 0, log.read_text()[-6000:]
    return log.read_text()


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


def test_elastic_torchrun_survives_the_loss_of_a_host(hosts, work, one_host):
    """host1 has the rendezvous store; host2 and host3 train; host3 loses its power at step 3."""
    script, out = "launch/cluster/torchrun_elastic.sh", work / "elastic"
    store = hosts.start("host1", [script, "store", "29400"], ROOT, ENVIRONMENT, work / "store.log")
    slow = [*arguments(work, "elastic"), f"--train.steps={STEPS}", "--train.save_every=1"]
    agents = [hosts.start(name, [script, "host1:29400", "1:2", "1", *slow], ROOT, ENVIRONMENT,
                          work / f"elastic-{name}.log") for name in ("host2", "host3")]
    try:
        deadline = time.monotonic() + 240
        while not (out / "checkpoints/step-00000002/manifest.json").exists():
            assert time.monotonic() < deadline, (work / "elastic-host2.log").read_text()[-6000:]
            time.sleep(0.02)
        killed = time.monotonic()
        hosts.power_off("host3")
        assert agents[0].wait(timeout=300) == 0, (work / "elastic-host2.log").read_text()[-6000:]
        text = (work / "elastic-host2.log").read_text()
        assert "2 ranks" in text and "1 ranks" in text, text[-3000:]
        print(f"done {time.monotonic() - killed:.0f} s after the loss")
    finally:
        for process in (store, *agents):
            process.kill()
    found = losses(out)
    assert found.keys() == one_host.keys()
    assert max(abs(found[step] - one_host[step]) for step in found) < 1e-5


@needs("sbatch", "slurm-wlm munge")
@pytest.mark.skipif("SLURM_TESTS" not in os.environ, reason="set SLURM_TESTS=1 (two minutes)")
def test_slurm_saves_on_sigterm_and_requeues(work, one_host, tmp_path):
    with fake_hosts.FakeHosts(2, work) as two:
        environment = start_slurm(two, work)
        out = work / "slurm"
        command = ["sbatch", "--chdir", str(ROOT), "--output", str(work / "slurm.log"),
                   "--time=5", "launch/cluster/slurm.sbatch", *arguments(work, "slurm"),
                   "--train.steps=2000", "--train.save_every=1000"]
        submitted = subprocess.run(two.command("host1", command, ROOT), env=environment,
                                   capture_output=True, text=True)
        job = submitted.stdout.split()[-1]
        wait_for(lambda: (out / "metrics.jsonl").exists() and len(losses(out)) > 1)
        subprocess.run(two.command("host1", ["scancel", "--signal=TERM", job], ROOT),
                       env=environment, check=True)
        wait_for(lambda: "back into the queue" in (work / "slurm.log").read_text())
        wait_for(lambda: "resume at step" in (work / "slurm.log").read_text())
        subprocess.run(two.command("host1", ["scancel", job], ROOT), env=environment, check=True)
        found = losses(out)
        assert all(found[step] == one_host[step] for step in one_host if step in found)


def wait_for(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


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
