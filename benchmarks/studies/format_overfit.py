"""Can every head learn 32 rows by heart from files in the official forms of GLUE, SQuAD, RACE...?

    python -m benchmarks.studies.format_overfit [--tasks CoLA race ...]

The rows are made up: words from a list, and labels that are drawn, so only reading, features and
heads are tested. They are written as the official files are (tables, documents, columns) and read
as launch/finetune.py does; a model of random values (2 layers of 128) is scored on the rows that it
was trained on. SuperGLUE's tasks: benchmarks/studies/superglue_overfit.py, on official rows.
"""

import argparse
import csv
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.studies.superglue_overfit import ROOT, ROWS, SETTINGS, run, write_shape
from deberta_ds.base.errors import exit_cleanly
from deberta_ds.base.files import write_atomic

WORDS = ("stone oven bread river house winter song paper glass train moon letter garden market "
         "island window coffee bridge engine silver mountain forest kitchen doctor teacher captain "
         "morning evening summer harbor pencil mirror carpet button basket ladder bottle candle "
         "thunder feather blanket whistle hammer compass anchor marble pepper ginger").split()
PEOPLE = "Anna Bruno Clara Dario Elena Felix Greta Hugo".split()
PLACES = "Rome Oslo Lima Cairo Kyoto Quito Delhi Perth".split()
NLI = ("entailment", "neutral", "contradiction")
RTE = ("entailment", "not_entailment")
BINARY = ("0", "1")


def words(dice: random.Random, count: int = 7) -> str:
    return " ".join(dice.sample(WORDS, count))


def table(path: Path, header: str, rows: list[list[str]]) -> None:
    """Write a table without quoting, with columns "..." of no meaning to this project."""
    lines = [header] if header else []
    write(path, "\n".join(lines + ["\t".join(map(str, row)) for row in rows]) + "\n")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def glue(header: str, columns: Callable[[int, random.Random], list], dev: str = "dev.tsv"):
    """Return a function that writes a task of GLUE as train and validation table."""

    def make(directory: Path, task: str, dice: random.Random) -> None:
        rows = [columns(number, dice) for number in range(ROWS)]
        for name in ("train.tsv", dev):
            table(directory / task / name, header, rows)

    return make


def squad(with_none: bool):
    def make(directory: Path, task: str, dice: random.Random) -> None:
        questions = []
        for number in range(ROWS):
            context = [*words(dice, 12).split(), dice.choice(PLACES), *words(dice, 6).split()]
            first = dice.randrange(len(context) - 2)
            answer = " ".join(context[first : first + 2])
            text = " ".join(context)
            none = with_none and number % 3 == 0
            found = [] if none else [{"text": answer, "answer_start": text.index(answer)}]
            asked = {"id": f"q{number}", "question": f"Which {words(dice, 3)}?", "answers": found}
            asked |= {"is_impossible": none} if with_none else {}
            questions.append({"context": text, "qas": [asked]})
        whole = {"version": task[-3:], "data": [{"title": "made up", "paragraphs": questions}]}
        for split in ("train", "dev"):
            write(directory / f"{split}-v{task[-3:]}.json", json.dumps(whole))

    return make


