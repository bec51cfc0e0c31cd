"""Odd names: every command reads and writes files whatever they are called, or says why not."""

import os
from dataclasses import replace
from pathlib import Path
from random import Random

from tools.fuzz.case import Case
from tools.fuzz.readers import READERS

# No device of this machine: who renames a file over it takes it away from everybody.
_NAMES = ["a\nb", " ", "\udcff\udcfe", "-x", "x" * 255, "\u202eabc", "%s{0}$(id)", "~", "[a]",
          "a*b", "a'b\"c", "\U0001f600", "a\tb", "a\\b", "#", "a=b", "a,b", "\x1b[31m", "con.",
          "é" * 100, "x" * 300, "run.toml/x", "pipe", "/proc/new", "."]
_INPUTS = {"shards": "train", "checkpoint": "out", "model": "hf", "microsoft": "ms", "ours": "ours",
           "pairs": "pairs.jsonl", "findings": "found", "page": "out",
           "finetuned": "sweep/CB/seed-1", "submission": "sweep", "own_task": "tickets.toml",
           "predicted": "tickets.csv"}


def paths(random: Random, place: Path) -> Case:
    """A command whose input or output has an odd name."""
    kind = random.choice([*_INPUTS])
    command = random.choice(READERS[kind])
    name = random.choice(_NAMES)
    os.mkfifo(place / "pipe")
    old = _INPUTS[kind]
    words = list(command.arguments)
    outputs = [n for n, word in enumerate(words) if word in ("new", "new.html", "new.zip",
                                                             "new.jsonl", "--out_dir=new")]
    inputs = [n for n, word in enumerate(words) if word == old or word.endswith(f"={old}")]
    chosen = random.choice(outputs + inputs) if outputs + inputs else None
    if chosen is None:
        return Case(command, "names as they are", ())
    if chosen in inputs and "/" not in name and len(os.fsencode(name)) < 256 \
            and name not in (".", "pipe"):
        suffix = Path(old).suffix
        name = name[:255 - len(suffix)] + suffix if len(name) > 200 else name + suffix
        (place / old).rename(place / name)
    given = words[chosen].partition("=")
    new = f"{given[0]}={name}" if given[1] else name
    words = [new if word == words[chosen] else word for word in words]
    what = f"{Path(command.script).stem}: {words[chosen]!a}"
    names = (name.strip() or "''", ascii(name)[1:-1], "argument", "--", kind, old)
    return Case(replace(command, arguments=tuple(words)), what[:120], names)
