"""Files of SuperGLUE and GLUE: official forms are read alike, a broken one is one clear error."""

import copy
import json
import shutil
import zipfile
from pathlib import Path

import pytest
from superglue_helpers import ALL_TASKS, FEW, REAL, SAMPLE, needs_real, sample

from deberta_ds.base.errors import UserError
from deberta_ds.tasks import readers
from deberta_ds.tasks.layouts import examples_of, find_phrase, without_highlight_marks
from deberta_ds.tasks.readers import carve, has_split, read_split
from deberta_ds.tasks.task import ALL_TASKS as ALL_OF_BOTH
from deberta_ds.tasks.task import TASKS, task_named


@pytest.mark.parametrize("name", [task.name for task in TASKS])
def test_directory_task_zip_and_combined_zip_give_the_same_examples(name, tmp_path):
    task = task_named(name)
    wanted = read_split(task, SAMPLE, "test", any_size=True).examples
    inside = f"{name}/{name if task.predicted_by else 'test'}.jsonl"
    for archive, prefix in ((tmp_path / "a" / f"{name}.zip", ""),
                            (tmp_path / "b" / "combined.zip", "data/")):
        archive.parent.mkdir()
        with zipfile.ZipFile(archive, "w") as opened:
            opened.write(SAMPLE / inside, prefix + inside)
        assert read_split(task, archive.parent, "test", any_size=True).examples == wanted
        assert read_split(task, archive, "test", any_size=True).examples == wanted


def _hub_rows(name: str) -> list[dict]:
    """Return the sample's train rows as the Hub's table has them (flat, with class numbers)."""
    lines = [json.loads(line) for line in (SAMPLE / name / "train.jsonl").open()]
    if name == "MultiRC":
        return [
            {"paragraph": line["passage"]["text"], "question": q["question"], "answer": a["text"],
             "idx": {"paragraph": line["idx"], "question": q["idx"], "answer": a["idx"]},
             "label": a["label"]}
            for line in lines for q in line["passage"]["questions"] for a in q["answers"]
        ]
    if name == "ReCoRD":
        rows = []
        for line in lines:
            text, entities = line["passage"]["text"], line["passage"]["entities"]
            spans = {"text": [text[e["start"] : e["end"] + 1] for e in entities],
                     "start": [e["start"] for e in entities],
                     "end": [e["end"] + 1 for e in entities]}
            rows += [
                {"passage": text, "query": qa["query"], "entities": sorted(set(spans["text"])),
                 "entity_spans": spans, "answers": sorted({a["text"] for a in qa["answers"]}),
                 "idx": {"passage": line["idx"], "query": qa["idx"]}}
                for qa in line["qas"]
            ]
        return rows
    numbers = {"entailment": 0, "contradiction": 1, "neutral": 2, "not_entailment": 1}
    rows = []
    for line in lines:
        row = line | line.pop("target", {})
        row.pop("version", None)
        row["label"] = numbers.get(row["label"], row["label"])
        rows.append(row | {"label": int(row["label"])})
    return rows


@pytest.mark.parametrize("name", ALL_TASKS)
def test_hub_parquet_gives_the_same_examples(name, tmp_path):
    datasets = pytest.importorskip("datasets")
    task = task_named(name)
    (tmp_path / task.hub).mkdir()
    table = datasets.Dataset.from_list(_hub_rows(name))
    table.to_parquet(str(tmp_path / task.hub / "train-00000-of-00001.parquet"))
    found = read_split(task, tmp_path, "train", any_size=True).examples
    for mine, wanted in zip(found, sample(name).examples, strict=True):
        assert mine.key == wanted.key and mine.label == wanted.label
        assert mine.sequences == wanted.sequences and mine.spans == wanted.spans
        assert set(mine.gold) == set(wanted.gold)


