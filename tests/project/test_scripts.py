"""Every script answers --help, refuses options that it does not know, and touches nothing."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from launching import ENVIRONMENT, ROOT

from deberta_ds.base import command_line
from deberta_ds.config import run_config
from tools.fuzz.commands import Command

DIRECTORIES = ("launch", "launch/cluster", "data_prep", "benchmarks", "tools/faults")
PYTHON = sorted(path for name in DIRECTORIES for path in (ROOT / name).glob("*.py")
                if '__name__ == "__main__"' in path.read_text())
SHELL = sorted(path for name in DIRECTORIES for path in (ROOT / name).glob("*.sh")
               if os.access(path, os.X_OK))  # the others are sourced
UNKNOWN = "--no_such_option"


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def ask(server, path: Path, word: str, directory: Path) -> tuple[int, str]:
    """Return (exit code, output) of `path word` run in `directory`."""
    if path.suffix == ".sh":
        done = subprocess.run([str(path), word], cwd=directory, env=ENVIRONMENT, text=True,
                              capture_output=True, timeout=60)
        return done.returncode, done.stdout + done.stderr
    outcome = server.run(Command(name(path), (word,), {"COLUMNS": "80"}, str(directory)))
    assert not outcome.hung
    return outcome.code, outcome.output + outcome.errors


@pytest.mark.slow
@pytest.mark.parametrize("path", PYTHON + SHELL, ids=name)
def test_help_and_unknown_options(server, path, tmp_path):
    directory = tmp_path / "here"
    (directory / "runs/demo").mkdir(parents=True)
    (directory / "runs/demo/report.html").write_text("of an earlier demo")
    code, text = ask(server, path, "--help", directory)
    assert code == 0 and len(text) > 100, text
    assert "usage:" in text or path.suffix == ".sh"
    if path.parent in (ROOT / "launch", ROOT / "data_prep"):
        check_help(text)
    code, text = ask(server, path, UNKNOWN, directory)
    assert code == 2 and "Traceback" not in text, text
    assert "error: " in text
    found = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*"))
    assert found == ["runs", "runs/demo", "runs/demo/report.html"]


def check_help(text: str) -> None:
    """Assert that a help page fits 80 columns and says of every option what it means."""
    assert [line for line in text.splitlines() if len(line) > 79] == []
    described = text[text.index("options:"):]
    if "positional arguments:" in text:
        described = text[text.index("positional arguments:"):]
    for option in re.split(r"\n(?=  \S)", described)[1:]:
        shown, _, meaning = option.strip().partition("  " if "\n" not in option else "\n")
        assert meaning.strip() or "  " in shown, f"no meaning: {option}"
        assert "  " not in " ".join(meaning.split()) and "\\" not in meaning


def test_help_shows_defaults_and_names_what_to_type(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    parser = command_line.parser_for("One line\nthat goes on.\n\n    python launch/plan.py 100%")
    parser.add_argument("--seed", type=int, default=0, help="of it all")
    parser.add_argument("--share", type=float, help="part, 5%% say")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[2.0, 1.5], help="of each")
    parser.add_argument("--fast", action="store_true", help="soon")
    text = parser.format_help()
    assert "One line that goes on.\n\n    python launch/plan.py 100%\n" in text
    assert "--seed N" in text and "of it all (default: 0)" in text and "part, 5% say" in text
    assert "of each (default: 2.0 1.5)" in text and "soon\n" in text and "--share X" in text
    assert command_line.as_typed("python launch/fill_mask.py") == "python launch/fill_mask.py"
    monkeypatch.setattr(command_line, "IS_INSTALLED", True)
    typed = command_line.as_typed("python launch/fill_mask.py, deepspeed launch/pretrain.py --x, "
                             "python -m mpi4py.futures\ndata_prep/tokenize_corpus.py ...")
    assert typed == ("deberta-fill-mask, deepspeed --module deberta_ds pretrain --x, "
                     "python -m mpi4py.futures -m deberta_ds tokenize-corpus ...")


@pytest.mark.parametrize(("kind", "value", "rule"), [
    (command_line.positive, "0", "a whole number from 1 to 2^62"),
    (command_line.positive, "1.5", "a whole number from 1 to 2^62"),
    (command_line.positive, "1" + 40 * "0", "a whole number from 1 to 2^62"),
    (command_line.natural, "-1", "a whole number from 0 to 2^62"),
    (command_line.positive_number, "inf", "a finite number above 0"),
    (command_line.positive_number, "many", "a finite number above 0"),
    (command_line.fraction, "nan", "in 0 .. 1")])
def test_a_number_that_an_option_does_not_take_is_told_its_rule(capsys, kind, value, rule):
    """plan.py --tflops 0 said "invalid _positive_number value"."""
    parser = command_line.parser_for("A command.")
    parser.add_argument("--size", type=kind)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--size={value}"])
    assert f"error: argument --size: {value} is not {rule}\n" in capsys.readouterr().err


def test_an_option_with_several_values_may_be_given_twice():
    """take_down.py --document A --document B left A in the corpus."""
    for path in PYTHON + [ROOT / "deberta_ds/finetuning/options.py"]:
        for options in re.findall(r'"--[^()]*nargs="\+"[^()]*', path.read_text()):
            has_default = re.search(r"default=\[[^]]", options)
            assert path.parent.name not in ("launch", "data_prep", "finetuning") or has_default \
                or 'action="extend"' in options, (path, options)


def test_the_walk_finds_the_scripts():
    names = {name(path) for path in PYTHON + SHELL}
    assert {"launch/demo.py", "launch/pretrain.py", "data_prep/pack.py",
            "launch/cluster/openmpi.sh"} <= names and len(names) > 30


def test_the_list_of_commands_ends_quietly_where_nobody_reads_it():
    """`python -m deberta_ds | head -3` printed a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "deberta_ds"], cwd=ROOT, env=ENVIRONMENT,
                          stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


