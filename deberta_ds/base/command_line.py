"""The parser of every command: its help fits the terminal, shows defaults, and names what to type.

A description is a script's docstring. Its paragraphs are filled again to the terminal's width, as
wide as lines are easily read; indented lines are commands, and stay as they are.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from deberta_ds.base.numbers import fill

N = TypeVar("N", int, float)

# What comes with the program next to its modules: scripts, recipes, DeepSpeed configurations.
#
# In a clone they lie next to the package, in an installation inside it (setup.py). A path that does
# not exist in the working directory is looked for here, so that `--config
# launch/runs/v3_base.toml` means the recipe wherever a command is called.
_PACKAGE = Path(__file__).resolve().parents[1]  # deberta_ds/
IS_INSTALLED = not (_PACKAGE.parent / "launch/pretrain.py").is_file()
ROOT = _PACKAGE if IS_INSTALLED else _PACKAGE.parent
_SCRIPT = re.compile(
    r"\b(?:(python|deepspeed|mpi4py\.futures)\s+)?(?:launch|data_prep)/(\w+)\.py\b")
_AS_MODULE = {"deepspeed": "deepspeed --module deberta_ds ",
              "mpi4py.futures": "mpi4py.futures -m deberta_ds "}


def find(path: str | Path) -> Path:
    """Return `path`, or the shipped file of that name where there is none in this directory."""
    path = Path(path)
    shipped = ROOT / path
    return shipped if shipped.is_file() and not path.exists() else path


def as_typed(text: str) -> str:
    """Return a text with its commands as they are typed here: scripts of a clone, or installed."""
    return _SCRIPT.sub(lambda found: _AS_MODULE.get(found[1], "deberta-")
                       + found[2].replace("_", "-"), text) if IS_INSTALLED else text


_MOST_COLUMNS = 100


def parser_for(description: str) -> argparse.ArgumentParser:
    """Return the parser of a command; options are written out in full."""
    name = Path(sys.argv[0]).stem.replace("_", "-")
    return argparse.ArgumentParser(prog=f"deberta-{name}" if IS_INSTALLED else None,
                                   description=as_typed(description),
                                   formatter_class=_Formatter, allow_abbrev=False)


def accept_old(parser, old: str, new: str) -> None:
    """Take the option's name of 0.2.0, `old`, as well; the help does not show it."""
    parser._option_string_actions[old] = parser._option_string_actions[new]


def columns() -> int:
    """Return how wide lines for this terminal may be."""
    return min(shutil.get_terminal_size().columns, _MOST_COLUMNS)


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=min(24, columns() // 4), width=columns() - 1)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # A paragraph with an indented line holds commands, and is left as it is.
        return "\n\n".join(part if "\n " in f"\n{part}" else fill(part, width)
                           for part in text.strip().split("\n\n"))

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = as_typed(action.help or ""), action.default
        says_nothing = default in (None, "", []) or default is False
        if says_nothing or "default" in text or default is argparse.SUPPRESS:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        return f"{text} (default: {str(shown).replace('%', '%%')})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        # Types of numbers are functions that are named after what they take, as below.
        kind = getattr(action.type, "__name__", "")
        whole, broken = ("int", "positive", "natural"), ("float", "share", "fraction", "number")
        if kind.endswith(broken):
            return "X"
        return "N" if kind in whole else action.dest.upper()


def checked(text: str, kind: Callable[[str], N], holds: Callable[[N], bool], rule: str) -> N:
    """Return an option's value as a number of `kind`; an error names the `rule` it breaks."""
    try:
        value: N | None = kind(text)
    except ValueError:
        value = None
    if value is None or not holds(value):
        raise argparse.ArgumentTypeError(f"{text} is not {rule}")
    return value


def local(text: str) -> str:
    """Type of an option: a path that is no URL."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a URL; this takes a local (or mounted) path")
    return text


def local_path(text: str) -> Path:
    """Type of an option: as `local`."""
    return Path(local(text))


_LARGEST = 1 << 62


def natural(text: str) -> int:
    """Type of an option: a whole number, 0 for what the option's help says."""
    return checked(text, int, lambda value: 0 <= value < _LARGEST, "a whole number from 0 to 2^62")


def positive(text: str) -> int:
    """Type of an option: a whole number above 0."""
    return checked(text, int, lambda value: 0 < value < _LARGEST, "a whole number from 1 to 2^62")


def positive_number(text: str) -> float:
    """Type of an option: a finite number above 0."""
    return checked(text, float, lambda value: 0 < value < float("inf"), "a finite number above 0")


def fraction(text: str) -> float:
    """Type of an option: a share in [0, 1]."""
    return checked(text, float, lambda value: 0 <= value <= 1, "in 0 .. 1")