def race(directory: Path, task: str, dice: random.Random) -> None:
    for number in range(ROWS // 2):  # two questions a document
        document = {"article": words(dice, 20), "id": f"middle{number}.txt",
                    "questions": [f"Why {words(dice, 3)}?" for _ in range(2)],
                    "options": [[words(dice, 3) for _ in range(4)] for _ in range(2)],
                    "answers": [dice.choice("ABCD") for _ in range(2)]}
        for split in ("train", "dev"):
            write(directory / "RACE" / split / "middle" / f"{number}.txt", json.dumps(document))


def swag(directory: Path, task: str, dice: random.Random) -> None:
    header = ["", "video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source",
              *(f"ending{number}" for number in range(4)), "label"]
    for split in ("train", "val"):
        dice.seed(5)
        with open(directory / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            for number in range(ROWS):
                first, second = words(dice), words(dice, 2)
                endings = [f'{words(dice, 3)}, "{words(dice, 1)}"' for _ in range(4)]
                writer.writerow([number, f"v{number}", number, f"{first} {second}", first, second,
                                 "gold", *endings, dice.randrange(4)])


def sentence(dice: random.Random) -> list[tuple[str, str]]:
    """Return (word, tag): a name of two words, a place, and words around them."""
    return [*((word, "O") for word in words(dice, 3).split()),
            (dice.choice(PEOPLE), "B-PER"), (dice.choice(WORDS).title(), "I-PER"),
            *((word, "O") for word in words(dice, 2).split()), (dice.choice(PLACES), "B-LOC"),
            (".", "O")]


def conll2003(directory: Path, task: str, dice: random.Random) -> None:
    for name in ("train.jsonl", "valid.jsonl"):
        found = [sentence(dice) for _ in range(ROWS)]
        write(directory / name, "".join(json.dumps({"tokens": [word for word, _ in one], "tags": [
            tag for _, tag in one]}) + "\n" for one in found))


GLUE_TABLES = {
    "CoLA": glue("", lambda n, dice: ["gj04", dice.choice(BINARY), "", words(dice) + "."]),
    "SST-2": glue("sentence\tlabel", lambda n, dice: [words(dice) + " ", dice.choice(BINARY)]),
    "MRPC": glue("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
                 lambda n, dice: [dice.choice(BINARY), n, n, f'"{words(dice)}', words(dice)]),
    "STS-B": glue("index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
                  "\tscore", lambda n, dice: [n, "main", "f", 2012, n, "none", "none", words(dice),
                                              words(dice), round(5 * n / (ROWS - 1), 3)]),
    "QQP": glue("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
                lambda n, dice: [n, n, n, words(dice) + "?", words(dice) + "?",
                                 dice.choice(BINARY)]),
    "MNLI": glue("index\tpromptID\tpairID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label",
                 lambda n, dice: [n, n, n, "fiction", words(dice), words(dice),
                                  *[dice.choice(NLI)] * 2], "dev_matched.tsv"),
    "QNLI": glue("index\tquestion\tsentence\tlabel",
                 lambda n, dice: [n, words(dice) + "?", words(dice), dice.choice(RTE)]),
    "RTE": glue("index\tsentence1\tsentence2\tlabel",
                lambda n, dice: [n, words(dice), words(dice), dice.choice(RTE)]),
    "WNLI": glue("index\tsentence1\tsentence2\tlabel",
                 lambda n, dice: [n, words(dice), words(dice), dice.choice(BINARY)]),
}
MAKERS: dict[str, Callable[[Path, str, random.Random], None]] = {
    **GLUE_TABLES, "SQuAD-v1.1": squad(False), "SQuAD-v2.0": squad(True),
    "race": race, "swag": swag, "conll2003": conll2003,
}
# Files under launch/runs/tasks, with what differs from them.
OWN = {"race": {"train.parquet": "RACE/train", "validation.parquet": "RACE/dev"}, "swag": {},
       "conll2003": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--out", default="benchmarks/results/format_overfit.json")
    options = parser.parse_args()
    out = Path(options.out)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        text = " ".join([*WORDS, *PEOPLE, *PLACES, *(word.title() for word in WORDS)])
        write(scratch / "text.txt", "\n".join([text] * 40) + "\n")
        run("data_prep/train_tokenizer.py", str(scratch / "text.txt"), "--out",
            str(scratch / "spm.model"), "--vocab_size", "400")
        write_shape(scratch)
        for task in options.tasks:
            found = measure(task, scratch)
            print(json.dumps({task: found}), flush=True)
            record = json.loads(out.read_text()) if out.exists() else {}
            write_atomic(out, json.dumps(record | {task: found}, indent=1) + "\n")


def measure(name: str, scratch: Path) -> dict:
    """Return the score on the rows of a task after training on them."""
    from deberta_ds.engine.engine import init_distributed
    from deberta_ds.finetuning import sweep
    from deberta_ds.finetuning.models import open_start
    from deberta_ds.tasks import settings
    from deberta_ds.tasks.own import load_own_task
    from deberta_ds.tasks.task import TASK_NAMES, task_named

    data = scratch / name
    data.mkdir()
    MAKERS[name](data, name, random.Random(5))
    if name in OWN:
        recipe = name
        lines = (ROOT / f"launch/runs/tasks/{recipe}.toml").read_text()
        for old, new in OWN[name].items():
            lines = lines.replace(f'"{old}"', f'"{new}"')
        write(data / "task.toml", lines)
        task, _ = load_own_task(data / "task.toml")
    else:
        task = task_named(name)
    given = settings.load(None, [f"--all.{text}" for text in SETTINGS], (*TASK_NAMES, task.name))
    (result,) = sweep.run_all(sweep.Sweep(
        tasks=(task,), num_seeds=1, start=open_start(f"random:{scratch / 'shape'}"), data=str(data),
        out=scratch / "out" / name, deepspeed={}, device=init_distributed(), settings=given,
        any_size=True, predict_test=False, keep_models=False, say=lambda text: None))
    return {"rows": result["train"][1], "score": result["score"], "metrics": result["metrics"],
            "baseline": result["baseline"], "best_step": result["best_step"]}


if __name__ == "__main__":
    exit_cleanly(main)
