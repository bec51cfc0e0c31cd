"""A command line of the project, and what came of it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Command:
    """A script with its arguments, and the conditions under which it runs."""

    script: str  # such as launch/pretrain.py
    arguments: tuple[str, ...]
    environment: dict[str, str | None] = field(default_factory=dict)  # None: not set
    directory: str = str(ROOT)
    file_limit_bytes: int | None = None  # no file may grow larger: what a full disk does
    memory_bytes: int = 24 << 30
    timeout_seconds: float = 60.0


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and how it ended."""

    code: int
    output: str
    errors: str
    hung: bool
    seconds: float


class Server:
    """The process that runs commands; used as a context."""

    def __enter__(self) -> "Server":
        environment = {name: value for name, value in (os.environ | _ENVIRONMENT).items()
                       if name not in _RANK_VARIABLES}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.fuzz.server"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(self._process.stderr.read())
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, command: Command) -> Outcome:
        """Run one command to its end, or to its timeout."""
        self._process.stdin.write(json.dumps(asdict(command)) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))
