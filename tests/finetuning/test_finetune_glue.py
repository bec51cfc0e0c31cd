"""GLUE: official tables and the Hub's are read alike, metrics are sklearn's, the zip fits."""

from pathlib import Path

import pytest
from data_helpers import run_main
from test_metrics_references import labeled

from deberta_ds.base.errors import UserError
from deberta_ds.tasks import metrics, submission
from deberta_ds.tasks.readers import read_split
from deberta_ds.tasks.submission import render
from deberta_ds.tasks.task import ALL_TASKS, GLUE, task_named

# A few rows of each task in the official form (written for this project): file -> lines.
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


TESTS = {task.name: labeled([None] * 3) for task in GLUE}


def lines_of(task, guesses=None) -> str:
    guesses = guesses or ([1.25, 3.0, 0.1] if task.head == "regress" else [0, 1, 1])
    return render(task, TESTS[task.name], guesses)


def test_the_zip_has_the_leaderboards_files_and_labels(tmp_path):
    file = tmp_path / "glue.zip"
    submission.write_zip(file, {task.name: lines_of(task) for task in GLUE}, TESTS, suite="GLUE")
    submission.check_zip(file, TESTS, suite="GLUE")
    import zipfile

    with zipfile.ZipFile(file) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert set(texts) == {"AX.tsv", "CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "MRPC.tsv", "QNLI.tsv",
                          "QQP.tsv", "RTE.tsv", "SST-2.tsv", "STS-B.tsv", "WNLI.tsv"}
    assert texts["CoLA.tsv"] == "index\tprediction\n0\t0\n1\t1\n2\t1\n"
    assert texts["STS-B.tsv"] == "index\tprediction\n0\t1.25\n1\t3.0\n2\t0.1\n"
    assert texts["MNLI-mm.tsv"].splitlines()[1] == "0\tcontradiction"
    assert texts["RTE.tsv"].splitlines()[2] == "1\tentailment"


def test_wrong_zips_are_refused(tmp_path):
    good = {task.name: lines_of(task) for task in GLUE}
    file = tmp_path / "glue.zip"
    with pytest.raises(UserError, match="no predictions for QQP"):
        submission.write_zip(file, {k: v for k, v in good.items() if k != "QQP"}, TESTS,
                             suite="GLUE")
    for text, message in ((lines_of(task_named("RTE")), "prediction must be 0 or 1"),
                          (good["CoLA"].splitlines()[0] + "\n", "1 predictions, the test set asks"),
                          ("[]\n", "CoLA.jsonl:1: not a prediction")):
        with pytest.raises(UserError, match=message):
            submission.write_zip(file, good | {"CoLA": text}, TESTS, suite="GLUE")
    file.write_bytes(b"PK")
    with pytest.raises(UserError, match="not a whole zip"):
        submission.check_zip(file, TESTS, suite="GLUE")
    assert not submission.is_label(task_named("STS-B"), "nan")


def test_a_task_is_one_row_in_one_file():
    """Nothing outside task.py names a GLUE task, so a new one touches that file alone."""
    package = Path(metrics.__file__).parent
    names = [task.name for task in ALL_TASKS if task.hub_repository == "nyu-mll/glue"]
    for path in package.glob("*.py"):
        if path.name not in ("task.py", "submission.py"):
            text = path.read_text()
            assert not [name for name in names if f'"{name}"' in text], path


def test_submit_py_makes_and_checks_the_zip(official, tmp_path):
    out = tmp_path / "predictions"
    out.mkdir()
    (out / "CoLA.jsonl").write_text('{"idx": 0, "label": 1}\n{"idx": 1, "label": 0}\n')
    others = [task.name for task in GLUE if task.name != "CoLA"]
    printed = run_main("launch/submit.py", "--suite", "GLUE", "--data", official, "--any_size",
                       "--run", out, "--zip", tmp_path / "g.zip", "--leave_out", *others)
    assert "1 files, checked" in printed
