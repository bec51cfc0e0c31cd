"""Remedies that messages name, followed to the letter: the command works, or says something else.

remedies.toml holds the rows, and which messages no row can provoke, with the reason.
"""

import ast
import contextlib
import gzip
import importlib
import io
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import export_cases
import pytest
import tokenizer_cases
from data_helpers import random_documents, run_main, tiny_tokenizer, tokenize, tokenizer_path
from launching import ROOT, make_run
from superglue_helpers import save_random

from deberta_ds.api.jobs import train
from deberta_ds.base import user_code
from deberta_ds.base.errors import UserError, user_message
from deberta_ds.config import run_config
from deberta_ds.config.batch_schedule import problems_with_ranks
from deberta_ds.config.optim import learning_rate
from deberta_ds.config.options import raise_problems
from deberta_ds.config.toml_files import as_override, as_toml
from deberta_ds.corpus.documents import ReadOptions
from deberta_ds.corpus.pack import pack_corpus
from deberta_ds.engine import ds_config
from deberta_ds.finetuning.models import open_start
from deberta_ds.release.model_files import write_ours
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.settings import resolve
from deberta_ds.tasks.task_file import load_own_task
from deberta_ds.training.start import check_run, first_weights

ROWS = tomllib.loads((Path(__file__).parent / "remedies.toml").read_text(encoding="utf-8"))
# How a clause begins that tells the reader what to do.
_REMEDY = re.compile(
    r"(?:^|[;:.,(}] ?|\bor |\band )(?:or |and |then |to [^,;]*: |first )?\b(?:add|allow|ask|build|"
    r"check|choose|convert|copy|correct|declare|define|delete|drop|end|export|fetch|fill|fine-tune|"
    r"fix|follow|give|install|keep|leave|let|log in|look|lower|make|mount|name|number|pass|pip|"
    r"point|put|raise|read|remove|rename|repair|repeat|run|save|say|scale|see|set|shorten|show|"
    r"spell|split|start|stop|take|train|turn|unpack|unset|update|upload|use|widen|write)\b"
    r"|--\w|did you mean|must\b|\bneeds?\b|one of|expected\b|at least|there are\b|may have\b|"
    r"such as\b|has such\b", re.I)
_SAID_BY = ("fail", "error", "append")


def ids(kind: str) -> list:
    return [pytest.param(row, id=f"{number}-{row['says'][:40]}")
            for number, row in enumerate(ROWS[kind])]


def is_in(says: str, text: str) -> bool:
    """Return whether a message is part of a text; {} stands for what it fills in."""
    return re.search(re.escape(says.strip("{}")).replace(r"\{\}", ".*"), text) is not None


# ------------------------------------------------------------------------------ tables, run files
def attempt(directory, name: str, holds: str, task: dict) -> str:
    """Return what a task file and its table are refused with, "" for nothing."""
    directory.mkdir()
    (directory / name).write_bytes(holds.encode("latin-1" if "\xe9" in holds else "utf-8"))
    values = {"name": "mine", "train": name} | task
    path = directory / "task.toml"
    path.write_text("".join(f"{key} = {as_toml(value)}\n" for key, value in values.items()
                            if value != "(none)"))
    try:
        loaded, _ = load_own_task(path)
        read_split(loaded, ".", "train")
        resolve(loaded, {loaded.name: {}})
    except UserError as error:
        return str(error).replace(str(directory), "")
    return ""


@pytest.mark.parametrize("row", ids("table"))
def test_a_remedy_of_a_table(tmp_path, row):
    file, task = row.get("file", "a.jsonl"), ROWS["tasks"][row.get("task", "text")] | row.get(
        "keys", {})
    said = attempt(tmp_path / "a", file, row["holds"], task)
    assert is_in(row["says"], said), said
    again = attempt(tmp_path / "b", row.get("then_file", file),
                    row.get("then_holds", row["holds"]), task | row.get("then", {}))
    assert "other" in row or not again, again
    assert is_in(row.get("other", ""), again) and not is_in(row["says"], again), again


