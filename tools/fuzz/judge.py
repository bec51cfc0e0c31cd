"""One case from its seed, and what it violates."""

import os
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from tools.fuzz.case import CANARY, Case
from tools.fuzz.cases import CLASSES
from tools.fuzz.commands import Outcome, Server
from tools.fuzz.setting import Setting

_MESSAGES = ("error: ", "usage: ")
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """A case that was run; `violation` is empty where all is well."""

    name: str
    seed: int
    case: Case
    outcome: Outcome
    violation: str

    def __str__(self) -> str:
        command = self.case.command
        return (f"{self.name}:{self.seed}  {self.violation or 'ok'}  [{self.case.what}]  "
                f"{Path(command.script).stem} code {self.outcome.code}, "
                f"{self.outcome.seconds:.1f} s")


def try_case(name: str, seed: int, setting: Setting, server: Server, place: Path) -> Result:
    """Make case `seed` of a class in a fresh copy of the whole inputs, run it and judge it."""
    _remove(place)
    setting.copy(place)
    case = CLASSES[name](Random(f"{name} {seed}"), place)
    command = replace(case.command, directory=str(place), timeout_seconds=TIMEOUT_SECONDS)
    outcome = server.run(command)
    return Result(name, seed, case, outcome, violation_of(case, outcome, place))


def violation_of(case: Case, outcome: Outcome, place: Path) -> str:
    """Return what is wrong with the way a command met a broken input; empty if nothing is."""
    last = outcome.errors.strip().splitlines()[-1:] or [""]
    if (place / CANARY).exists():
        return "CODE EXECUTED"
    if outcome.hung:
        return f"HANG: {last[0][:100]}"
    if "Traceback (most recent call last)" in outcome.errors:
        return f"TRACEBACK: {last[0][:160]}"
    if outcome.code < 0:
        return f"CRASH: {signal.Signals(-outcome.code).name}"
    left = [path.name for path in place.rglob(".*.tmp")]
    if left:
        return f"LEFT BEHIND: {left[0]}"
    if outcome.code == 0:
        pages = [path for path in place.glob("*.html")
                 if path.is_file() and "<script>alert" in path.read_text()]
        if pages:
            return "SCRIPT IN THE PAGE"
        return "ACCEPTED" if case.must_fail else ""
    messages = [line for line in outcome.errors.splitlines()
                if line.startswith(_MESSAGES) or ": error: " in line]
    if outcome.code != 2 or not messages:
        return f"NO MESSAGE: code {outcome.code}: {last[0][:100]}"
    text = outcome.errors[outcome.errors.index(messages[0]):]
    if case.names and not any(name in text for name in case.names):
        return f"NOT NAMED: {messages[0][:160]}"
    return ""


def _remove(place: Path) -> None:
    for base, directories, _ in os.walk(place):
        for name in directories:
            os.chmod(Path(base) / name, 0o755)
    shutil.rmtree(place, ignore_errors=True)
