"""Broken tasks, tables, settings, results, submissions and pages."""

import json
import tomllib
import zipfile
from pathlib import Path
from random import Random

from tools.fuzz import mutate
from tools.fuzz.case import Case
from tools.fuzz.readers import READERS, SUITE_TASKS, finetune, own_task
from tools.fuzz.toml_text import toml, toml_value


def task(random: Random, place: Path) -> Case:
    """A SuperGLUE file with a broken record or byte."""
    name = random.choice(["CB", "RTE", "COPA", "BoolQ", "WiC", "WSC", "MultiRC", "ReCoRD"])
    change = mutate.something_in(random, place / "superglue" / name)
    return Case(finetune(name), f"{name} {change.text}", ("superglue", name))


_KINDS = {  # kind of task: its columns
    "classification": {"text": "one two", "more": "three", "queue": "a"},
    "multilabel": {"text": "one two", "more": "three", "queue": ["a", "b"]},
    "regression": {"text": "one two", "more": "three", "queue": 0.5},
    "choice": {"text": "one two", "more": "three", "four": "five", "queue": 1},
    "tags": {"text": ["one", "two"], "queue": ["O", "B-x"]},
}
_TABLES = ("csv", "jsonl", "tsv", "parquet")


def own_task_file(random: Random, place: Path) -> Case:
    """A task file of the user's own with a broken value, or its table."""
    kind = random.choice([*_KINDS])
    values = tomllib.loads((place / "tickets.toml").read_text()) | {"kind": kind}
    if kind != "classification" or random.random() < 0.3:
        values |= _table(random, place, kind)
    path, name = place / "tickets.toml", values["train"]
    change = mutate.Change(f"{kind} as it is", False)
    if random.random() < 0.5:
        values, change = mutate.tree(random, values)
    path.write_text(toml(values))
    if not change.nonsense and random.random() < 0.5:
        table = place / name
        change = (mutate.jsonl_file if table.suffix == ".jsonl" else mutate.file)(random, table)
    elif random.random() < 0.15:
        change = mutate.file(random, path)
    return Case(own_task(), f"{kind} {name} {change.text}", ("tickets", name, "command line"))


def _table(random: Random, place: Path, kind: str) -> dict:
    """Write a whole table of a kind of task; return the task file's values for it."""
    import pyarrow
    from pyarrow import parquet

    rows = []
    for number in range(20):
        row = dict(_KINDS[kind])
        row["text"] = [*row["text"], f"w{number}"] if kind == "tags" else f"{number} {row['text']}"
        if kind == "tags":
            row["queue"] = ["O", "B-x", random.choice(["O", "I-x"])]
        elif kind in ("classification", "choice"):
            row["queue"] = number % 2 if kind == "choice" else "ab"[number % 2]
        elif kind == "regression":
            row["queue"] = number / 10
        rows.append(row)
    ending = random.choice(_TABLES)
    path = place / f"table.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        between = "," if ending == "csv" else "\t"
        lines = [between.join(rows[0])]
        lines += [between.join(_cell(value, kind, ending) for value in row.values())
                  for row in rows]
        path.write_text("\n".join(lines) + "\n")
    texts = ["text"] if kind in ("tags", "choice") else ["text", "more"]
    values = {"texts": texts, "train": path.name, "test": path.name}
    return values | ({"choices": ["more", "four"]} if kind == "choice" else {})


def _cell(value, kind: str, ending: str) -> str:
    if not isinstance(value, list):
        return str(value)
    text = (" " if kind == "tags" else ",").join(value)
    return f'"{text}"' if ending == "csv" else text


