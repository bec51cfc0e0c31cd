"""What the tests on fake hosts share: the job's environment, its arguments and its losses."""

import os
import sys
import time
from pathlib import Path

import fake_hosts
import pytest
from launching import ROOT, options_of

STEPS = 5
PYTHON_DIRECTORY = Path(sys.executable).parent
ENVIRONMENT = {"HOME": os.environ.get("HOME", "/root"), "DS_ACCELERATOR": "cpu",
               "PATH": f"{PYTHON_DIRECTORY}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
               "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT),
               "PYTHON": sys.executable, "MPIRUN_ARGS": "--allow-run-as-root"}


def needs(tool: str, package: str):
    return pytest.mark.skipif(fake_hosts.find(tool) is None, reason=f"needs {tool} ({package})")


def arguments(work: Path, name: str) -> list[str]:
    return [*options_of(work / "run.toml", work / "ds.json"), f"--out_dir={work / name}"]


def run(hosts, work: Path, command: list[str], name: str, directory: Path | None = None,
        environment: dict[str, str] = ENVIRONMENT) -> str:
    """Run `command` on host1; return its output."""
    log = work / f"{name}.log"
    process = hosts.start("host1", command, directory or work, environment, log)
    try:
        code = process.wait(timeout=300)
    finally:
        process.kill()
    assert code == 0, log.read_text()[-6000:]
    return log.read_text()


def wait_for(condition, log: Path, seconds: float = 300) -> None:
    """Wait until `condition()`; on a timeout show the end of `log`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.05)
