"""Every option of every command with values that nobody means."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

from tools.fuzz.case import Case
from tools.fuzz.commands import ROOT, Command
from tools.fuzz.readers import READERS

# No path of this machine outside the case: who writes there takes it away from everybody.
_VALUES = ["nan", "inf", "-inf", "-1", "0", "1", "2", "-0.5", "0.5", "1e-320", "1e308", "1e999",
           "99999999999999999999", "4294967296", "-9223372036854775809", "foo", "", " ", "1/0",
           "0/3", "4/3", "1,2", "None", "true", "\u0661", "[", "a=b", "train", "run.toml",
           "train.jsonl", "hf", "superglue", "nowhere", "1 2", "-", "--", "a\nb", "x" * 300]
_NUMBERS = ("nan", "inf", "-inf", "1e999")  # which no option of a number takes
_NEVER = {"--push", "--private", "--help"}  # the network; no run at all
_HELPERS = {"data_prep": ("data_prep/options.py",),
            "launch/finetune.py": ("deberta_ds/finetuning/options.py",),
            "launch/superglue.py": ("deberta_ds/finetuning/options.py",)}


def options(random: Random, place: Path) -> Case:
    """An option of a command with another value, twice, without a value, or added."""
    command = random.choice([command for kind in READERS.values() for command in kind])
    words = list(command.arguments)
    name = random.choice(sorted(_options_of(command.script)))
    values = [random.choice(_VALUES) for _ in range(random.choice([1, 1, 1, 1, 2, 3]))]
    if name in words:
        start = words.index(name) + 1
        end = next((n for n in range(start, len(words)) if words[n].startswith("--")), len(words))
        words[start:end] = values if random.random() < 0.9 else []
    else:
        words += [name, *values]
    what = " ".join([Path(command.script).stem, name, *values])
    # A message about a number may name it as it was read; a path as it was written.
    return Case(replace(command, arguments=tuple(words)), f"{what[:100]!a}", (),
                name in _numbers(command) and len(values) == 1 and values[0] in _NUMBERS)


@cache
def _options_of(script: str) -> set[str]:
    return set(re.findall(r'"(--\w+)"', _text(script))) - _NEVER


def _numbers(command: Command) -> set[str]:
    """Return the options of a script that take numbers."""
    kinds = "int|float|positive|natural|positive_number|share|fraction"
    return set(re.findall(rf'"(--\w+)",[^()]*?type=(?:{kinds})\b', _text(command.script)))


@cache
def _text(script: str) -> str:
    helpers = _HELPERS.get(script, ()) + _HELPERS.get(script.split("/")[0], ())
    return "\n".join((ROOT / path).read_text() for path in (script, *helpers))