ASK_ALL = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
    print(path, *{"torch", "deepspeed", "transformers"} & sys.modules.keys())
"""


def test_help_of_a_command_does_not_wait_for_torch():
    """finetune.py took 4 seconds to say what it can do."""
    paths = [str(path) for path in PYTHON if path.parent.name == "launch"]
    done = subprocess.run([sys.executable, "-c", ASK_ALL, *paths], cwd=ROOT, env=ENVIRONMENT,
                          text=True, capture_output=True, timeout=60)
    assert done.stdout.splitlines() == paths, done.stderr


# The scripts for a GPU, as far as they go without one: limits, files, options, run settings.
GPU_SCRIPTS = (("gpu_first.sh", "1"), ("gpu_first.sh", "2"), ("gpu_all.sh", "1"),
               ("gpu_all.sh", "2"), ("gpu_train.sh", "1"), ("gpu_train.sh", "2"),
               ("gpu_large.sh", "1"), ("gpu_large.sh", "2"))
NINE_MINUTES = 540
_PART = re.compile(r"(?P<seconds>\d+) s at most: (?P<name>.*?): (?P<command>(python3|env|bash) .*)")


@pytest.fixture(scope="module")
def help_of(server):
    """Return a function: path of a script, and words before its options -> its --help."""
    @cache
    def ask_once(*words: str) -> str:
        outcome = server.run(Command(words[0], (*words[1:], "--help"), {"COLUMNS": "200"},
                                     str(ROOT)))
        assert outcome.code == 0, outcome.errors
        return outcome.output

    return ask_once


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


@pytest.mark.slow
@pytest.mark.parametrize("script", GPU_SCRIPTS, ids=" ".join)
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


@pytest.mark.slow
def test_the_corpus_is_made_by_commands_that_are_there(help_of):
    text = (ROOT / "benchmarks/gpu_parts.sh").read_text()
    body = text[text.index("_pack() {"):text.index("export -f _pack")].replace("\\\n", " ")
    commands = [line.strip(" &") for line in body.splitlines() if "data_prep/" in line]
    assert len(commands) == 5
    for command in commands:
        _, path, *arguments = shlex.split(command)
        for option in (word for word in arguments if word.startswith("--")):
            assert option in help_of(path), (path, option)


@pytest.mark.slow
def test_the_run_s_settings_are_valid():
    for words in (words for script in GPU_SCRIPTS[-4:] for words in parts(script)):
        if "--config" not in words:
            continue
        run_file = words[words.index("--config") + 1]
        assert os.path.exists(ROOT / words[words.index("--deepspeed_config") + 1])
        # The list of sources holds blanks, so it comes apart here; it is checked elsewhere.
        overrides = [word for word in words if re.match(r"--(train|optim|model)\.", word)]
        assert len(overrides) >= 5
        run_config.load(ROOT / run_file, overrides, lambda values, origins: None
                    if "vocab_size" in values["model"] else values["model"].update(vocab_size=64))
