"""A task of one's own: every kind of table and label, learned by heart, predicted from a file."""

import dataclasses
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from data_helpers import run_main
from rank_helpers import start as start_ranks
from rank_helpers import wait as wait_for_ranks
from superglue_helpers import predict, read_lines, save_random, tiny_start, write_lines
from test_finetune_loop import plan
from tokenizer_cases import directory_of

from deberta_ds.base.errors import UserError
from deberta_ds.config.toml_files import as_toml
from deberta_ds.finetuning import predict_file as module
from deberta_ds.finetuning import sweep
from deberta_ds.finetuning.models import Finetuned, load_finetuned
from deberta_ds.tasks.readers import Split, read_split
from deberta_ds.tasks.settings import learning_rate_for
from deberta_ds.tasks.submission import as_written
from deberta_ds.tasks.task import task_named
from deberta_ds.tasks.task_file import load_own_task
from deberta_ds.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PREDICT = ROOT / "launch" / "predict.py"
DICE = random.Random(4)
WORDS = "stone oven bread river house cat dog moon train paper glass winter song".split()
TAGS = {"cat": "B-ANIMAL", "dog": "B-ANIMAL", "moon": "B-SKY"}


def rows_of(kind: str, count: int = 32) -> list[dict]:
    """Return rows whose label only the words tell."""
    DICE.seed(1)  # the same rows whichever test comes first
    rows = []
    for number in range(count):
        words = [DICE.choice(WORDS) for _ in range(6)] + [f"n{number}"]
        row = {"words": " ".join(words), "extra": "about it"}
        animals = [word for word in words if word in ("cat", "dog")]
        if kind == "classification":
            row["label"] = "animal" if animals else "thing"
        elif kind == "multilabel":
            row["label"] = sorted({word for word in words if word in ("cat", "moon")})
        elif kind == "regression":
            row["label"] = len(animals) / 2
        elif kind == "choice":
            row["options"] = [f"it is {animal}" for animal in ("cat", "dog", "moon")]
            DICE.shuffle(row["options"])
            row["label"] = "ABC"[row["options"].index("it is dog")]
        elif kind == "spans":
            text = " ".join(words)
            row["label"] = {"text": animals[:1],
                            "answer_start": [text.index(animal) for animal in animals[:1]]}
        else:
            row["words"] = words
            row["label"] = [TAGS.get(word, "O") for word in words]
        rows.append(row)
    return rows


TEXTS = {"tags": ["words"], "choice": ["words"], "spans": ["extra", "words"]}


def write_task(directory: Path, kind: str, rows, settings: str = "", table: str = "train.jsonl",
               **more) -> Path:
    """Write a task file, and the table that it trains on and evaluates on: of rows, or a file's
    text or bytes; `more` are further keys, without those that are None."""
    directory.mkdir(exist_ok=True)
    if isinstance(rows, str | bytes):
        (directory / table).write_bytes(rows.encode() if isinstance(rows, str) else rows)
    else:
        write_lines(directory / table, rows)
    values = {"name": "mine", "kind": kind, "train": table, "val": table,
              "texts": TEXTS.get(kind, ["words", "extra"])}
    values |= {"choices": ["options"]} if kind == "choice" else {}
    values |= more
    lines = [f"{key} = {as_toml(value)}" for key, value in values.items() if value is not None]
    path = directory / "task.toml"
    path.write_text("\n".join(lines) + f"\n[settings]\n{settings}\n")
    return path


def opened(directory: Path, kind: str, rows, split: str = "train", **more) -> tuple[Split, str]:
    """Return (a split of a task as `write_task` writes it, what is said of the task's labels)."""
    task, said = load_own_task(write_task(directory, kind, rows, **more))
    return read_split(task, ".", split), said


BY_HEART = """epochs = 50
global_batch_size = 8
learning_rate = 6e-3
warmup_share = 0.1
weight_decay = 0.0
dropout = 0.0
head_dropout = 0.0
patience = 30
evals_per_epoch = 1"""