def test_broken_parquet_is_one_error(tmp_path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "rte").mkdir()
    (tmp_path / "rte" / "train-00000-of-00001.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match="train-00000-of-00001.parquet: damaged or cut short"):
        has_split(task_named("RTE"), tmp_path, "train")
    assert not has_split(task_named("RTE"), tmp_path, "test")
    row = {"premise": "a", "hypothesis": "b", "idx": 0, "label": 0}
    table = tmp_path / "rte" / "train-00000-of-00001.parquet"
    for bad in ({"label": 7}, {"label": None}, {"label": "x"}, {"idx": {"a": 1}}, {"premise": 3}):
        datasets.Dataset.from_list([row | bad]).to_parquet(str(table))
        with pytest.raises(UserError, match="rte"):
            read_split(task_named("RTE"), tmp_path, "train", any_size=True)
    datasets.Dataset.from_list([row, row | {"idx": 1, "label": 7}]).to_parquet(str(table))
    with pytest.raises(UserError, match="row 2: not the Hub's rte table"):  # it was row 1
        read_split(task_named("RTE"), tmp_path, "train", any_size=True)


def _without(key):
    return lambda line: line.pop(key)


def _with(**values):
    return lambda line: line.update(values)


BREAKS = [
    ("BoolQ", _with(label="true"), 'field "label" must be true or false'),
    ("BoolQ", _without("passage"), 'field "passage" is missing'),
    ("CB", _with(label="maybe"), 'must be one of \'contradiction\', \'neutral\', \'entailment\''),
    ("RTE", _with(idx="3"), 'field "idx" must be an integer'),
    ("RTE", _with(idx=True), 'field "idx" must be an integer, found true'),
    ("RTE", _with(premise="  "), 'field "premise" is empty'),
    ("RTE", _without("label"), 'field "label" is missing'),
    ("COPA", _with(question="why"), '"question" must be "cause" or "effect"'),
    ("COPA", _with(label=2), "must be one of 0, 1"),
    ("WiC", _with(end1=999), "outside"),
    ("WiC", _with(start2=1.5), 'field "start2" must be an integer'),
    ("WSC", _with(target=[1]), 'field "target" must be a JSON object'),
    ("WSC", lambda line: line["target"].update(span1_text="zebra"), "nowhere near word"),
    ("MultiRC", _with(version=1.0), '"version" must be 1.1'),
    ("MultiRC", lambda line: line["passage"]["questions"][0]["answers"][1].update(label="0"),
     r'passage.questions\[0\].answers\[1\].label" must be an integer'),
    ("ReCoRD", lambda line: line["passage"]["entities"][0].update(end=9999), "outside its passage"),
    ("ReCoRD", lambda line: line["qas"][0].update(query="no gap"), "has no @placeholder"),
    ("ReCoRD", lambda line: line["qas"][0].update(answers=[]), "no answer of query"),
    ("ReCoRD", lambda line: line["passage"].update(entities=[]), "no entities"),
]


@pytest.mark.parametrize(("name", "damage", "message"), BREAKS)
def test_a_wrong_field_names_file_line_and_format(name, damage, message, tmp_path):
    lines = (SAMPLE / name / "train.jsonl").read_text().splitlines()
    value = copy.deepcopy(json.loads(lines[-1]))
    damage(value)
    (tmp_path / name).mkdir()
    file = tmp_path / name / "train.jsonl"
    file.write_text("\n".join([*lines[:-1], json.dumps(value)]))
    with pytest.raises(UserError, match=message) as caught:
        read_split(task_named(name), tmp_path, "train", any_size=True)
    assert f"{file}:{len(lines)}: " in str(caught.value)
    assert "expected format: {" in str(caught.value)


VAL = (SAMPLE / "RTE" / "val.jsonl").read_bytes()
PARQUET = "rte/validation-00000-of-00001.parquet"


@pytest.mark.parametrize(("file", "content", "said"), [
    ("RTE/val.jsonl", VAL[:-20], "val.jsonl:16: not a JSON object"),
    ("RTE/val.jsonl", VAL, "16 predictions, but the official RTE val has 277: the file is trunc"),
    ("RTE/val.jsonl", VAL + VAL.partition(b"\n")[0], r"idx \(0,\) was already used at .*:1"),
    ("RTE/val.jsonl", VAL[:60] + b"\xff" + VAL[60:], "val.jsonl:1: invalid UTF-8"),
    ("RTE/val.jsonl", b"", "not a single example"),
    ("RTE/val.jsonl/directory", b"", "RTE val is not there"),
    (PARQUET, b"PAR1 not really", f"{PARQUET}: damaged or cut short")])
def test_a_damaged_file_is_named(tmp_path, file, content, said):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_split(task_named("RTE"), tmp_path, "val", any_size=not said.startswith("16"))


def test_a_line_separator_inside_a_text_is_no_line_end(tmp_path):
    line = {"premise": "One\u2028two.", "hypothesis": "b", "label": "entailment", "idx": 0}
    (tmp_path / "RTE").mkdir()
    text = json.dumps(line, ensure_ascii=False)
    (tmp_path / "RTE" / "train.jsonl").write_text(text, encoding="utf-8")
    assert len(read_split(task_named("RTE"), tmp_path, "train", any_size=True).examples) == 1


def test_lines_that_are_no_pair(tmp_path):
    shutil.copytree(SAMPLE / "AX-g", tmp_path / "AX-g")
    file = tmp_path / "AX-g" / "AX-g.jsonl"
    lines = file.read_text().splitlines()
    for kept in (lines[:-1], [lines[0], *lines[2:], lines[1]]):
        file.write_text("\n".join(kept))
        with pytest.raises(UserError, match=r"AX-g.jsonl:\d+: this line and the next"):
            read_split(task_named("AX-g"), tmp_path, "test", any_size=True)


def test_copa_puts_the_cause_first():
    line = {"premise": "P", "choice1": "A", "choice2": "B", "question": "cause", "label": 1}
    for idx, (question, wanted) in enumerate(
        [("cause", (("A", "P"), ("B", "P"))), ("effect", (("P", "A"), ("P", "B")))]):
        value = line | {"question": question, "idx": idx}
        (example,) = examples_of(task_named("COPA"), "here", value, "train")
        assert example.sequences == wanted and example.label == 1


def test_record_mentions_count_the_last_character_and_all_gold_strings():
    first, second = sample("ReCoRD").examples
    assert first.names == ("Velm", "Anna Brandt", "Paul Reyes", "Velm", "Reyes")
    assert first.gold == ("Anna Brandt",) and second.gold == ("Paul Reyes", "Reyes")


def test_highlight_marks_become_stops_and_move_nothing():
    text = "He won\n@highlight\nA cup!\n@highlight\nB"
    shown = without_highlight_marks(text)
    assert len(shown) == len(text) and "@highlight" not in shown
    assert shown.index("A cup!") == text.index("A cup!") and shown.startswith("He won. ")
    assert "!." not in shown and shown.endswith("B")


def test_find_phrase():
    text = "Mark told  Pete many lies; he, Pete's friend, was\nsorry."
    assert text[slice(*find_phrase(text, "mark", 0))] == "Mark"
    assert text[slice(*find_phrase(text, "he", 5))] == "he"
    assert text[slice(*find_phrase(text, "Pete", 6))] == "Pete"  # without 's
    assert text[slice(*find_phrase(text, "was sorry", 8))] == "was\nsorry"
    assert text[slice(*find_phrase(text, "sorry", 7))] == "sorry"  # two words off
    assert text[slice(*find_phrase(text, "Mark and Pete", 0))] == "Mark"  # not contiguous
    assert find_phrase(text, "zebra", 3) is None


@needs_real
def test_official_files_have_the_official_sizes_and_every_phrase_is_found():
    for task in TASKS:
        for split in ("train", "val", "test"):
            if task.count(split) and (task.name, split) != ("BoolQ", "train"):
                if task.name == "ReCoRD":
                    continue
                assert len(read_split(task, REAL, split).examples) == task.count(split)
    val = read_split(task_named("WSC"), REAL, "val").examples
    first, second = val[42].spans  # the file's index is off by one here
    assert val[42].sequences[0][0][second.start : second.end] == "it"


@needs_real
def test_carving_boolq_shares_no_passage_and_loses_no_row():
    val = read_split(task_named("BoolQ"), REAL, "val")
    train, kept = carve(val, 0.8, 0)
    passages = [{e.sequences[0][0] for e in part.examples} for part in (train, kept)]
    assert not passages[0] & passages[1]
    assert sorted(e.key for part in (train, kept) for e in part.examples) == sorted(
        e.key for e in val.examples)
    assert 0.78 < len(train.examples) / len(val.examples) < 0.82
    assert carve(val, 0.8, 0) == (train, kept)


@needs_real
def test_fewglue_samples_are_read_only_when_allowed():
    assert len(read_split(task_named("ReCoRD"), FEW, "train", any_size=True).examples) == 32
    with pytest.raises(UserError, match="--any_size"):
        read_split(task_named("ReCoRD"), FEW, "train")


def test_names_are_the_leaderboards_in_any_case():
    assert task_named("mnli").name == "MNLI"
    assert len(TASKS) == 10 and "AX-b" in {task.name for task in TASKS}
    with pytest.raises(UserError, match="unknown task 'QQX'"):
        task_named("QQX")


# A few rows of each task of GLUE in the official form (written for this project): file -> lines.
OFFICIAL = {
    "CoLA/train.tsv": ["gj04\t1\t\tThe cat sat.", "gj04\t0\t*\tCat the sat."],
    "CoLA/dev.tsv": ["gj04\t1\t\tA dog ran.", 'ad03\t0\t*\tRan "a dog.'],
    "CoLA/test.tsv": ["index\tsentence", "0\tBirds sing.", "1\tSing birds the."],
    "SST-2/train.tsv": ["sentence\tlabel", "a fine film \t1", "dull \t0"],
    "MRPC/train.tsv": ["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
                       '1\t7\t8\tHe said "yes.\tHe agreed.', "0\t7\t9\tHe left.\tIt rained."],
    "STS-B/train.tsv": ["index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\t"
                        "sentence2\tscore",
                        "0\tmain\tf\t2012\t1\tnone\tnone\tA plane.\tA jet.\t5.0",
                        "1\tmain\tf\t2012\t4\tnone\tnone\tA man.\tA cat.\t0.75"],
    "QQP/train.tsv": ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
                      "1\t2\t3\tWhy?\tHow?\t0", "4\t5\t6\tcut", "7\t8\t9\tWhen?\t\t1"],
    "MNLI/train.tsv": ["index\tsentence1\tsentence2\tlabel1\tgold_label",
                       "0\tIt rained.\tIt was wet.\tneutral\tentailment"],
    "MNLI/dev_mismatched.tsv": ["index\tsentence1\tsentence2\tgold_label", "0\tA.\tB.\tneutral"],
    "QNLI/train.tsv": ["index\tquestion\tsentence\tlabel", "0\tWho?\tHe did.\tnot_entailment"],
    "RTE/train.tsv": ["index\tsentence1\tsentence2\tlabel", "0\tA.\tB.\tentailment"],
    "WNLI/train.tsv": ["index\tsentence1\tsentence2\tlabel", "0\tIt fell.\tThe cup fell.\t1"],
    "AX/AX.tsv": ["index\tsentence1\tsentence2", "0\tA.\tB.", "1\tC.\tD."],
}
WANTED = {
    ("CoLA", "train"): ([("The cat sat.",), ("Cat the sat.",)], [1, 0]),
    ("CoLA", "val"): ([("A dog ran.",), ('Ran "a dog.',)], [1, 0]),
    ("CoLA", "test"): ([("Birds sing.",), ("Sing birds the.",)], [None, None]),
    ("SST-2", "train"): ([("a fine film ",), ("dull ",)], [1, 0]),
    ("MRPC", "train"): ([('He said "yes.', "He agreed."), ("He left.", "It rained.")], [1, 0]),
    ("STS-B", "train"): ([("A plane.", "A jet."), ("A man.", "A cat.")], [5.0, 0.75]),
    ("QQP", "train"): ([("Why?", "How?"), ("When?", "")], [0, 1]),  # one known row is cut off
    ("MNLI", "train"): ([("It rained.", "It was wet.")], [2]),
    ("MNLI-mm", "val"): ([("A.", "B.")], [1]),
    ("QNLI", "train"): ([("Who?", "He did.")], [0]),
    ("RTE", "train"): ([("A.", "B.")], [1]),
    ("WNLI", "train"): ([("It fell.", "The cup fell.")], [1]),
    ("AX", "test"): ([("A.", "B."), ("C.", "D.")], [None, None]),
}


