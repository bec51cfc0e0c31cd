"""What a case is: a command, what was broken, and what a refusal must name."""

from dataclasses import dataclass

from tools.fuzz.commands import Command

CANARY = "canary"  # what code hidden in an input would write
BRIEF = ("--train.stop_after=2", "--train.keep=1")


@dataclass(frozen=True)
class Case:
    """A command on a broken input; a refusal must name one of `names`."""

    command: Command
    what: str
    names: tuple[str, ...]
    must_fail: bool = False
