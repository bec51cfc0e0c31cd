"""Task files damaged at random: each is read, or is one error that names the file and the line."""

import json
import random
import shutil
import zipfile

import pytest
from superglue_helpers import SAMPLE, tiny_start
from test_finetune_answers import document

from deberta_ds.base.errors import UserError
from deberta_ds.finetuning.features import encode
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.task import SQUAD, TASKS, task_named
from tools.fuzz import mutate


def read(task, root, split: str) -> None:
    found = read_split(task, root, split, any_size=True)
    encode(task, found.examples, tiny_start().tokenizer, max_length=256, window_overlap=32)


@pytest.mark.parametrize("name", [task.name for task in (*TASKS, *SQUAD)])
def test_no_damage_is_a_traceback(name, tmp_path):
    """Of SQuAD one document holds all questions; an answer's place is checked, too."""
    task, dice = task_named(name), random.Random(f"damage {name}")
    split = "test" if task.predicted_by else "train"
    inside = f"{name}/{name if task.predicted_by else split}.jsonl"
    if is_squad := task in SQUAD:
        inside, lines = task.files["train"], [document(name.removeprefix("SQuAD-"))]
        whole = json.dumps(lines[0]).encode()
    else:
        whole = (SAMPLE / inside).read_bytes()
        lines = [json.loads(line) for line in whole.splitlines()]
    file = tmp_path / inside
    file.parent.mkdir(exist_ok=True)
    refused = 0
    for turn in range(120 if is_squad else 40):
        if dice.random() < 0.6:
            changed = list(lines)
            place = dice.randrange(len(changed))
            changed[place], _ = mutate.tree(dice, changed[place])
            file.write_text("\n".join(json.dumps(line, indent=is_squad and turn % 2 or None)
                                      for line in changed))
        else:
            file.write_bytes(mutate.data(dice, whole)[0])
        try:
            read(task, tmp_path, split)
        except UserError as error:
            assert str(file) in str(error), error
            refused += 1
    assert refused > 10


def test_no_damage_of_a_zip_or_parquet_file_is_a_traceback(tmp_path):
    import datasets

    task, dice = task_named("RTE"), random.Random("archives")
    with zipfile.ZipFile(tmp_path / "RTE.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(SAMPLE / "RTE" / "train.jsonl", "RTE/train.jsonl")
    rows = [{"premise": "a", "hypothesis": "b", "idx": i, "label": i % 2} for i in range(9)]
    (tmp_path / "rte").mkdir()
    table = tmp_path / "rte" / "train-00000-of-00001.parquet"
    for file in (tmp_path / "RTE.zip", table):
        if file is table:
            (tmp_path / "RTE.zip").unlink()
            datasets.Dataset.from_list(rows).to_parquet(str(table))
        whole = file.read_bytes()
        refused = 0
        for _ in range(25):
            file.write_bytes(mutate.data(dice, whole)[0])
            try:
                read(task, tmp_path, "train")
            except UserError as error:
                assert str(tmp_path) in str(error)
                refused += 1
        assert refused > 5
    for bad in ({"label": 7}, {"label": None}, {"label": "x"}, {"idx": {"a": 1}}, {"premise": 3}):
        datasets.Dataset.from_list([rows[0] | bad]).to_parquet(str(table))
        with pytest.raises(UserError, match="rte"):
            read(task, tmp_path, "train")
    datasets.Dataset.from_list([rows[0], rows[1] | {"label": 7}]).to_parquet(str(table))
    with pytest.raises(UserError, match="row 2: not the Hub's rte table"):  # it was row 1
        read(task, tmp_path, "train")


def test_directories_in_the_place_of_files_and_odd_pairs(tmp_path):
    (tmp_path / "RTE" / "train.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match="RTE train is not there"):
        read(task_named("RTE"), tmp_path, "train")
    shutil.copytree(SAMPLE / "AX-g", tmp_path / "AX-g")
    file = tmp_path / "AX-g" / "AX-g.jsonl"
    lines = file.read_text().splitlines()
    for kept in (lines[:-1], [lines[0], *lines[2:], lines[1]]):
        file.write_text("\n".join(kept))
        with pytest.raises(UserError, match=r"AX-g.jsonl:\d+: this line and the next"):
            read(task_named("AX-g"), tmp_path, "test")