def random_model(directory: Path) -> Finetuned:
    """Return a model with random weights, which is saved in `directory`/model."""
    split, _ = opened(directory, "classification", rows_of("classification"))
    save_random(directory / "model", split.task)
    return load_finetuned(directory / "model")


def train(path: Path, out: Path, *overrides: str, **changes) -> dict:
    task, _ = load_own_task(path)
    (result,) = sweep.run_all(plan(out, [task], overrides, num_seeds=1, data=".", **changes))
    return result


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression", "choice", "tags",
                                  "spans"])
def test_each_kind_learns_16_examples_that_a_file_and_transformers_predict_alike(
        process_group, tmp_path, kind):
    rows = rows_of(kind, 16)
    # Ranks of equal numbers cannot be learned, so a regression is not scored by Spearman here.
    more = {"metrics": ["pearson"]} if kind == "regression" else {}
    result = train(write_task(tmp_path, kind, rows, BY_HEART, **more), tmp_path / "out")
    assert result["score"] >= (0.999 if kind == "regression" else 1.0), result["history"][-1]
    assert not result["failed"] and result["score"] > result["baseline"]
    model = tmp_path / "out" / "mine" / "seed-1" / "model"
    saved, table = load_finetuned(model), tmp_path / "new.jsonl"
    write_lines(table, (row | {"id": n} for n, row in enumerate(rows)))
    lines = predict(saved, table, tmp_path / "out.jsonl", global_batch_size=5, keep=["id"])
    assert [line["id"] for line in lines] == list(range(16))
    for line, row in zip(lines, rows, strict=True):
        wanted = row["label"]
        if kind == "choice":
            wanted = f"choice{'ABC'.index(wanted)}"
        if kind == "spans":
            place = wanted["answer_start"] or [-1]
            wanted = "".join(wanted["text"])
            assert [line["start"], line["end"]] == [place[0], place[0] + len(wanted)]
            assert (line["no_answer_margin"] > saved.threshold) == (not wanted)
        if kind == "regression":
            assert line["prediction"] == pytest.approx(wanted, abs=0.3)
        else:
            assert line["prediction"] == wanted
    if kind not in ("choice", "spans"):  # test_finetune_directory.py, test_finetune_answers.py
        check_transformers(model, kind, rows, lines[0])


def check_transformers(model: Path, kind: str, rows: list[dict], line: dict) -> None:
    """Compare scores with transformers', and the first row's `line` with its pipeline's answers."""
    head = "Token" if kind == "tags" else "Sequence"
    theirs = getattr(transformers, f"AutoModelFor{head}Classification").from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    scores = [line["scores"] for line in read_lines(model.parent / "val_predictions.jsonl")]
    for row, wanted in zip(rows, scores, strict=True):
        texts = [" ".join(row["words"])] if kind == "tags" else [row["words"], row["extra"]]
        inputs = tokenizer(*texts, return_tensors="pt", return_offsets_mapping=True)
        offsets = inputs.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            found = theirs.eval()(**inputs).logits[0]
        if kind == "tags":  # a word's label is that of its first token
            starts = [len(" ".join(row["words"][:n])) + (n > 0) for n in range(len(row["words"]))]
            ends = [end for _, end in offsets]
            found = torch.stack([found[next(i for i, end in enumerate(ends) if end > start)]
                                 for start in starts]).flatten()
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=2e-5)
    problem = {"classification": "single_label_classification", "regression": "regression",
               "multilabel": "multi_label_classification"}
    assert theirs.config.problem_type == problem.get(kind)
    if kind == "tags":  # see test_finetune_annotations.py
        return
    ask = transformers.pipeline("text-classification", str(model), top_k=None)
    answers = ask({"text": rows[0]["words"], "text_pair": rows[0]["extra"]})
    answers = answers[0] if isinstance(answers[0], list) else answers
    assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(
        line.get("probabilities", {"score": line["prediction"]}), abs=3e-5)