@pytest.fixture
def official(tmp_path) -> Path:
    for name, lines in OFFICIAL.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("name", "split"), WANTED)
def test_official_tables_are_read(official, name, split):
    found = read_split(task_named(name), official, split, any_size=True).examples
    texts, labels = WANTED[name, split]
    assert [example.sequences[0] for example in found] == texts
    assert [example.label for example in found] == labels


def test_the_hubs_parquet_gives_the_same_and_its_rte_has_other_columns_than_superglues(
        official, tmp_path):
    datasets = pytest.importorskip("datasets")
    numbers = {"MNLI": [2, 1, 0], "MNLI-mm": [2, 1, 0], "QNLI": [1, 0], "RTE": [1, 0]}
    for (name, split), (texts, labels) in WANTED.items():
        task = task_named(name)
        columns = ("sentence1", "sentence2") if name == "RTE" else task.texts  # not SuperGLUE's
        rows = [dict(zip(columns, text, strict=True)) for text in texts]
        for idx, (row, label) in enumerate(zip(rows, labels, strict=True)):
            known = numbers[name][label] if name in numbers else label
            row |= {"idx": idx, "label": -1 if label is None else known}
        directory = tmp_path / "hub" / task.hub
        directory.mkdir(parents=True, exist_ok=True)
        hub_split = {"train": "train", "val": "validation", "test": "test"}[split]
        file = f"{task.hub_splits.get(split, hub_split)}-00000-of-00001.parquet"
        datasets.Dataset.from_list(rows).to_parquet(str(directory / file))
        found = read_split(task, tmp_path / "hub", split, any_size=True).examples
        assert [example.sequences[0] for example in found] == texts, name
        assert [example.label for example in found] == labels, name


