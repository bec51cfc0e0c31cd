"""Hosts on one machine: network, host name, processes, IPC and mounts of their own, and sshd.

    python tools/hosts/fake_hosts.py 3 bash       # three hosts, a shell on the first

A host is a set of Linux namespaces. Their eth0s meet in a bridge without an address, so nothing
else on the machine can be reached from them. /etc/hosts and ssh_config are replaced inside only.
Killing a host's first process by its id ends all of the host and nothing beside it. One kernel, one
clock, one file system: what needs several of those is not tested by this.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NETWORK = "10.77.0"
LOCK = Path("/run/fake_hosts.lock")
TOOLS = ("ip", "unshare", "nsenter", "sshd", "ssh", "ssh-keygen", "mount")
SSH_CONFIG = """Host *
  User root
  IdentityFile {keys}/id
  IdentitiesOnly yes
  UserKnownHostsFile {keys}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  PasswordAuthentication no
  ConnectTimeout 5
"""
SSHD_CONFIG = """Port 22
ListenAddress {address}
HostKey {keys}/{name}
AuthorizedKeysFile {keys}/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
"""
INIT = """hostname {name}
mount -t tmpfs none /dev/shm
{sshd} -D -e -f {keys}/sshd_{name} 2>{keys}/sshd_{name}.log &
while :; do sleep 3600 & wait $!; done
"""


def missing() -> str:
    """Return why hosts cannot be made here, or "" if they can."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    absent = [tool for tool in TOOLS if find(tool) is None]
    if absent:
        return f"needs {', '.join(absent)} (Debian: iproute2 openssh-server openssh-client)"
    probe = subprocess.run(["unshare", "--net", "--uts", "--pid", "--fork", "--mount", "true"],
                           capture_output=True)
    return "" if probe.returncode == 0 else "namespaces are not allowed here"


def find(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class FakeHosts:
    """Context manager: hosts host1 .. hostN on 10.77.0.1 .. N; one set at a time, others wait."""

    def __init__(self, count: int, directory: Path):
        self.names = [f"host{number + 1}" for number in range(count)]
        self.keys = directory / "keys"
        self.first_process: dict[str, int] = {}  # process 1 of each host, as seen from outside

    def __enter__(self) -> "FakeHosts":
        self._lock = open(LOCK, "w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._remove()  # the remains of a killed test
        try:
            self._write_keys()
            _sh("ip link add dsbr type bridge && ip link set dsbr addrgenmode none up")
            for name in self.names:
                self._plug_in(name)
                self.power_on(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        self._remove()
        self._lock.close()

    def command(self, host: str, command: list[str], directory: Path) -> list[str]:
        """Return `command` as run on `host` in `directory`."""
        return ["nsenter", "-t", str(self.first_process[host]), "-m", "-u", "-i", "-n", "-p", "--",
                "env", "-C", str(directory), *map(str, command)]

    def start(self, host: str, command: list[str], directory: Path, env: dict[str, str],
              log: Path) -> subprocess.Popen:
        """Start `command` on `host` with exactly `env`; its output goes to `log`."""
        with open(log, "ab") as output:
            return subprocess.Popen(self.command(host, command, directory), env=env,
                                    stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def power_off(self, host: str) -> None:
        """End the host and every process on it, as a power failure would."""
        os.kill(self.first_process.pop(host), signal.SIGKILL)

    def power_on(self, host: str) -> None:
        """Start the host (again): its name, its processes and mounts, and sshd."""
        outer = subprocess.Popen(
            ["ip", "netns", "exec", host, "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork",
             "--mount-proc", "bash", "-c",
             INIT.format(name=host, keys=self.keys, sshd=find("sshd"))],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True)
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        self.first_process[host] = int(_wait_for(lambda: children.read_text().split())[0])
        _wait_for(lambda: f"{self._address(host)}:22 " in _sh(f"ip netns exec {host} ss -ltn"))

    def cut(self, host: str) -> None:
        _sh(f"ip link set v{host} down")

    def heal(self, host: str) -> None:
        _sh(f"ip link set v{host} up")

    def _write_keys(self) -> None:
        self.keys.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        known = []
        for name in ["id", *self.names]:
            (self.keys / name).unlink(missing_ok=True)
            _sh(f"ssh-keygen -q -t ed25519 -N '' -f {self.keys / name}")
        for name in self.names:
            address = self._address(name)
            key = (self.keys / f"{name}.pub").read_text().rsplit(" ", 1)[0]
            known.append(f"{name},{address} {key}\n")
            (self.keys / f"sshd_{name}").write_text(
                SSHD_CONFIG.format(address=address, keys=self.keys, name=name))
        (self.keys / "known_hosts").write_text("".join(known))

    def _address(self, name: str) -> str:
        return f"{NETWORK}.{self.names.index(name) + 1}"

    def _plug_in(self, name: str) -> None:
        etc = Path("/etc/netns") / name
        (etc / "ssh").mkdir(parents=True)
        lines = [f"{self._address(host)} {host}" for host in self.names]
        (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        (etc / "hostname").write_text(f"{name}\n")
        (etc / "ssh/ssh_config").write_text(SSH_CONFIG.format(keys=self.keys))
        _sh(f"ip netns add {name} && ip link add v{name} type veth peer name eth0 netns {name} && "
            f"ip link set v{name} addrgenmode none master dsbr up && "
            f"ip -n {name} addr add {self._address(name)}/24 dev eth0 && "
            f"ip -n {name} link set eth0 up && ip -n {name} link set lo up")

    def _remove(self) -> None:
        for process in self.first_process.values():
            os.kill(process, signal.SIGKILL)
        self.first_process = {}
        for path in Path("/etc/netns").glob("host[0-9]*"):
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True)
            subprocess.run(["ip", "link", "del", f"v{path.name}"], capture_output=True)
            shutil.rmtree(path, ignore_errors=True)
        subprocess.run(["ip", "link", "del", "dsbr"], capture_output=True)


def _sh(command: str) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout


def _wait_for(condition, seconds: float = 30):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("a host did not come up")
        time.sleep(0.05)
    return value


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    with FakeHosts(int(sys.argv[1]), Path("/var/tmp/fake_hosts")) as hosts:
        subprocess.run(hosts.command("host1", sys.argv[2:] or ["bash"], Path.cwd()))