def test_class_weights_multiply_what_an_example_adds_to_the_loss(process_group, tmp_path):
    rows = rows_of("classification", 16)
    given = ("epochs = 1\nglobal_batch_size = 16\nlearning_rate = 1e-9\ndropout = 0.0\n"
             "head_dropout = 0.0")
    counts = {name: sum(row["label"] == name for row in rows) for name in ("animal", "thing")}
    losses = {}
    for weights in ("", "balanced", "{animal = 0}", "{animal = 3.0}"):
        value = weights if weights.startswith("{") else f'"{weights}"'
        path = write_task(tmp_path, "classification", rows, f"{given}\nclass_weights = {value}")
        losses[weights] = train(path, tmp_path / f"out{len(losses)}")["history"][0]["loss"]
    thing, animal = losses["{animal = 0}"], losses[""] - losses["{animal = 0}"]
    assert losses["{animal = 3.0}"] == pytest.approx(3 * animal + thing, abs=4e-5)
    balanced = sum(part * 16 / (2 * counts[name]) for name, part in
                   (("animal", animal), ("thing", thing)))
    assert losses["balanced"] == pytest.approx(balanced, abs=4e-5)


@pytest.mark.multi
def test_two_ranks_predict_a_file_byte_for_byte_alike(process_group, tmp_path, monkeypatch):
    saved = random_model(tmp_path)
    table = tmp_path / "new.csv"
    table.write_text("id,words,extra\n" + "".join(
        f"{n},{' '.join(WORDS[: 1 + n % 9])},x\n" for n in range(90)))
    processes = start_ranks(
        2, ["--model", str(tmp_path / "model"), "--data", str(table), "--out",
            str(tmp_path / "two.jsonl"), "--keep", "id", "--global_batch_size", "8"],
        tmp_path / "log", PREDICT)
    monkeypatch.setattr("deberta_ds.finetuning.predict_file.BLOCK_ROWS", 7)  # blocks change nothing
    one = predict(saved, table, tmp_path / "one.jsonl", keep=["id"], max_length=256)
    assert wait_for_ranks(processes, 120) == [0, 0], (tmp_path / "log").read_text()
    two = read_lines(tmp_path / "two.jsonl")
    assert [line["id"] for line in two] == [str(n) for n in range(90)]
    for first, second in zip(one, two, strict=True):
        assert first["prediction"] == second["prediction"]
        assert first["probabilities"] == pytest.approx(second["probabilities"], abs=2e-5)