@pytest.mark.parametrize("name", ["AX.tsv", "diagnostic/diagnostic.tsv"])
def test_the_diagnostic_table_is_found_where_it_is_downloaded_to(official, name):
    lines = (official / "AX" / "AX.tsv").read_text()
    (official / "AX" / "AX.tsv").unlink()
    (official / name).parent.mkdir(exist_ok=True)
    (official / name).write_text(lines)
    split = read_split(task_named("AX"), official, "test", any_size=True)
    assert [e.sequences[0] for e in split.examples] == [("A.", "B."), ("C.", "D.")]
    assert split.source == str(official / name)


def test_broken_tables_are_named(official):
    def refused(name, text, message, split="train"):
        file = official / name
        file.write_text(text)
        task = task_named(name.split("/")[0])
        with pytest.raises(UserError, match=message) as caught:
            read_split(task, official, split, any_size=True)
        assert str(file) in str(caught.value)

    refused("SST-2/train.tsv", "sentence\tlabel\ngood\t2\n", r":2: .*must be one of '0', '1'")
    refused("SST-2/train.tsv", "sentence\tlabel\ngood\n", r":2: 1 columns, the header has 2")
    refused("SST-2/train.tsv", "text\tlabel\ngood\t1\n", "no column 'sentence'; there are text")
    refused("SST-2/train.tsv", "sentence\tlabel\n \t1\n", r":2: .*is empty")
    refused("STS-B/train.tsv", "sentence1\tsentence2\tscore\na\tb\tnan\n", "finite number")
    refused("STS-B/train.tsv", "sentence1\tsentence2\tscore\na\tb\tx\n", "must be a number")
    refused("QQP/train.tsv", "\n".join([OFFICIAL["QQP/train.tsv"][0], *["a"] * 4]), ":5: 1 columns")
    with pytest.raises(UserError, match="2 predictions, but the official CoLA test has 1063"):
        read_split(task_named("CoLA"), official, "test")


def test_a_task_is_one_row_in_one_file():
    """Nothing outside task.py names a GLUE task, so a new one touches that file alone."""
    names = [task.name for task in ALL_OF_BOTH if task.hub_repository == "nyu-mll/glue"]
    for path in Path(readers.__file__).parent.glob("*.py"):
        if path.name not in ("task.py", "submission.py"):
            text = path.read_text()
            assert not [name for name in names if f'"{name}"' in text], path
