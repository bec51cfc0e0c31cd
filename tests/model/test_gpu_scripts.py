"""The scripts for a GPU, as far as they go without one: limits, files, options, run settings."""

import os
import re
import shlex
import subprocess

import pytest
from launching import ENVIRONMENT, ROOT

from deberta_ds.config import run_config
from tools.fuzz.commands import Command, Server

pytestmark = pytest.mark.slow
SCRIPTS = (("gpu_all.sh", "1"), ("gpu_all.sh", "2"), ("gpu_train.sh", "1"), ("gpu_train.sh", "2"))
NINE_MINUTES = 540
_PART = re.compile(r"(?P<seconds>\d+) s at most: (?P<name>.*?): (?P<command>(python3|env|bash) .*)")


@pytest.fixture(scope="module")
def help_of():
    """Return a function: path of a script, and words before its options -> its --help."""
    with Server() as server:
        known = {}

        def ask(*words: str) -> str:
            if words not in known:
                outcome = server.run(Command(words[0], (*words[1:], "--help"), {"COLUMNS": "200"},
                                             str(ROOT)))
                assert outcome.code == 0, outcome.errors
                known[words] = outcome.output
            return known[words]

        yield ask


def parts(script: tuple[str, ...]) -> list[list[str]]:
    """Return the command of every part; the limits must be within one call."""
    environment = {key: value for key, value in ENVIRONMENT.items() if key not in ("PYTHON", "OUT")}
    done = subprocess.run(["bash", f"benchmarks/{script[0]}", *script[1:]], cwd=ROOT, text=True,
                          env=environment | {"DRY_RUN": "1"}, capture_output=True, check=True)
    *lines, total = done.stdout.splitlines()
    found = [_PART.fullmatch(line) for line in lines]
    assert all(found), lines
    assert int(total.split()[0]) == sum(int(part["seconds"]) for part in found) <= NINE_MINUTES
    return [part["command"].split() for part in found]


def target(words: list[str]) -> tuple[str, list[str]]:
    """Return (path of the script or module that a command runs, its arguments)."""
    while words[0] == "env" or "=" in words[0]:
        words = words[1:]
    words = words[1:]  # python
    if words[0] == "-m":
        return words[1].replace(".", "/") + ".py", words[2:]
    return words[0], words[1:]


@pytest.mark.parametrize("script", SCRIPTS, ids=" ".join)
def test_every_part_runs_a_file_that_is_there_with_options_that_it_has(script, help_of):
    for words in parts(script):
        if words[0] == "bash":  # a function of the script: the next test
            continue
        path, arguments = target(words)
        if path == "pytest.py":
            assert (ROOT / arguments[-1]).exists()
            continue
        assert (ROOT / path).exists(), path
        own = arguments[:arguments.index("--")] if "--" in arguments else arguments
        subcommand = [word for word in own[:1] if path == "benchmarks/gpu_train.py"]
        for option in (word.split("=")[0] for word in own if word.startswith("--")):
            if "." not in option and option != "--out_dir":  # those are keys of the run
                assert option in help_of(path, *subcommand), (path, option)


def test_the_corpus_is_made_by_commands_that_are_there(help_of):
    text = (ROOT / "benchmarks/gpu_train.sh").read_text()
    body = text[text.index("prepare() {"):text.index("export -f prepare")].replace("\\\n", " ")
    commands = [line.strip(" &") for line in body.splitlines() if "data_prep/" in line]
    assert len(commands) == 5
    for command in commands:
        _, path, *arguments = shlex.split(command)
        for option in (word for word in arguments if word.startswith("--")):
            assert option in help_of(path), (path, option)


def test_the_run_s_settings_are_valid():
    for words in (*parts(("gpu_train.sh", "1")), *parts(("gpu_train.sh", "2"))):
        if "--config" not in words:
            continue
        run_file = words[words.index("--config") + 1]
        assert os.path.exists(ROOT / words[words.index("--deepspeed_config") + 1])
        # The list of sources holds blanks, so it comes apart here; it is checked elsewhere.
        overrides = [word for word in words if re.match(r"--(train|optim|model)\.", word)]
        assert len(overrides) >= 7
        run_config.load(ROOT / run_file, overrides, lambda values, origins: None
                    if "vocab_size" in values["model"] else values["model"].update(vocab_size=64))