def test_an_interrupted_prediction_leaves_what_was_there_and_a_second_one_is_whole(
        process_group, tmp_path, monkeypatch):
    saved = random_model(tmp_path)
    table, out = tmp_path / "new.jsonl", tmp_path / "out" / "new.jsonl"
    write_lines(table, ({"words": " ".join(WORDS[: 1 + n % 9]), "extra": "x", "n": n}
                        for n in range(30)))
    out.parent.mkdir()
    out.write_text("old\n")
    monkeypatch.setattr(module, "BLOCK_ROWS", 7)
    scored, calls = module.score_split, []

    def stopped(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return scored(*arguments, **options)

    monkeypatch.setattr(module, "score_split", stopped)
    with pytest.raises(KeyboardInterrupt):
        predict(saved, table, out, keep=["n"])
    assert [file.name for file in out.parent.iterdir()] == ["new.jsonl"]
    assert out.read_text() == "old\n"
    lines = predict(saved, table, out, keep=["n"])
    assert [(line["idx"], line["n"]) for line in lines] == [(n, n) for n in range(30)]


def test_the_first_page_of_the_docs_works_as_it_is_written(process_group, tmp_path, monkeypatch):
    """The task file and the commands of docs/how-to/fine-tune.md, as they stand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deberta_ds.cluster.dist.destroy", lambda: None)  # DeepSpeed keeps it
    text = (ROOT / "docs/how-to/fine-tune.md").read_text()
    task, commands = re.findall(r"```(?:toml)?\n(.*?)```", text, re.DOTALL)[:2]
    Path("tickets.toml").write_text(task)
    lines = [f'{n},{WORDS[n % 5]},"a long, {WORDS[n % 3]} text",{("mail", "phone")[n % 2]}'
             for n in range(24)]
    for name in ("train.csv", "val.csv", "new.csv"):
        Path(name).write_text("\n".join(["id,title,body,queue", *lines]) + "\n")
    save_random(Path("my-deberta"), task_named("RTE"))
    for command in commands.splitlines():
        _, script, *words = command.partition(" #")[0].split()
        printed = run_main(script, *words)
        if "--look" in words:
            assert "train: " in printed and "not read: id" in printed
        elif script.endswith("finetune.py"):
            assert "tickets: 2 labels: mail (12), phone (12)" in printed
            assert "<h1>" in Path("runs/mine/report.html").read_text()
            card = Path("runs/mine/tickets/seed-1/model/README.md").read_text()
            assert "train.csv, 24 examples" in card and str(tmp_path) not in card
    assert len(list(Path("runs/five/tickets").glob("seed-*/result.json"))) == 2
    found = read_lines(Path("predictions.jsonl"))
    assert [line["id"] for line in found] == [str(n) for n in range(24)]
    assert all(line["prediction"] in ("mail", "phone") for line in found)


def test_a_directory_of_the_tasks_own_name_does_not_stand_for_its_tables(tmp_path, monkeypatch):
    rows, directory = rows_of("classification", 12), tmp_path / "mine"  # as the task is called
    path = write_task(directory, "classification", rows, val="val.jsonl")
    write_lines(directory / "val.jsonl", rows[:1])
    write_lines(directory / "test.jsonl", ["not a row of this task"])
    monkeypatch.chdir(tmp_path)
    task = load_own_task(path)[0]
    assert [len(read_split(task, ".", split).examples) for split in ("train", "val")] == [12, 1]
    with pytest.raises(UserError, match="mine: its task file names no test table"):
        read_split(task, ".", "test")


def test_a_directory_may_have_the_marks_of_a_pattern(tmp_path):
    split, _ = opened(tmp_path / "run[1]", "classification", rows_of("classification", 8),
                      train="tr*.jsonl")
    assert len(split.examples) == 8


def test_a_small_regression_keeps_its_digits():
    task = dataclasses.replace(task_named("RTE"), head="regress", labels=("score",))
    assert as_written(task, float(np.float32(3.7123456e-5))) == 3.712346e-05


def test_text_that_the_tokenizer_does_not_know_is_named(process_group, tmp_path, capsys):
    tokenizer = Tokenizer(directory_of("bert"))
    start = dataclasses.replace(tiny_start(), tokenizer=tokenizer, config=dataclasses.replace(
        tiny_start().config, vocab_size=tokenizer.size))
    rows = [row | {"words": "ያልታወቀ [SEP] ጽሑፍ"} for row in rows_of("classification", 8)]
    said = []
    path = write_task(tmp_path, "classification", rows, "epochs = 1")
    result = train(path, tmp_path / "out", start=start, say=said.append)
    (unknown,) = {line for line in said if "tokens are unknown" in line}
    assert "train.jsonl" in unknown and "random:tiny was not trained on text like this" in unknown
    assert any("8 of 8 examples have a special token, such as [SEP]" in line for line in said)
    assert any("by the size of the encoder" in line for line in said)
    assert result["settings"]["learning_rate"] == learning_rate_for(start.config)
    saved = load_finetuned(tmp_path / "out" / "mine" / "seed-1" / "model")
    predict(saved, tmp_path / "train.jsonl", tmp_path / "out.jsonl")
    assert "tokens are unknown" in capsys.readouterr().err