def settings_file(random: Random, place: Path) -> Case:
    """A settings file and overrides of fine-tuning."""
    values = {"all": {"epochs": 1, "learning_rate": 2e-5, "warmup_share": 0.1, "best_metric": "",
                      "sift_loss": "kl", "dropout": -1.0, "max_length": 64, "layer_decay": 0.9},
              "CB": {"global_batch_size": 4, "sift_weight": 0.0, "evals_per_epoch": 1}}
    values, change = mutate.tree(random, values)
    path = place / "settings.toml"
    path.write_text(toml(values))
    if random.random() < 0.3:
        change = mutate.file(random, path)
    more = ()
    if random.random() < 0.4:
        key = random.choice(
            ["epochs", "learning_rate", "global_batch_size", "patience", "best_metric",
             "micro_batch_size", "sift_noise", "eval_batch_size", "group_updates"])
        new = mutate.value(random, 1)[0]
        more = (f"--CB.{key}={toml_value(new)}",)
        if "\0" in more[0]:
            more = ()
        change = mutate.Change(f"{change.text} {more}", False)
    return Case(finetune("CB", "--config", "settings.toml", *more), change.text,
                ("settings", "command line", "--"))


def results(random: Random, place: Path) -> Case:
    """results.json of a sweep and result.json of its runs, broken."""
    found = [path for path in mutate.files_under(place / "sweep")
             if path.name in ("results.json", "result.json")]
    path = random.choice(found)
    change = mutate.json_file(random, path)
    return Case(random.choice(READERS["results"]),
                f"{path.parent.name} {change.text}", ("sweep",))


def submission(random: Random, place: Path) -> Case:
    """Predictions on their way to the leaderboard, broken, or their zip."""
    make, check = READERS["submission"]
    if random.random() < 0.5:
        name = random.choice(SUITE_TASKS)
        change = mutate.something_in(random, place / f"sweep/{name}/seed-1")
        return Case(make, f"{name} {change.text}", ("sweep", "new.zip", *SUITE_TASKS))
    path = place / "whole.zip"
    if random.random() < 0.3:
        change = mutate.file(random, path)
    else:
        change = _change_zip(random, path)
    return Case(check, change.text, ("whole.zip",), change.nonsense)


def _change_zip(random: Random, path: Path) -> mutate.Change:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice([*members])
    kind = random.randrange(5)
    if kind == 0:
        new, change = f"{name}{random.choice(['x', '/../y', chr(10)])}", "renamed"
        members[new] = members.pop(name)
    elif kind == 1:
        del members[name]
        change = "left out"
    elif kind == 2:
        members[random.choice(["../x.jsonl", "/etc/x", "x/", "a\nb", "CB.jsonl "])] = b""
        change = "one more beside"
    elif kind == 3:
        members[name] = mutate.data(random, members[name])[0]
        change = "other bytes"
    else:
        lines = members[name].decode().splitlines()
        number = random.randrange(len(lines))
        if random.random() < 0.5:
            lines[number] = mutate.json_text(random, json.loads(lines[number]))[0]
        else:
            lines[number] = json.dumps(mutate.tree(random, json.loads(lines[number]))[0])
        members[name] = "\n".join([*lines, ""]).encode()
        change = f"line {number + 1}"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return mutate.Change(f"whole.zip: {name}: {change}", kind < 3)


def finetuned(random: Random, place: Path) -> Case:
    """A fine-tuned model with a broken file, or the table it is to predict."""
    if random.random() < 0.3:
        change = mutate.file(random, place / "tickets.csv")
        return Case(READERS["predicted"][0], change.text, ("tickets",))
    change = mutate.something_in(random, place / "sweep/CB/seed-1/model")
    return Case(random.choice(READERS["finetuned"]), change.text, ("sweep", "new"))


def page(random: Random, place: Path) -> Case:
    """metrics.jsonl or config.json of a run, broken, and drawn as a page."""
    path = place / random.choice(["out/metrics.jsonl", "out/metrics.jsonl", "out/config.json"])
    breaks = mutate.jsonl_file if path.suffix == ".jsonl" else mutate.json_file
    change = breaks(random, path)
    return Case(random.choice(READERS["page"]), change.text, ("out/",))