@pytest.fixture(scope="module")
def place(tmp_path_factory, process_group):
    """A directory with one of each thing that commands read; rows get a copy of it."""
    root = tmp_path_factory.mktemp("place")
    run_file = make_run(root)
    run_file.write_text(run_file.read_text().replace(f"{root}/", ""))
    documents = random_documents(20)
    (root / "a.jsonl").write_text("".join(
        json.dumps({"text": text, "id": str(number)}) + "\n"
        for number, text in enumerate(documents)))
    for name in ("packed.jsonl", "packed.jsonl.gz"):
        (root / name).write_bytes(gzip.compress(b'{"text": "A text of few words."}\n'))
    (root / "text").mkdir()
    for number in range(2):
        (root / f"text/{number}.txt").write_text("\n\n".join(
            f"{text}\n{text[::-1]}" for text in random_documents(20, number)))
    tokenize(root / "a.jsonl", root / "web", read=ReadOptions(id_key="id"))
    pack_corpus(root / "web", tiny_tokenizer(), 64)
    shutil.copytree(ROOT / "tests/fixtures/tiny_run/rtd/export", root / "model")
    tokenizer_cases.bert(root / "wp")
    tokenizer_cases.deberta_v1(root / "bpe")
    (root / "mood.csv").write_text("text,label\nIt is fine.,good\nIt is awful.,bad\n")
    (root / "mood.toml").write_text('name = "mood"\nkind = "classification"\ntrain = "mood.csv"\n'
                                    'texts = ["text"]\nlabel = "label"\n')
    (root / "pairs.jsonl").write_text(
        '{"sentence_good": "It is here.", "sentence_bad": "It are here."}\n')
    write_ours(export_cases.make_release("v3", "mlm"), root / "mlm")
    save_random(root / "tuned", load_own_task(root / "mood.toml")[0], open_start(f"{root}/model"))
    with contextlib.chdir(root):
        train("run.toml", {"train.steps": 1, "optim.warmup_steps": 0, "out_dir": "done"})
        Path("done").rename(root.with_name("done"))
    (root / "done").symlink_to(root.with_name("done"))
    return root


@pytest.fixture
def here(place, tmp_path, monkeypatch):
    """A copy of `place`, which is the working directory."""
    shutil.copytree(place, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("deberta_ds.cluster.dist.destroy", lambda: None)  # DeepSpeed keeps it


def refused(overrides: dict, ds: dict, ranks: int, weights: bool) -> str:
    """Return what a run file with overrides is refused with, "" for nothing."""
    words = [as_override(key, value) for key, value in overrides.items() if value != "(none)"]
    user_code.forget()
    try:
        checked = ds_config.check(ds, "ds.json")
        run, _ = run_config.load("run.toml", words)
        check_run(run, checked, ranks, "run.toml")
        raise_problems("run.toml", problems_with_ranks(run.train, ranks, 0))
        learning_rate(run.optim, 0, run.train.steps)
        if weights:
            first_weights(run, tiny_tokenizer())
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("row", ids("run"))
def test_a_remedy_of_a_run_file(here, row):
    put(row.get("files", {}))
    ds, ranks = row.get("ds", {"zero_optimization": {"stage": 1}}), row.get("ranks", 1)
    said = refused(row.get("keys", {}), ds, ranks, row.get("weights", False))
    put(row.get("then_files", {}))
    again = refused(row.get("keys", {}) | row.get("then", {}), row.get("then_ds", ds),
                    row.get("then_ranks", ranks), row.get("weights", False))
    assert is_in(row["says"], said), said
    assert "other" in row or not again, again
    assert is_in(row.get("other", ""), again) and not is_in(row["says"], again), again


# --------------------------------------------------------------------------------------- commands
def tried(words: str) -> tuple[bool, str]:
    """Return (whether it failed, what it said): a command, or FUNCTION ARGUMENTS of a module."""
    name, *arguments = shlex.split(words.replace("{ROOT}", str(ROOT)))
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            if name.endswith(".py"):
                printed.write(run_main(name, *arguments))
            else:
                module, _, function = name.partition(":")
                called = getattr(importlib.import_module(f"deberta_ds.{module}"), function)
                given = [json.loads(x) if re.match(r"[[{]|\d+$", x) else x for x in arguments]
                if module == "engine.passes":
                    given = [ds_config.DeepSpeedConfig(**given[0])]
                printed.write(str(called(*given))[:500])
        except Exception as error:
            if (said := user_message(error)) is None:
                raise
            return True, printed.getvalue() + said
        except SystemExit as ended:
            return bool(ended.code), f"{printed.getvalue()}{ended.code}"
    return False, printed.getvalue()


def put(files: dict[str, str]) -> None:
    for name, holds in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(holds, encoding="utf-8")


def do(steps: list, command: str) -> tuple[bool, str] | None:
    """Do steps, and return what `tried` does of the last command among them.

    A step is a table of files to write, "- NAME" to remove, "cut NAME" to take a byte off, "copy A
    B", "link A B", "latin-1 NAME TEXT", "set FILE KEY=JSON", a command, or "OLD -> NEW": `command`
    with other words, added where there is no OLD.
    """
    last = None
    for step in steps:
        if isinstance(step, str):
            step = step.replace("{ROOT}", str(ROOT))
        if isinstance(step, dict):
            put(step)
        elif step.startswith("- "):
            path = Path(step[2:])
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        elif step.startswith("link "):
            Path(step.split()[2]).symlink_to(step.split()[1])
        elif step.startswith("latin-1 "):
            _, name, holds = step.split(" ", 2)
            Path(name).write_text(holds, encoding="latin-1")
        elif step.startswith("cut "):
            path = Path(step[4:])
            for file in path.iterdir() if path.is_dir() else [path]:
                file.write_bytes(file.read_bytes()[:-1])
        elif step.startswith("copy "):
            _, source, target = step.split()
            (shutil.copytree if Path(source).is_dir() else shutil.copy)(source, target)
        elif step.startswith("set "):
            _, name, change = step.split(" ", 2)
            keys, _, value = change.partition("=")
            content = inner = json.loads(Path(name).read_text())
            *above, last_key = keys.split(".")
            for key in above:
                inner = inner[key]
            inner[last_key] = json.loads(value)
            Path(name).write_text(json.dumps(content))
        else:
            assert not (last and last[0]), last
            old, arrow, new = step.partition("->")
            assert not arrow or old.strip() in command
            last = tried(step if not arrow else command.replace(old.strip(), new.strip())
                         if old.strip() else command + new)
    return last


@pytest.mark.parametrize("row", ids("command"))
def test_a_remedy_of_a_command(here, row):
    user_code.forget()
    done = do([row.get("files", {}), *row.get("before", [])], "")
    assert not (done and done[0]), done
    _, said = tried(row["run"])
    assert is_in(row["says"], said), said
    is_run = isinstance(row["then"][-1], str) and not row["then"][-1].startswith("- ")
    failed, again = do(row["then"] + ([] if is_run else [row["run"]]), row["run"])
    assert "other" in row or not failed, again
    assert is_in(row.get("other", ""), again) and not is_in(row["says"], again), again


def test_a_notebook_trains_with_code_as_it_is_now(here):
    """It ran the text that the process had read first, which the message had said to change."""
    for source, said in (("", "has no recall"), ("def recall(total, per_token): ...", "above mod")):
        put({"mine.py": source})
        with pytest.raises(UserError, match=said):
            train("run.toml", {"evaluate.metrics": ["mine.py:recall"]} | (
                {"data.seq_len": 4096} if source else {}))


@pytest.mark.parametrize("words", [
    f"launch/pretrain.py --config {ROOT}/launch/runs/v3_base.toml --deepspeed_config "
    f"{ROOT}/ds_configs/zero0_fp32.json --check",
    "launch/pretrain.py --config run.toml --deepspeed_config ds.json",
    "launch/evaluate.py --run runs/base", "data_prep/verify.py corpus/web",
    f"data_prep/tokenize_corpus.py a.jsonl --tokenizer {tokenizer_path()} --out x --heldout_out y",
    "data_prep/pack.py corpus/web --tokenizer spm.model --seq_len 128",
    "data_prep/build.py --recipe corpus.toml", "launch/report.py --run runs/base"])
def test_a_relative_path_is_named_with_the_folder_where_it_was_looked_for(
        tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    failed, said = tried(words)
    assert failed and f"(looked in {tmp_path})" in said, said


# ------------------------------------------------------------------------------ no message is left
def written(node: ast.AST) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)


def messages(path: Path) -> list[str]:
    """Return the strings of a module that are raised, or returned as a part of what is, and name a
    remedy.
    """
    found = []

    def walk(node: ast.AST, said_by: str) -> None:
        if isinstance(node, ast.Call):
            said_by = getattr(node.func, "id", getattr(node.func, "attr", ""))
        elif isinstance(node, ast.stmt):
            said_by = "error" if isinstance(getattr(node, "value", None), ast.Yield) or (
                not isinstance(node, ast.Expr)) else ""
        if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str)):
            if said_by.endswith("Error") or said_by in _SAID_BY:
                found.append(written(node))
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
                walk(child, said_by)

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return [text for text in found if " " in text and len(text) > 14 and _REMEDY.search(text)]


def test_every_message_that_names_a_remedy_has_a_row_or_a_reason():
    files = [path for name in ("deberta_ds", "launch", "data_prep")
             for path in (ROOT / name).rglob("*.py")]
    known = [row["says"] for kind in ("table", "run", "command") for row in ROWS[kind]] + [
        says for part in ROWS["untested"] for says in part["says"]]
    found = [(path.relative_to(ROOT), text) for path in files for text in messages(path)]
    missing = [f"{path}: {text}" for path, text in found if not any(says in text for says in known)]
    assert not missing, f"{len(missing)}:\n" + "\n".join(missing)
    gone = [says for part in ROWS["untested"] for says in part["says"]
            if not any(says in text for _, text in found)]
    assert not gone, gone


def test_the_tests_that_reasons_name_are_there():
    named = re.findall(r"test_\w+\.py", " ".join(part["reason"] for part in ROWS["untested"]))
    assert {*named} <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
